# SPDX-License-Identifier: Apache-2.0
"""State of one request's plan, as the engine core keeps it."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import PLAN_FIELDS, UNSTEERED, Plan, Site, SteeringPlan
from vllm.v1.interventions.positions import END, Positions
from vllm.v1.interventions.scheduler.identity import BlockIdentity

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.interventions.scheduler.kept_rows import KeptRows

NO_PLAN, NO_POSITIONS = Plan(), Positions()
"""Empty plan and positions that all plain requests share, so that none pays for making them."""


class RequestInterventions:
    """Cache identity and capture cursor of one request.

    Args:
        plan: None for a plain request.
        num_prompt_tokens: where the phase changes; a property of positions, not of steps.
        params: must not carry raw vectors: a request built around the input processor would be
            served unsteered.
    """

    def __init__(
        self, plan: Plan | None, num_prompt_tokens: int, params: SamplingParams | None
    ) -> None:
        if params is not None and any(getattr(params, f) is not None for f in PLAN_FIELDS):
            raise ValueError(
                "sampling_params carries steering or capture fields that did not pass the input "
                "processor; send the prompt through LLM.generate or AsyncLLM.generate"
            )
        self.plan = plan or NO_PLAN
        capture = self.plan.capture
        self.arena_rows = capture.arena_rows if capture else 0
        """Rows that a captured position takes on the device; 0 if it captures nothing."""
        self.key_weights = capture.key_weights if capture else 0
        """Number of attention weights of a captured position for each key, as in `CapturePlan`."""
        self.focus_weights, self.focused = _focus_of(self.plan.steering)
        self.takes_room = bool(self.arena_rows or self.focus_weights)
        """True if a step's `RowBudget` limits it."""
        self.granted = 0
        """Number of tokens for which `RowBudget` has granted it rows of the next step ahead: 0 or
        1."""
        self.wanted = Positions.from_flat(capture.runs) if capture else NO_POSITIONS
        self._relayed = [s.relayed for s in capture.streams] if capture else []
        self.relays_all = all(self._relayed)
        """True if all that it captures goes on to the frontend."""
        self.comes_at_end = bool(self.arena_rows) and self.relays_all
        """True if its rows of a step may be accepted with those of all others, at the step's
        end."""
        self._relayed_positions = self.wanted
        if capture is not None and not self.relays_all:
            runs = [s.runs for s in capture.streams if s.relayed]
            self._relayed_positions = Positions.from_flat([n for flat in runs for n in flat])
        self._sums = [s.making.adds_up for s in capture.streams] if capture else []
        """True if sums leave the device, for each stream."""
        sums = [s.runs for s in capture.streams if s.making.adds_up] if capture else []
        summed = [n for runs in sums for n in runs]
        self._summed = Positions.from_flat(summed) if summed else NO_POSITIONS
        self.blocks = BlockIdentity(self.plan.steering, num_prompt_tokens)
        self.last_run = (self.wanted.runs() or [(0, 0)])[-1]
        """The last of the runs of `wanted`: what most tokens are looked up in, without a call."""
        begun, steering = self.plan.begun, self.plan.steering
        self.next_row = 0 if begun is None else begun.rows
        """The position before which all rows were delivered."""
        self.kept: KeptRows | None = None
        """Rows of cached blocks, where all that it captures may be found there."""
        self.kept_sites: list[frozenset[Site]] = []
        """The sites of each of its streams, where `kept` is set."""
        self._decides = sys.maxsize if steering is None else _first_latching(steering)
        """The position from which on rows must be computed for what gates know: where one latches,
        and where gates that are decided once are decided again: an answer that goes on has rows of
        its own, where nothing is decided yet."""
        if begun and steering and any(program.decides for program in steering.programs):
            self._decides = min(self._decides, num_prompt_tokens - 1)

    def use(self, kept: "KeptRows") -> None:
        """Deliver rows of cached blocks from what is kept, where all leave as they are: what is
        made of rows is made where they are computed."""
        streams = self.plan.capture.streams if self.plan.capture else []
        if streams and all(stream.is_raw for stream in streams):
            self.kept, self.kept_sites = kept, [frozenset(s.sites) for s in streams]
            self.comes_at_end = False  # its blocks are asked for before it is freed

    def cache_hit_limit(self, blocks: Sequence["BlockHash"] = ()) -> int:
        """Most tokens that may come from the prefix cache: cached positions are not computed, so
        the lowest selected position that is neither delivered nor kept must lie behind them.

        Args:
            blocks: the hashes of the request; () where no rows are kept.
        """
        first = self.wanted.first_from(self.next_row)
        if self.kept is not None:
            first = self.kept.first_missing(self.wanted, first, self.kept_sites, blocks)
        if first is None:
            return self._decides
        if first < self._summed.stop:
            # A sum that was begun begins anew: the steps will be others.
            first = min(first, self._summed.flat()[0])
        return min(first, self._decides)

    def needs_computed(self, start: int, num_tokens: int | None) -> bool:
        """Tell whether a row is wanted of the `num_tokens` from `start` on, which a KV connector
        offers.

        Then none of them is loaded, as upstream does where log-probabilities of the prompt are
        asked for: connectors load all that they offered, or nothing. None is "not known yet".
        """
        return (num_tokens or 0) > max(self.cache_hit_limit() - start, 0)

    def accept(self, chunk: CapturedChunk, num_tokens: int) -> CapturedChunk | None:
        """Take the rows of a step, each position once.

        Args:
            chunk: may hold positions that were captured before (recomputed after a preemption),
                are not wanted (reserved in advance for drafts) or belong to rejected drafts.
            num_tokens: accepted tokens of the request, this step's included; the last of them has
                not been fed back, so rows end before it.

        Returns:
            What was accepted, of all streams; `chunk` itself if all was. Sums stay as they came:
            who adds them up knows which to leave out.
        """
        positions = chunk.positions
        if len(positions) == 1 and not self._summed:  # decoding, without numpy
            position = positions.item()
            if not self.next_row <= position < num_tokens - 1 or position not in self.wanted:
                return None
            self.next_row = position + 1
            return chunk
        keep = self.wanted.mask(positions)
        keep &= (positions >= self.next_row) & (positions < num_tokens - 1)
        kept = np.flatnonzero(keep)
        sites = [slice(None)] * len(self._sums)
        if not len(kept):
            return self._cut(chunk, kept, sites) if self._summed else None
        self.next_row = int(positions[kept[-1]]) + 1
        if keep.all():
            return chunk
        # Neighbours stay where they lie.
        first, last = int(kept[0]), int(kept[-1]) + 1
        at = slice(first, last) if last - first == len(kept) else kept
        return self._cut(chunk, at, sites)

    def relayed(self, chunk: CapturedChunk) -> CapturedChunk | None:
        """Return the part of accepted rows that goes on to the frontend; None for nothing."""
        if self.relays_all:
            return chunk
        kept = np.flatnonzero(self._relayed_positions.mask(chunk.positions))
        if not len(kept) and not self._summed:
            return None
        sites = [slice(None) if relayed else slice(0) for relayed in self._relayed]
        return self._cut(chunk, kept, sites)

    def _cut(
        self, chunk: CapturedChunk, at: slice | np.ndarray, sites: list[slice]
    ) -> CapturedChunk:
        """Rows `at` of this request's chunk, and all its sums, at some sites of each stream."""
        values = [
            v[:, sites[i]] if self._sums[i] else v[at, sites[i]]
            for v, i in zip(chunk.values, chunk.of_streams(), strict=True)
        ]
        positions = chunk.positions[at]
        summed = chunk.positions if chunk.summed is None else chunk.summed
        [(name, _)] = chunk.owners
        owners = [(name, len(positions))]
        return CapturedChunk(positions, values, chunk.version, owners, summed, chunk.senders)


def _first_latching(steering: SteeringPlan) -> int:
    """Return the position at which the first gate that latches begins to."""
    if not steering.programs:
        return sys.maxsize
    begin = {program.digest for program in steering.programs if program.begins}
    return min((s.first for s in steering.segments if s.program in begin), default=sys.maxsize)


def _focus_of(steering: SteeringPlan | None) -> tuple[int, Positions]:
    """Return `SteeringPlan.key_weights`, and the positions that are focused."""
    if steering is None or not steering.focus_programs:
        return 0, NO_POSITIONS
    stops = [s.first for s in steering.segments[1:]] + [END]
    pairs = zip(steering.segments, stops, strict=True)
    runs = [(s.first, stop) for s, stop in pairs if s.focus != UNSTEERED]
    return steering.key_weights, Positions(runs)
