# SPDX-License-Identifier: Apache-2.0
"""Numbers, strings and lists as people have them make the plan that Python's own make."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.plans import HIDDEN, VECTOR, config_of, plan_of
from vllm.v1.interventions.values import plain, plain_list

pytestmark = pytest.mark.quick


class Layer(enum.IntEnum):
    LAST = 3


class Point(str, enum.Enum):  # noqa: UP042 - of these `str` gives the name
    BLOCK = "post_block"


class Indexed:
    """A number only by `operator.index`."""

    def __index__(self) -> int:
        return 3


def sent(**fields: Any) -> bytes:
    """The plan of a request as it is sent to the engine core."""
    config = config_of(
        steering_families=["add", "replace"], capture_consumers=["inline", "filesystem:root=/tmp/a"]
    )
    plan = plan_of(config=config, **fields)
    return msgspec.msgpack.encode(plan)


def steer(
    layer: Any = 3, scale: Any = 0.5, positions: Any = (1, 2), point: Any = "post_block"
) -> dict[str, Any]:
    entry = {"vector": VECTOR, "scale": scale, "positions": positions}
    return {"steering_vectors": {point: {layer: entry}}}


def capture(
    layers: Any = (0, 3), positions: Any = (1, 2), name: Any = "inline", **own: Any
) -> dict[str, Any]:
    hooks = {"post_block": layers}
    return {"capture": {name: {"hooks": hooks, "positions": positions, **own}}}


def replace(positions: Any = (1, 2), layers: Any = 3) -> dict[str, Any]:
    op = {"op": "replace", "point": "post_block", "layers": layers, "positions": positions}
    return {"steering": [{**op, "values": [VECTOR, [2.0] * HIDDEN]}]}


TOKENS = {"token_ids": [101, 102]}


@pytest.mark.parametrize(
    ("given", "same", "other"),
    [
        (steer(np.int64(3)), steer(3), steer(1)),
        (steer(Layer.LAST), steer(3), steer(1)),
        (steer(Indexed()), steer(3), steer(1)),
        (steer(-1), steer(3), steer(-3)),
        (steer("-3"), steer(1), steer(3)),
        (steer(range(3)), steer("0-2"), steer(range(2))),
        (steer(scale=np.float32(0.5)), steer(), steer(scale=np.float32(0.25))),
        (steer(scale=np.array(0.5)), steer(), steer(scale=np.array(0.25))),
        (steer(scale=torch.tensor(0.5)), steer(), steer(scale=torch.tensor(0.25))),
        (steer(scale=np.int8(2)), steer(scale=2), steer(scale=1)),
        (steer(positions=np.array([1, 2])), steer(), steer(positions=np.array([1, 3]))),
        (steer(point=np.str_("post_block")), steer(), steer(point=np.str_("pre_attn"))),
        (steer(point=Point.BLOCK), steer(), steer(point="pre_attn")),
        (capture(np.array([0, 3])), capture(), capture(np.array([0, 2]))),
        (capture(torch.tensor([0, 3])), capture(), capture(torch.tensor([0, 2]))),
        (capture(range(0, 4, 3)), capture(), capture(range(0, 4, 2))),
        (capture([0, -1]), capture(), capture([0, -2])),
        (capture(positions=range(1, 3)), capture(), capture(positions=range(1, 4))),
        (capture(positions=torch.tensor([1, 2])), capture(), capture(positions=[1])),
        (capture(positions=[np.uint8(1), Indexed()]), capture(positions=[1, 3]), capture()),
        (
            capture(positions={"start": np.int32(1), "stop": 3}),
            capture(),
            capture(positions={"start": np.int32(2), "stop": 3}),
        ),
        (
            capture(positions={"token_ids": np.array([101, 102])}),
            capture(positions=TOKENS),
            capture(positions={"token_ids": np.array([101])}),
        ),
        (
            capture(positions=np.str_("all")),
            capture(positions="all"),
            capture(positions=np.str_("predicting")),
        ),
        (capture(name=np.str_("inline")), capture(), capture(name="filesystem")),
        (
            capture(name="filesystem", tag=np.str_("a")),
            capture(name="filesystem", tag="a"),
            capture(name="filesystem", tag="b"),
        ),
        (replace(np.array([1, 2])), replace(), replace(np.array([2, 1]))),
        (replace(range(1, 3), np.int64(3)), replace(), replace(range(2, 4))),
        (
            {"steering_vectors": {"pre_attn": {0: [np.float32(x) for x in VECTOR]}}},
            {"steering_vectors": {"pre_attn": {0: tuple(VECTOR)}}},
            {"steering_vectors": {"pre_attn": {0: [np.float32(1)] * HIDDEN}}},
        ),
    ],
)
def test_what_is_sent_is_the_same(given: Any, same: Any, other: Any) -> None:
    """And another value is another plan: nothing is lost on the way."""
    assert sent(**given) == sent(**same)
    assert sent(**given) != sent(**other)


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (True, bool), (np.bool_(True), bool), (torch.tensor(True), bool), (np.int16(1), int),
        (torch.tensor(1), int), (np.float16(1), float), (torch.tensor(1.0), float),
        (np.array(1), int), (np.str_("1"), str), (None, type(None)),
    ],
)  # fmt: skip
def test_plain_values_are_pythons_own(value: Any, made: type) -> None:
    """A bool stays one, so that it is no layer."""
    assert type(plain(value)) is made


@pytest.mark.parametrize(
    "value",
    [
        np.array([1]), torch.tensor([1]), np.complex64(1), np.datetime64("2026-01-01"), [1], object,
        torch.tensor(1.0, device="meta"),
    ],
)  # fmt: skip
def test_other_values_are_left_as_they_are(value: Any) -> None:
    assert plain(value) is value


@pytest.mark.parametrize(
    "value",
    ["ab", {1: 2}, {1}, np.array([1.0]), np.array([True]), np.array([[1]]), np.array(1), iter([1]),
     torch.tensor([1.0]), torch.tensor([True]), torch.tensor(1)],
)  # fmt: skip
def test_what_is_no_list_of_integers(value: Any) -> None:
    assert plain_list(value) is None
