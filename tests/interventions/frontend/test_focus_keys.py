# SPDX-License-Identifier: Apache-2.0
"""Blocks of focused requests are shared exactly where all that was focused is the same: the keys
of the span which were there, not those that come later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HEADS, config_of, steering_of
from vllm.v1.interventions.scheduler.identity import BlockIdentity

pytestmark = pytest.mark.quick

PROMPT, LENGTH, BLOCK = 9, 16, 4
CONFIG = config_of(HEADS, steering_families=["add", "focus"], max_steering_configs=64)


@dataclass(frozen=True)
class Asked:
    """One focus at one layer."""

    layer: int
    heads: tuple[int, ...]
    number: tuple[str, float]
    span: frozenset[int]
    queries: frozenset[int] | None

    def entry(self) -> dict[str, Any]:
        """As a request gives it."""
        heads, (rule, number) = {self.layer: list(self.heads)}, self.number
        entry = {"op": "focus", "heads": heads, rule: number, "span": sorted(self.span)}
        return entry if self.queries is None else entry | {"positions": sorted(self.queries)}

    def at(self, position: int) -> Any:
        """What it does to a token's row; None for nothing."""
        seen = frozenset(key for key in self.span if key <= position)
        acts = self.queries is None or position in self.queries
        return (self.layer, self.heads, self.number, seen) if seen and acts else None


RUNS = st.builds(
    lambda start, size, others: frozenset(range(start, min(start + size, LENGTH))) | others,
    st.integers(0, LENGTH - 1),
    st.sampled_from([1, 2, 3, 6, LENGTH]),
    st.frozensets(st.integers(0, LENGTH - 1), max_size=2),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "heads": st.sampled_from([(0,), (0, 2)]),
    "number": st.sampled_from([("factor", 2.0), ("factor", 0.5), ("share", 0.5)]),
    "span": RUNS,
    # The last row is always among them: some key of the span is there by then.
    "queries": st.none() | RUNS.map(lambda queries: queries | {LENGTH - 1}),
}
ASKED = st.builds(Asked, st.just(0), *FIELDS.values())


CHANGED = [(), ("span",), ("span",), ("heads",), ("number",), ("queries",), ("span", "queries")]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Asked], list[Asked]]:
    """Two requests that differ in a few fields, or in none."""
    one = draw(st.lists(ASKED, min_size=1, max_size=2))
    one = [replace(asked, layer=layer) for layer, asked in enumerate(one)]
    other = list(one)
    for i in range(len(one)):
        for name in draw(st.sampled_from(CHANGED)):
            new = draw(FIELDS[name])
            if name == "span":  # the same up to a key, as of prompts that differ later
                first = draw(st.integers(0, LENGTH))
                before = {key for key in other[i].span if key < first}
                behind = draw(st.sampled_from([new, frozenset(range(LENGTH)), frozenset()]))
                new = frozenset(before | {key for key in behind if key >= first}) or new
            other[i] = replace(other[i], **{name: new})
    return one, draw(st.sampled_from([other, other, other[:1], []]))


def keys_of(request: list[Asked]) -> list[Any]:
    """The keys of each block."""
    plan = None
    if request:
        asked = {"steering": [asked.entry() for asked in request]}
        plan = steering_of(config=CONFIG, prompt=PROMPT, max_tokens=LENGTH + 1 - PROMPT, **asked)
    blocks = BlockIdentity(plan, PROMPT)
    return [blocks.keys(start, start + BLOCK) for start in range(0, LENGTH, BLOCK)]


@given(pairs())
def test_equal_keys_exactly_where_the_focus_is_equal(pair: tuple[list[Asked], list[Asked]]) -> None:
    keys, rows = zip(*[(keys_of(one), rows_of(one)) for one in pair], strict=True)
    for key, other, first, second in zip(*keys, *rows, strict=True):
        assert (key == other) == (first == second)
        assert (key == []) == (not any(any(row) for row in first))


def rows_of(request: list[Asked]) -> list[list[list[Any]]]:
    """What acts on each position of each block."""
    at = [[done for a in request if (done := a.at(p)) is not None] for p in range(LENGTH)]
    return [at[start : start + BLOCK] for start in range(0, LENGTH, BLOCK)]
