# SPDX-License-Identifier: Apache-2.0
"""The provider `vllm-steer/` under the real inspect-ai, in a process of its own: samples that steer
and capture, what the logs say of that, and the same with a LoRA adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests import ROOT
from tests.conformance.models import HIDDEN
from tests.http.server import NAME, OPTIONS, save_model, serve
from tests.peers.inspect_task import (
    ADAPTED,
    CASES,
    EPOCHS,
    LAYER,
    MODEL,
    PROMPTS,
    SITES,
)
from tests.peers.inspect_task import ROOT as ON_SERVER
from tests.peers.packages import folder_of
from tests.support.serving import relative, vector
from vllm.entrypoints.serve.steering.client import Rows, SteeringClient

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long


class Ran:
    """What the tasks left."""

    def __init__(self, folder: Path, asked: dict[str, dict[tuple[str, int], Rows]]) -> None:
        self.folder, self.asked = folder, asked
        self.said: dict[str, Any] = json.loads((folder / "said.json").read_text())
        self.arrays = np.load(folder / "rows.npz")

    def rows(self, case: str, sample: int, layer: int) -> np.ndarray:
        found: np.ndarray = self.arrays[f"{case}/{sample}/post_block/{layer}"]
        return found

    def log(self, case: str) -> str:
        return Path(self.said[case]["log"]).read_text()


def adapter(folder: Path) -> Path:
    """A LoRA adapter of rank 2 of the tiny model: random, large enough to be seen."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        for part, shape in (("lora_A", (2, HIDDEN)), ("lora_B", (HIDDEN, 2))):
            weights[f"{name}.{part}.weight"] = torch.randn(shape, generator=generator)
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["o_proj"],
        "base_model_name_or_path": "tiny", "bias": "none", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def ran(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    assert NAME == MODEL
    package = folder_of("inspect")
    folder = tmp_path_factory.mktemp("inspect")
    lora = adapter(folder / "adapter")
    options = (
        "--enable-lora", "--max-lora-rank=8", f"--lora-modules=adapted={lora}",
        f"--capture-consumers=filesystem:root={folder / ON_SERVER}",
    )  # fmt: skip
    model = save_model(tiny_models, folder / "model")
    with serve(model, folder / "log", *options, base=OPTIONS) as server:
        path = os.pathsep.join([str(package), str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "tests.peers.inspect_task", server.url, str(folder)],
            env={**os.environ, "PYTHONPATH": path, "OPENAI_API_KEY": "none"},
            capture_output=True, text=True, check=False, timeout=1800, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        client = SteeringClient(server.url, model=NAME)
        fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **CASES["held"][1]}
        asked = {
            prompt: client.complete([{"role": "user", "content": prompt}], **fields).rows
            for prompt in PROMPTS
        }
    return Ran(folder, asked)


@pytest.mark.parametrize("case", ["steered", "held", "on server"])
def test_rows_of_a_log_are_the_clients(ran: Ran, case: str) -> None:
    """Wherever they are kept."""
    outputs = ran.said[case]["outputs"]
    assert len(outputs) == len(PROMPTS) * EPOCHS
    for i, (prompt, metadata) in enumerate(outputs):
        (kept,) = metadata["capture"]
        if case == "on server":
            (path,) = kept["filesystem"]["payload"]["paths"]
            assert list(kept) == ["filesystem"] and (ran.folder / ON_SERVER / path).exists()
        else:
            assert kept["inline"]["status"] == "ok"
            assert [(s[0], int(s[1])) for s in kept["inline"]["sites"]] == SITES
        for point, layer in SITES:
            found, want = ran.rows(case, i, layer), ran.asked[prompt][point, layer]
            assert np.array_equal(found, want.values)
            first = torch.tensor(found[:1])
            assert relative(torch.tensor(ran.rows("plain", i, layer)[:1]), first) >= 0.01
            tokens = ran.arrays[f"{case}/{i}/{point}/{layer}/tokens"].tolist()
            assert tokens == (list(want.tokens) if case == "held" else [])


def test_rows_in_memory_are_not_in_the_log(ran: Ran) -> None:
    for i, (_, metadata) in enumerate(ran.said["held"]["outputs"]):
        sha256 = metadata["capture"][0]["inline"]["sha256"]
        for point, layer in SITES:
            seen = ran.arrays[f"{sha256}/{point}/{layer}"]
            assert np.array_equal(seen, ran.rows("held", i, layer)) and len(seen) > 1
        assert metadata.get("rows") is None
    assert not any(f'"{word}"' in ran.log("held") for word in ("data", "values", "versions"))


def test_logs_have_references_and_no_arrays(ran: Ran) -> None:
    """And say what steered: scales are told apart."""
    digests = set()
    for case in ("plain", "steered"):
        log = ran.log(case)
        (digest,) = {metadata["steering_digest"] for _, metadata in ran.said[case]["outputs"]}
        digests.add(digest)
        assert digest in log and '"sha256"' in log and '"data"' not in log
        assert f"{float(vector(31)[0]):.6f}"[:7] not in log
    assert len(digests) == 2
    files = list((ran.folder / "captures").glob("*.safetensors"))
    of_all = {
        m["capture"][0]["inline"]["sha256"]
        for name, case in ran.said.items()
        for _, m in (case["outputs"] if name != "on server" else ())
    }
    assert {file.stem for file in files} == of_all, "the same rows are one file"


def test_lora_and_steering_together(ran: Ran) -> None:
    """The rows of an adapter are not those of the model, and a vector moves both by itself."""
    assert CASES["adapted"][0] == ADAPTED
    rows = {case: torch.tensor(ran.rows(case, 0, LAYER)[:1]) for case in list(CASES)[:4]}
    for plain, steered in (("plain", "steered"), ("adapted", "adapted, steered")):
        assert relative(rows[steered] - rows[plain], vector(31)[None]) <= 1e-4
    assert relative(rows["adapted"], rows["plain"]) >= 0.01


def test_what_is_refused_names_the_field(ran: Ran) -> None:
    for case, words in {
        "refused": "steering_modules[0]: unknown module",
        "not kept": "extra_body.capture.inline.attention: vllm-steer keeps rows alone",
        "kept twice": "extra_body.capture: rows=server asks filesystem",
        "elsewhere": "rows: must be 'refs', 'memory' or 'server', got 'elsewhere'",
    }.items():
        assert words in ran.said[case]["error"]


def test_the_server_does_not_need_inspect() -> None:
    program = (
        "import sys; sys.modules['inspect_ai'] = None\n"
        "import vllm.v1.interventions.frontend.compat.doors\n"
        "import vllm.entrypoints.serve.steering.serving"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=1800)
