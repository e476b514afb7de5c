# SPDX-License-Identifier: Apache-2.0
"""Vectors that come again are not parsed again, and what changed is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import HIDDEN, SHAPE
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.request import contents
from vllm.v1.interventions.frontend.request import memo as module
from vllm.v1.interventions.frontend.request.contents import Contents
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
    """A float32 of it is kept as the set has it, and no second time."""
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * HIDDEN * 4)
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


def test_entries_of_their_own_are_parsed_each_time() -> None:
    memo = VectorMemo()
    value = {"vector": torch.ones(HIDDEN), "scale": 2.0}
    assert parsed(memo, {"post_block": {1: value}}) is None


def test_lists_are_told_apart_by_types() -> None:
    """A list that equals a known one is refused, if True stands where 1.0 stood."""
    memo, numbers = VectorMemo(), [1.0] * HIDDEN
    first = parsed(memo, {"post_block": {1: numbers}})
    assert first is not None
    assert parsed(memo, {"post_block": {1: list(numbers)}}) is first
    whole = parsed(memo, {"post_block": {1: [1] * HIDDEN}})
    assert whole == first and whole is not first
    numbers[2] = True
    with pytest.raises(InterventionError, match=r"post_block\.1\[2\]: must be a number"):
        parsed(memo, {"post_block": {1: numbers}})


LAYERS: list[Any] = [0, 1, 2, 3, "0", "-1", np.int64(1), "all", "0-1", (0, 3), 9]
"""The last is out of range."""
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float32": torch.Tensor.float,
    "bfloat16": torch.Tensor.bfloat16,
    "float16": torch.Tensor.half,
    "float64": torch.Tensor.double,
    "strided": lambda v: torch.stack([v, v], 1)[:, 0],
    "strided bfloat16": lambda v: torch.stack([v, v], 1).bfloat16()[:, 0],
    "gradient": lambda v: v.clone().requires_grad_(),
    "gradient bfloat16": lambda v: v.bfloat16().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "negative": lambda v: torch.complex(v, -v).conj().imag,
    "numpy": lambda v: v.numpy().copy(),
    "numpy half": lambda v: v.numpy().astype(np.float16),
    "numpy double": lambda v: v.numpy().astype(np.float64),
    "numpy long": lambda v: v.numpy().astype(np.longdouble),
    "numpy swapped": lambda v: v.numpy().astype(">f4"),
    "numpy strided": lambda v: v.double().numpy()[::-1],
    "list": torch.Tensor.tolist,
    "tuple": lambda v: tuple(v.tolist()),
    "whole": lambda v: [*v.int().tolist()[:1], *v.tolist()[1:]],
    "large": lambda v: [1 << 62] * len(v),
}


def generated(seed: int) -> dict[str, Any]:
    """A tier as somebody may give it, now and then wrong."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    forms = rng.sample(sorted(FORMS), 1 + (rng.random() < 0.2))
    value: dict[str, Any] = {}
    for point in rng.sample(("pre_attn", "post_attn", "post_block"), rng.randint(1, 3)):
        value[point] = {}
        for layer in rng.sample(LAYERS, rng.choice([1, 1, 2, 3])):
            width = HIDDEN + (rng.random() < 0.02)
            numbers = torch.randn(width, generator=generator) * 10
            if rng.random() < 0.03:
                numbers[1] = rng.choice([float("nan"), float("inf"), 1e38])
            value[point][layer] = FORMS[rng.choice(forms)](numbers)
    return value


def made(parse: Callable[[], Any]) -> Any:
    """What is parsed, as the request goes on with it; or the error."""
    try:
        [(vectors, positions, vector_set)] = parse()
    except InterventionError as error:
        return str(error)
    assert positions is None
    rows = [(site, row.dtype, row.tolist()) for site, row in vectors.items()]
    with np.errstate(over="ignore"):
        return rows, vector_set or vector_set_of(vectors)


def agree(seed: int) -> tuple[str, bool]:
    """Assert that the memo makes of a tier what the parser makes, the first time and when it comes
    again. Returns the error, and whether the memo knows the set."""
    value, memo = generated(seed), VectorMemo()
    right = made(lambda: [(*one, None) for one in parse_vectors(value, "v", SHAPE, SELECT)])
    for _ in range(3):
        assert made(lambda: memo.parse(value, "v", SHAPE, SELECT)) == right
    return right if isinstance(right, str) else "", bool(memo._kept)


def test_the_memo_makes_what_the_parser_makes() -> None:
    seen = [agree(seed) for seed in range(800)]
    errors = [error for error, _ in seen if error]
    assert sum(known for _, known in seen) > 150
    for said in ("finite", "out of range", "the model needs", "already given", "has no point"):
        assert any(said in error for error in errors), said


@pytest.mark.parametrize("broken", ["order", "bytes", "types"])
def test_a_memo_that_reads_wrong_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites in another order, bytes in the other order, whole numbers taken for floats."""
    right = Contents.raw
    if broken == "order":
        monkeypatch.setattr(Contents, "raw", lambda self, order: right(self, sorted(order)))
    elif broken == "bytes":

        def swapped(self: Contents, order: Sequence[int]) -> bytes | None:
            raw = right(self, order)
            return raw and raw[::-1]

        monkeypatch.setattr(Contents, "raw", swapped)
    else:
        monkeypatch.setattr(contents, "_FLOAT", 0xCF)
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(800):
            agree(seed)
