# SPDX-License-Identifier: Apache-2.0
"""Specifications of interp-engine: as its package makes them, against our operations; at the doors,
offline and over HTTP, open and shut.

`python -m tests.peers.test_interp_engine` writes `interp_engine.json` anew with its package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from examples.peers.interp_engine import capture, fields
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE
from tests.http.server import save_model
from tests.peers.call import PROMPT, V, W
from tests.peers.packages import fetched, folder_of
from tests.support.op_reference import apply_site
from tests.support.plans import HIDDEN, config_of
from tests.support.serving import relative
from vllm import SamplingParams
from vllm.config.points import CAPTURE_POINTS, STEERING_POINTS
from vllm.entrypoints.serve.steering.body import set_plan_fields
from vllm.entrypoints.serve.steering.packed import read_array
from vllm.inputs import TokensPrompt
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.compat import interp_engine, peers
from vllm.v1.interventions.frontend.compat.doors import read_args, read_fields

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

HERE = Path(__file__).parent
PROGRAM, STORED = HERE / "interp_engine_program.py", HERE / "interp_engine.json"
VECTOR = np.arange(1.0, HIDDEN + 1, dtype=np.float32)
OPEN, SHUT = config_of(compat=["interp-engine"]), config_of()
ADDRESSES = [
    f"{name}.{layer}"
    for name in (
        "resid_pre", "resid_mid", "resid_post", "z", "attn_out_post", "mlp_in", "mlp_out_post",
    )
    for layer in range(4)
] + ["final_norm"]  # fmt: skip
ADDED = {"resid_pre": V, "mlp_in": V, "attn_out_post": V, "mlp_out_post": V}


def run(package: Path, *given: str | Path) -> None:
    """Run `PROGRAM` with its package, in a process of its own."""
    done = subprocess.run(
        [sys.executable, PROGRAM, *given],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(package)},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def applied(rows: np.ndarray, ops: list[dict[str, Any]]) -> np.ndarray:
    arrays = [
        {k: np.asarray(v, np.float64) if isinstance(v, list) else v for k, v in op.items()}
        for op in ops
    ]
    return apply_site(rows, np.zeros_like(rows), arrays, len(rows))


def test_its_rows_are_those_of_our_operations() -> None:
    stored = json.loads(STORED.read_text())
    rows = np.array(stored.pop("rows"))
    assert len(stored) > 10
    for name, case in stored.items():
        ops = fields(case["spec"])["steering"]
        assert {(op["point"], *op["layers"]) for op in ops} == {("post_block", 1)}
        made, want = applied(rows, ops), np.array(case["rows"])
        moved = np.linalg.norm(want - rows)
        assert np.linalg.norm(made - want) <= 2e-6 * np.linalg.norm(want), name
        assert moved >= 0.02 * np.linalg.norm(rows), name  # the twin
        for sent in (case["sent"], case["packed"]):
            taken = interp_engine.fields_of(sent, read=read_array)["steering"]
            unpacked = [{k: read_array(v, k) for k, v in op.items()} for op in taken]
            for one, other in zip(map(dict, ops), unpacked, strict=True):
                assert one.keys() == other.keys()
                assert (one.pop("op"), one.pop("point")) == (other.pop("op"), other.pop("point"))
                for key in one:
                    np.testing.assert_allclose(one[key], other[key], rtol=1e-6)


@dataclass
class AddSpec:
    """As its users write them in Python."""

    vector: Any
    scale: float
    normalize: bool = False


@dataclass
class LayerSteeringSpec:
    """As above."""

    operations: list[AddSpec] = field(default_factory=list)


@dataclass
class SteeringSpec:
    """As above."""

    layers: dict[int, LayerSteeringSpec] = field(default_factory=dict)
    point: str = "resid_post"
    stream: int | None = None


SPEC = SteeringSpec({1: LayerSteeringSpec([AddSpec(VECTOR, 2.0)])}, "resid_pre")
OURS = {"op": "add", "point": "pre_attn", "layers": [1], "scale": 2.0}
SENT = [
    {
        "point": "resid_pre",
        "layers": {"1": [{"method": "additive", "vector": VECTOR.tolist(), "scale": 2.0}]},
    }
]


@pytest.mark.parametrize("given", [SPEC, [SPEC], SENT, SENT[0]], ids=lambda given: type(given))
def test_objects_and_json_at_the_door(given: Any) -> None:
    params = SamplingParams(steering=given, capture={"inline": {"hooks": ["resid_post.1"]}})
    opened = read_args(params, OPEN)
    assert opened.steering is not None
    [op] = opened.steering
    assert {key: value for key, value in op.items() if key != "vector"} == OURS
    np.testing.assert_array_equal(op["vector"], VECTOR)
    assert opened.capture == {"inline": {"hooks": {"post_block": [1]}}}
    assert params.steering is given, "the caller's object is not changed"
    with pytest.raises(InterventionError, match=r"^steering: is for interp-engine.*--compat inter"):
        read_args(params, SHUT)


def test_over_http() -> None:
    """Its tensors may be packed; what its server reads beside is refused."""
    asked: dict[str, Any] = {"steering": SENT, "capture": {"inline": {"hooks": ["final_norm"]}}}
    params = SamplingParams()
    set_plan_fields(params, read_fields(asked, OPEN, read=read_array))
    assert params.steering is not None and params.steering[0]["op"] == "add"
    assert params.capture == {"inline": {"hooks": {"final": [-1]}}}
    peers.refuse_peer_fields(asked, OPEN)
    peers.refuse_peer_fields({**asked, "steer_generated": True}, OPEN)
    assert read_fields(asked, SHUT) is asked
    for extra, config, path in (
        ({}, SHUT, "steering"),
        ({"steer_generated": False}, OPEN, "steer_generated"),
        ({"points": ["resid_post.1"]}, OPEN, "points"),
    ):
        with pytest.raises(InterventionError, match=f"^{path}: is for interp-engine"):
            peers.refuse_peer_fields({**asked, **extra}, config)
    ours = {"steering": [OURS], "capture": {"inline": {"hooks": {"post_block": [1]}}}}
    assert read_fields(ours, OPEN) is ours
    with pytest.raises(InterventionError, match=r"^steering_vectors: cannot be combined"):
        read_fields({**asked, "steering_vectors": {}}, OPEN)


@pytest.mark.long
def test_the_stored_rows_are_its_own(tmp_path: Path) -> None:
    run(folder_of("interp-engine"), "formulas", tmp_path / "made.json")
    assert json.loads((tmp_path / "made.json").read_text()) == json.loads(STORED.read_text())


@pytest.mark.long
def test_its_eager_backend(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Each point of a model, plain and under each operation, with the prompt's rows."""
    folder = save_model(tiny_models, tmp_path / "m")
    heads = torch.cat([V, W])[:128]
    torch.save(
        {"ids": PROMPT, "points": ADDRESSES, "v": V, "w": W, "added": {**ADDED, "z": heads}},
        tmp_path / "asked.pt",
    )
    run(folder_of("interp-engine"), "model", folder, tmp_path / "asked.pt", tmp_path / "out.pt")
    theirs = torch.load(tmp_path / "out.pt", weights_only=True)
    specs = theirs.pop("specs")
    llm = make_llm(
        folder,
        compat=["interp-engine"],
        max_steering_ops=8,
        steering_points=list(STEERING_POINTS),
        capture_points=list(CAPTURE_POINTS),
        enable_prefix_caching=False,
    )
    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    for name, want in theirs.items():
        params = SamplingParams(
            max_tokens=1,
            detokenize=False,
            capture=capture(ADDRESSES, "all_prompt"),
            steering=specs.get(name),
        )
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.capture_results is not None
        rows = output.capture_results["inline"].payload
        assert rows and len(rows) == len(ADDRESSES)
        moved = 0.0
        for address in ADDRESSES:
            ((point, layers),) = capture([address])["inline"]["hooks"].items()
            values = rows[point, 3 if point == "final" else layers[0]].values.flatten(1)
            assert values.shape == want[address].shape
            if point in ("attn_out", "mlp_out") and layers == [1] and name != "plain":
                continue  # ours has what is added behind the branch
            assert relative(values, want[address]) <= READ_TOLERANCE + WRITE_TOLERANCE, (
                name,
                address,
            )
            moved = max(moved, relative(want[address], theirs["plain"][address]))
        assert (name == "plain") == (moved < LEAST_MOVE)
    shut_down(llm)


if __name__ == "__main__":
    run(fetched("interp-engine"), "formulas", STORED)
