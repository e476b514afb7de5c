# SPDX-License-Identifier: Apache-2.0
"""Vectors that come again are not parsed again, and what changed is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.plans import HIDDEN, SHAPE
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.request import memo as module
from vllm.v1.interventions.frontend.request.memo import KEPT, VectorMemo
from vllm.v1.interventions.plan import VectorSet
from vllm.v1.interventions.vectors import parse_vectors, vector_set_of

pytestmark = pytest.mark.quick

SELECT: Any = None
"""Nothing here limits positions."""


def parsed(memo: VectorMemo, value: Any) -> VectorSet | None:
    [(_, positions, vector_set)] = memo.parse(value, "steering_vectors", SHAPE, SELECT)
    assert positions is None
    return vector_set


def content(scale: float = 1.0, kind: str = "torch") -> dict[str, Any]:
    vector = scale * torch.arange(1, HIDDEN + 1).float()
    return {"post_block": {1: vector.clone() if kind == "torch" else vector.numpy().copy()}}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_equal_contents_are_one_set(kind: str) -> None:
    memo = VectorMemo()
    first, again, other = (parsed(memo, content(x, kind)) for x in (1.0, 1.0, 2.0))
    assert first is not None
    assert first is again
    assert other is not None
    assert first.digest != other.digest
    [(vectors, _)] = parse_vectors(content(1.0, kind), "", SHAPE, SELECT)
    assert vector_set_of(vectors) == first


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_what_is_changed_in_place_is_seen(kind: str) -> None:
    memo, value = VectorMemo(), content(1.0, kind)
    before = parsed(memo, value)
    value["post_block"][1][2] = 7.0
    after = parsed(memo, value)
    assert before is not None
    assert after is not None
    assert before.rows[0][2] == 3.0
    assert after.rows[0][2] == 7.0


def test_other_sites_and_dtypes_are_other_contents() -> None:
    memo, vector = VectorMemo(), torch.ones(HIDDEN)
    values: list[dict[str, Any]] = [
        {"post_block": {1: vector}},
        {"post_block": {3: vector}},
        {"pre_attn": {1: vector}},
        {"post_block": {1: vector.double()}},
    ]
    sets = [parsed(memo, value) for value in values]
    assert len({id(s) for s in sets}) == 4
    assert len({s.digest for s in sets if s is not None}) == 3
    assert all(parsed(memo, value) is s for value, s in zip(values, sets, strict=True))


def test_what_is_refused_stays_refused() -> None:
    """True equals 1, and is no layer."""
    memo, vector = VectorMemo(), torch.ones(HIDDEN)
    assert parsed(memo, {"post_block": {1: vector}})
    with pytest.raises(InterventionError, match="layer"):
        parsed(memo, {"post_block": {True: vector}})
    for _ in range(2):
        with pytest.raises(InterventionError, match="finite"):
            parsed(memo, {"post_block": {1: vector * float("nan")}})


def test_only_the_latest_are_kept() -> None:
    memo = VectorMemo()
    first = parsed(memo, content())
    for scale in range(2, KEPT + 1):
        parsed(memo, content(float(scale)))
    assert parsed(memo, content()) is first
    parsed(memo, content(KEPT + 1.0))
    again = parsed(memo, content())
    assert again == first
    assert again is not first


def test_only_so_many_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 of it is kept as it came, as float64, and as the set has it."""
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * HIDDEN * (4 + 8 + 4))
    memo = VectorMemo()
    first, second = (parsed(memo, content(scale)) for scale in (1.0, 2.0))
    assert parsed(memo, content(1.0)) is first
    parsed(memo, content(3.0))
    assert parsed(memo, content(2.0)) is second
    assert parsed(memo, content(1.0)) is not first
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    largest = parsed(memo, content(4.0))
    assert parsed(memo, content(4.0)) is largest, "one is, whatever its size"


def test_alike_but_for_the_middle() -> None:
    """What contents are found by is the same: the later takes the place of the earlier."""

    def three(number: float) -> dict[str, Any]:
        rows = torch.ones(3, HIDDEN)
        rows[1] = number
        return {"pre_attn": {1: rows[0]}, "post_block": {1: rows[1], 3: rows[2]}}

    memo = VectorMemo()
    sets = [parsed(memo, three(number)) for number in (5.0, 7.0, 5.0, 5.0)]
    assert [s.rows[1][0] for s in sets if s is not None] == [5.0, 7.0, 5.0, 5.0]
    assert sets[0] is not sets[2] and sets[2] is sets[3]


def test_what_torch_cannot_compare_is_parsed_each_time() -> None:
    memo = VectorMemo()
    value = {"post_block": {1: torch.ones(HIDDEN).to(torch.float8_e4m3fn)}}
    for _ in range(2):
        [(vectors, _, vector_set)] = memo.parse(value, "steering_vectors", SHAPE, SELECT)
        assert vector_set is None
        assert vectors["post_block", 1].tolist() == [1.0] * HIDDEN


def test_lists_are_parsed_each_time() -> None:
    """So are entries with a scale or positions of their own."""
    memo = VectorMemo()
    for value in ([1.0] * HIDDEN, {"vector": torch.ones(HIDDEN), "scale": 2.0}):
        assert parsed(memo, {"post_block": {1: value}}) is None
