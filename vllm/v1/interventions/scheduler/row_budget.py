# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of capture: which rows of a step leave the device, and that they fit."""

import sys
from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.v1.interventions.sites import needs_whole_items
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.interventions.scheduler.request import RequestInterventions

FIRST_TOKEN = np.zeros(1, dtype=np.int32)
"""The offsets of a request that captures the one token it has in a step."""
SPLIT_BYTES = 128 << 20
"""The rows of a step that are worth a message of each sender. Fewer leave one GPU while the next
step runs."""

STEP_WEIGHTS = 1 << 28
"""Weights of attention that are made in one step for captures, and as many for focus: a GPU takes
some 50 ms for them, two cores of a CPU take seconds. One position's may be more."""


class Claim(NamedTuple):
    """A claim on rows, of a request that was refused some."""

    since: int
    """The step of its first refusal."""
    rows: int
    """The fewest rows it can run with."""
    arrived: float
    """Time at which the request came to the frontend."""


class RowBudget:
    """The rows of the step that is being scheduled, by request.

    A request that was refused rows has first claim in the next step, so that no prompt which
    captures everything keeps the others waiting. Claims are served in the order of the first
    refusal. They last one step: a request that cannot run now keeps nobody else from running. Of
    those that wait to start, most are not asked in a step, and none is put behind later ones for
    that.

    A request that decoded in a step and captured its token has a row of the next step ahead, so
    that nobody asks for it (`RequestInterventions.granted`), until some request is refused rows.
    """

    def __init__(self, config: "VllmConfig") -> None:
        self._speculates = config.speculative_config is not None
        self._whole_items = needs_whole_items(config)
        self._whole_prompts = False
        self._capacity = self._whole = 0
        self._senders = 1
        if config.tap_shape is not None:
            buffer_bytes = config.capture_config.capture_buffer_bytes
            self._capacity = buffer_bytes // config.tap_shape.row_bytes
            self._whole = min(self._capacity, SPLIT_BYTES // config.tap_shape.row_bytes)
            self._senders = config.tap_shape.senders
            self._whole_prompts = config.tap_shape.whole_prompts
        drafts = config.speculative_config
        self._at_once = 1 if drafts is None else 1 + drafts.num_speculative_tokens
        """Number of positions of a request that cannot be in different steps."""
        self._offsets: dict[str, np.ndarray] = {}
        self._each: dict[str, int] = {}
        """The rows of each position of requests that read attention."""
        self._decoding = True
        """True if all of them are `FIRST_TOKEN`."""
        self._taken = 0
        self._decoders: dict[str, RequestInterventions] = {}
        """Requests that decode and have rows of this step, each of which it captures with its one
        token: those of the step before, and new ones."""
        self._lasts = sys.maxsize
        """The step before which all of them capture each token."""
        self._focused = 0
        """Weights that prompts of this step focus."""
        self._step = 0
        self._claims: dict[str, Claim] = {}
        """Claims of requests refused in the step before that have not asked again."""
        self._refused: dict[str, Claim] = {}
        """Claims of requests refused in this step."""

    @property
    def split(self) -> bool:
        """True if the rows of this step are so many that all senders send their share."""
        return self._senders > 1 and self._senders * self._taken > self._whole

    def cap_tokens(self, request: Request, first: int, num_tokens: int) -> int:
        """Number of the `num_tokens` positions from `first` that this step's rows have room for.

        0 means: not in this step. Where nobody has a claim, the first request of a step gets some
        (the frontend refused what can never fit).
        """
        ours, name = request.interventions, request.request_id
        each = ours.arena_rows
        if ours.focus_weights and num_tokens > 1:
            num_tokens = self._cap_focus(request, first, num_tokens)
        if not each or num_tokens <= 0:
            return num_tokens
        if name in self._offsets:
            self._give_back(request)
        if ours.key_weights and not (self._whole_items or self._whole_prompts):
            each = self._each[name] = self._with_weights(request, first + num_tokens)
        if num_tokens == 1 and not self._speculates:
            # Decoding, the common case, without numpy and with few calls.
            start, stop = ours.last_run
            if not start <= first < stop and first not in ours.wanted:
                return 1
            room = self._room(request) if self._claims else self._capacity - self._taken
            if each > room:
                return self._refuse(request, each)
            if self._claims or self._refused:
                self._grant(request, FIRST_TOKEN, each)
            else:
                self._offsets[name] = FIRST_TOKEN
                self._taken += each
                if start <= first and not ours.key_weights:
                    self._decoders[name] = ours
                    self._lasts = min(self._lasts, self._step + stop - first)
            return 1
        stop, prompt = first + num_tokens, request.num_prompt_tokens
        wanted = ours.wanted.between(first, stop)
        if self._speculates and ours.wanted.stop > prompt:
            # With drafts in flight the true positions may lie before these: reserve every row
            # past the prompt; the true positions come back with the rows.
            generated = np.arange(max(prompt, first), stop)
            wanted = np.concatenate([wanted[wanted < prompt], generated])
        room = self._room(request) // each
        if len(wanted) > room:
            if self._whole_prompts or (self._speculates and stop > request.num_tokens):
                # The sampler counts on all of a request's draft rows or none, those that upstream
                # pads a prompt's last token with included. Recomputed tokens are no drafts.
                return self._refuse(request, len(wanted) * each)
            num_tokens = int(wanted[room]) - first
            item = _split_item(request, first, first + num_tokens) if self._whole_items else None
            if item is not None:
                num_tokens = item[0] - first
            if not num_tokens:
                fewest = 1 if item is None else int(np.searchsorted(wanted, item[1]))
                return self._refuse(request, fewest * each)
            wanted = wanted[wanted < first + num_tokens]
        self._grant(request, (wanted - first).astype(np.int32), len(wanted) * each)
        return num_tokens

    def _cap_focus(self, request: Request, first: int, num_tokens: int) -> int:
        """Number of these positions that fit in the rest of `STEP_WEIGHTS`; one at least."""
        ours, stop = request.interventions, first + num_tokens
        # What is drafted, or sees what comes after it, stays together.
        if self._whole_items or self._whole_prompts or stop > request.num_tokens:
            return num_tokens
        focused, each = ours.focused.between(first, stop), stop * ours.focus_weights
        room = max(STEP_WEIGHTS - self._focused, 0) // each
        if len(focused) > room:
            num_tokens = max(int(focused[room]) - first, 1)
        self._focused += min(len(focused), room) * each
        return num_tokens

    def _with_weights(self, request: Request, stop: int) -> int:
        """The rows that a position of a request takes which reads attention of `stop` keys: its
        share of `STEP_WEIGHTS` is one of the capacity, too."""
        ours = request.interventions
        weights = ours.key_weights * stop
        rows = ours.arena_rows + weights * self._capacity // STEP_WEIGHTS
        return max(min(rows, self._capacity // self._at_once), ours.arena_rows)

    def _room(self, request: Request) -> int:
        """Rows the request may take: what nobody has an older claim on. A prompt that waited with
        others is not cut up for their sake: rows of one step are one piece."""
        free = self._capacity - self._taken
        if not self._claims:
            return free
        mine, arrived = self._claims.get(request.request_id), float("inf")
        if request.status != RequestStatus.RUNNING:
            arrived = request.arrival_time
        before = [
            claim.rows
            for name, claim in self._claims.items()
            if name != request.request_id
            and (claim.arrived <= arrived if mine is None else claim.since < mine.since)
        ]
        return max(free - sum(before), 0)

    def _refuse(self, request: Request, needed: int) -> int:
        # What was kept for it did not do, so others may have it.
        claim = self._claims.pop(request.request_id, None)
        since = self._step if claim is None else claim.since
        self._refused[request.request_id] = Claim(since, needed, request.arrival_time)
        return 0

    def has_refused(self, request: Request) -> bool:
        """Tell whether a request was refused rows in this step."""
        return request.request_id in self._refused

    def _grant(self, request: Request, offsets: np.ndarray, rows: int) -> None:
        if self._claims or self._refused:
            self._claims.pop(request.request_id, None)
            self._refused.pop(request.request_id, None)
        self._offsets[request.request_id] = offsets
        self._decoding = False
        self._taken += rows

    def _give_back(self, request: Request) -> None:
        offsets = self._offsets.pop(request.request_id, None)
        if (decoder := self._decoders.pop(request.request_id, None)) is not None:
            decoder.granted = 0
        if offsets is not None:
            each = self._each.pop(request.request_id, request.interventions.arena_rows)
            self._taken -= len(offsets) * each

    def withdraw(self, request: Request) -> None:
        """Drop a request that is not part of this step after all, or has ended."""
        self._give_back(request)
        self._claims.pop(request.request_id, None)
        self._refused.pop(request.request_id, None)

    def pop_offsets(self, num_scheduled_tokens: dict[str, int]) -> dict[str, np.ndarray]:
        """Rows to capture, and start the next step: request id -> int32 offsets into its tokens."""
        offsets, self._each = self._offsets, {}
        self._focused = 0
        self._claims, self._refused, self._step = self._refused, {}, self._step + 1
        decoding, self._decoding = self._decoding, True
        scheduled = num_scheduled_tokens.keys()
        self._grant_ahead(scheduled)
        if decoding and offsets.keys() <= scheduled:
            return offsets
        return {
            req_id: kept
            for req_id, at in offsets.items()
            if (size := num_scheduled_tokens.get(req_id))
            and len(kept := at if at is FIRST_TOKEN else at[at < size])
        }

    def _grant_ahead(self, scheduled: Set[str]) -> None:
        """Grant the requests that decoded a row of the next step, if it will capture them all and
        nobody was refused any."""
        before = self._decoders
        going_on = before if self._step < self._lasts and not self._claims else {}
        if not going_on.keys() <= scheduled:
            going_on = {name: before[name] for name in before.keys() & scheduled}
        if going_on is not before:
            for decoder in before.values():
                decoder.granted = 0
        if not going_on:
            self._lasts = sys.maxsize
        rows = 0
        for decoder in going_on.values():
            decoder.granted, rows = 1, rows + decoder.arena_rows
        self._decoders, self._taken = going_on, rows
        self._offsets = dict.fromkeys(going_on, FIRST_TOKEN)


def _split_item(request: Request, first: int, stop: int) -> tuple[int, int] | None:
    """The image that a step over positions [first, stop) would begin and not end: start, stop."""
    places = (feature.mm_position for feature in request.mm_features or ())
    items = ((place.offset, place.offset + place.length) for place in places)
    return next((item for item in items if first <= item[0] < stop < item[1]), None)
