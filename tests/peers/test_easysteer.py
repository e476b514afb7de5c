# SPDX-License-Identifier: Apache-2.0
"""Specifications of EasySteer at the doors: offline and over HTTP, open and shut."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.peers.easysteer import fields
from tests.support.plans import HIDDEN, config_of, plan_of
from vllm import SamplingParams
from vllm.entrypoints.compat import peers
from vllm.entrypoints.compat.doors import open_doors, read_args, read_fields
from vllm.entrypoints.serve.steering.body import set_plan_fields
from vllm.entrypoints.serve.steering.client import pack
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.plan import PLAN_FIELDS

pytestmark = pytest.mark.quick

SPECS = 10_000
V = np.arange(1.0, HIDDEN + 1, dtype=np.float32)
OPEN, SHUT = config_of(compat=["easysteer"]), config_of()
FUZZED = config_of(
    compat=["easysteer"], steering_families=["add", "ablate", "replace", "normalize"]
)


@dataclass
class VectorSpec:
    """As its users write them in Python."""

    data: Any
    layers: list[int]
    scale: float = 1.0
    normalize: bool = False
    params: dict[str, Any] | None = None


@dataclass
class SteeringSpec:
    """As above."""

    vectors: list[VectorSpec] = field(default_factory=list)
    conflict: str = "priority"


def test_its_own_objects_and_json_mean_the_same() -> None:
    spec = SteeringSpec([VectorSpec(V, [1, 2], 2.0, True)])
    as_json = {"vectors": [{"data": V, "layers": [1, 2], "scale": 2.0, "normalize": True}]}
    made = fields(spec)
    assert made["steering"][1:] == fields(as_json)["steering"][1:] != []
    params = SamplingParams(steering=spec)
    opened = read_args(params, OPEN)
    assert [op["op"] for op in opened.steering or ()] == ["add", "normalize"]
    assert params.steering is spec, "the caller's object is not changed"
    with pytest.raises(InterventionError, match=r"^steering: is for EasySteer.*--compat easysteer"):
        read_args(params, SHUT)


def test_over_http_arrays_may_be_packed() -> None:
    vector = {"data": pack(V), "layers": [1]}
    asked = {"steering": {"vectors": [vector]}, "capture": {"inline": {}}}
    params = SamplingParams()
    made = read_fields(asked, OPEN)
    set_plan_fields(params, made)
    assert params.steering is not None
    [op] = params.steering
    np.testing.assert_array_equal(op["vector"], V)
    assert params.capture == {"inline": {}}
    peers.refuse_peer_fields(asked, OPEN)
    assert read_fields(asked, SHUT) is asked
    with pytest.raises(InterventionError, match="EasySteer"):
        peers.refuse_peer_fields(asked, SHUT)
    ours = {"steering": [{"op": "add"}]}
    assert read_fields(ours, OPEN) is ours


def engine(compat: list[str]) -> Any:
    return SimpleNamespace(
        compat=compat, enable_steering=False, steering_families=["add"], capture_consumers=[]
    )


def test_the_door_turns_on_what_it_needs() -> None:
    args = engine(compat=["easysteer"])
    open_doors(args)
    assert args.enable_steering and args.capture_consumers == []
    assert {"ablate", "replace", "normalize"} <= set(args.steering_families)
    plain = engine(compat=[])
    open_doors(plain)
    assert not plain.enable_steering and plain.steering_families == ["add"]


JUNK: list[Any] = [
    None, True, -1, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../../etc/passwd", [], [[]],
    {}, {"a": 1}, [10**9], [True], "KLUv", {"dtype": "object", "shape": [1], "data": "gASVBAA="},
]  # fmt: skip


def right(rng: random.Random, width: int) -> dict[str, Any]:
    """A specification as a body has it."""
    vector: dict[str, Any] = {
        "data": pack(np.ones(width, np.float32)), "layers": [0, 1], "scale": 2.0,
        "algorithm": "direct", "normalize": False,
        "apply": {"prompt_positions": [0, 2], "generation": "all"},
    }  # fmt: skip
    if rng.random() < 0.3:
        vector["data"] = {"0": [0.5] * width, "1": [0.5] * width}
    return {"vectors": [vector, copy.deepcopy(vector)], "conflict": "sequential"}


def broken(rng: random.Random, width: int = HIDDEN) -> dict[str, Any]:
    """A specification with one thing wrong wherever it stands."""
    spec = right(rng, width)
    vector = rng.choice(spec["vectors"])
    target = rng.choice([spec, vector, vector, vector["apply"], vector["data"]])
    key = rng.choice(list(target))
    match rng.randrange(4):
        case 0 if key in ("data", "layers", "vectors", "dtype", "shape"):
            del target[key]
        case 1 if isinstance(target[key], str) and len(target[key]) > 8:
            cut = rng.randrange(len(target[key]) - 1)
            target[key] = rng.choice([target[key][:cut], target[key][:cut] + "*", target[key] * 2])
        case 2:
            target[rng.choice(["pickle", "path", "__class__", "params"])] = "/etc/passwd"
        case _:
            target[key] = rng.choice(JUNK)
    return spec


def planned(asked: dict[str, Any]) -> Any:
    """The plan of a body."""
    params = SamplingParams()
    set_plan_fields(params, read_fields(asked, FUZZED))
    fields = {f: v for f in PLAN_FIELDS if (v := getattr(params, f)) is not None}
    return plan_of(config=FUZZED, **fields)


def test_malformed_specifications_are_refused_by_name() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(SPECS):
        asked = {"steering": broken(rng)}
        try:
            planned(asked)
        except InterventionError as error:
            assert error.parameter is not None and error.parameter.startswith("steering")
            assert str(error).startswith(f"{error.parameter}: ") and len(str(error)) < 400
            refused += 1
    assert refused > 0.8 * SPECS, refused
    plan = planned({"steering": right(rng, HIDDEN)})
    assert plan is not None and plan.steering is not None  # the twin
