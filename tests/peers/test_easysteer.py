# SPDX-License-Identifier: Apache-2.0
"""Specifications of EasySteer at the doors: offline and over HTTP, open and shut."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.peers.easysteer import fields
from tests.support.plans import HIDDEN, config_of
from vllm import SamplingParams
from vllm.config.compat import open_doors
from vllm.entrypoints.serve.steering.body import set_plan_fields
from vllm.entrypoints.serve.steering.client import pack
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.compat import peers
from vllm.v1.interventions.frontend.compat.doors import read_args, read_fields

pytestmark = pytest.mark.quick

V = np.arange(1.0, HIDDEN + 1, dtype=np.float32)
OPEN, SHUT = config_of(compat=["easysteer"]), config_of()


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
