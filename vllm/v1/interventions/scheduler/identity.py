# SPDX-License-Identifier: Apache-2.0
"""Contribution of steering to the identity of a request's prefix-cache blocks."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from vllm.v1.interventions.plan import UNSTEERED, SteeringPlan
from vllm.v1.interventions.vectors import sum_digest


@dataclass(frozen=True)
class Era:
    """The global tiers that positions from `first` on run under."""

    first: int
    prefill: tuple[str, ...]
    """Digests of the vector sets that are added at prompt positions, in that order."""
    decode: tuple[str, ...]
    """Digests of those that are added at generated positions."""
    nonce: str = ""
    """Makes the blocks of this era the request's own, where it is not known which side of a change
    a position is on."""


NO_GLOBALS = Era(0, (), ())
"""The era of an engine whose global tiers were never set."""


_NEVER_SET = [NO_GLOBALS]
_UNSTEERED = [(0, UNSTEERED)]


class BlockIdentity:
    """Segments of a request by what acts in them, (first position, digest), and block keys made
    of them.

    Args:
        plan: None for a plain request.
        num_prompt_tokens: where the phase changes; a property of positions, not of steps.
    """

    def __init__(self, plan: SteeringPlan | None, num_prompt_tokens: int) -> None:
        self._prompt = num_prompt_tokens
        self._sums = [] if plan is None else plan.sums
        self._rows: dict[tuple[str, tuple[str, ...]], str] = {}
        self._inherits = plan is None or plan.inherit
        self._eras = _NEVER_SET
        if plan is None:
            self._own = [(0, UNSTEERED, UNSTEERED), (num_prompt_tokens, UNSTEERED, UNSTEERED)]
            self._segments = _UNSTEERED  # as they are merged, and a new list is not needed
            return
        self._own = [
            (s.first, s.vector_sum, _join(s.program, s.focus_key) if s.focus_key else s.program)
            for s in plan.segments
        ]
        self._segments = self._merged()

    @property
    def steers(self) -> bool:
        """True if anything acts at any position."""
        return any(digest for _, digest in self._segments)

    def restart(self, era: Era) -> bool:
        """Have all positions run, or run again, under `era`. Returns whether anything changed."""
        return self._set([era])

    def change(self, eras: list[Era]) -> bool:
        """Have positions from the first of `eras` on run under those. Whether anything changed."""
        return self._set([e for e in self._eras if e.first < eras[0].first] + eras)

    def _set(self, eras: list[Era]) -> bool:
        if not self._inherits or eras == self._eras:
            return False
        self._eras = eras
        before, self._segments = self._segments, self._merged()
        return before != self._segments

    def _merged(self) -> list[tuple[int, str]]:
        """The segments, neighbours of equal digest made one: turn 2 of a steered chat finds the
        blocks of turn 1, though its prompt ends elsewhere."""
        merged: list[tuple[int, str]] = []
        for start, here in self._own_alone() if self._eras == _NEVER_SET else self._in_eras():
            if not merged or merged[-1][1] != here:
                merged.append((start, here))
        return merged

    def _own_alone(self) -> list[tuple[int, str]]:
        """Return what `_in_eras` yields where global tiers were never set, in fewer steps."""
        return [(first, _join(row, ops, UNSTEERED)) for first, row, ops in self._own]

    def _in_eras(self) -> Iterator[tuple[int, str]]:
        """Yield what acts from where on: first position, digest."""
        own_ends = [first for first, _, _ in self._own[1:]] + [sys.maxsize]
        era_ends = [era.first for era in self._eras[1:]] + [sys.maxsize]
        for (first, vector_sum, ops), end in zip(self._own, own_ends, strict=True):
            for era, era_end in zip(self._eras, era_ends, strict=True):
                start = max(first, era.first)
                if start >= min(end, era_end):
                    continue
                added = era.prefill if start < self._prompt else era.decode
                yield start, _join(self._row(vector_sum, added), ops, era.nonce)

    def _row(self, vector_sum: str, tiers: tuple[str, ...]) -> str:
        """The digest of a row of the steering table: of what its workers add up, in their order,
        whether the request brings it or the global tiers do."""
        if not tiers:
            return vector_sum
        made = vector_sum, tiers
        if made not in self._rows:
            own = next((each for each in self._sums if each.digest == vector_sum), None)
            sets = [] if own is None else [(own.digest, 1.0)] if own.factors else own.sets
            self._rows[made] = sum_digest([*sets, *((tier, 1.0) for tier in tiers)])
        return self._rows[made]

    def keys(self, start: int, stop: int) -> list[tuple[str, str]]:
        """Extra keys of the block of positions [start, stop).

        A pure function of the segments and the range. Empty while nothing in the block is
        steered: then the parent's hash, which is chained in, says all there is to say. KV events
        publish only the second item of a key, hence one string.
        """
        ends = [(sys.maxsize, UNSTEERED)]
        inside = [
            (max(first, start) - start, digest)
            for (first, digest), (end, _) in pairwise(self._segments + ends)
            if first < stop and end > start
        ]
        if all(digest == UNSTEERED for _, digest in inside):
            return []
        return [("steer", f"{offset}:{digest}") for offset, digest in inside]


def _join(*digests: str) -> str:
    """One digest for what acts together; "" if nothing does."""
    return "/".join(digests) if any(digests) else UNSTEERED
