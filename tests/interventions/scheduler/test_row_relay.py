# SPDX-License-Identifier: Apache-2.0
"""The rows of steps on their way to frontends: each request gets its own, once and in order, in few
buffers. Real rows, messages and requests; no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HIDDEN, config_of, plan_of
from tests.support.rows import step_rows
from vllm import SamplingParams
from vllm.v1.capture.transport.landing import Landing, ReceivedPlaces
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions.capture_groups import CaptureGroup, LocalStream
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.scheduler.consumers import CaptureSessions
from vllm.v1.interventions.scheduler.relay import RowRelay
from vllm.v1.interventions.step_rows import Blocks, Members, StepRows
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.quick

PROMPT, MOST = 5, 8
LANDING = Landing(1 << 20)
SITES = {
    1: CaptureGroup([0], 1, [LocalStream((0,))]),
    2: CaptureGroup([0, 1], 2, [LocalStream((0, 1))]),
}
"""How many layers are captured -> how a worker lays them out."""


@dataclass(eq=False)
class Asks:
    """A request, and what of it has come to its frontend."""

    number: int
    layers: int
    wanted: list[int]
    loose: bool
    """Whether the worker also captures what is not wanted, as for drafts."""
    client: int = 0
    computed: int = 0
    came: list[CapturedChunk] = field(default_factory=list)
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        hooks = {"post_block": list(range(self.layers))}
        capture = {"inline": {"hooks": hooks, "positions": self.wanted}}
        plan = plan_of(prompt=PROMPT, max_tokens=MOST, capture=capture)
        params = SamplingParams(max_tokens=MOST)
        self.request = Request(
            str(self.number), [0] * PROMPT, params, None, plan=plan, client_index=self.client
        )

    def next(self, most: int) -> list[int]:
        """The positions of the next step."""
        return list(range(self.computed, min(self.computed + most, self.request.num_tokens)))

    def values(self, positions: list[int]) -> torch.Tensor:
        """[n, layers, hidden], unlike all others."""
        at = torch.tensor(positions).float()[:, None] + 100 * self.number
        return (at + 0.25 * torch.arange(self.layers))[..., None].repeat(1, 1, HIDDEN)


def captured(asks: dict[Asks, list[int]]) -> StepRows:
    """As a worker makes it, of the positions of each."""
    groups: dict[CaptureGroup, Members] = {}
    at, first = dict[str, torch.Tensor](), 0
    index: dict[CaptureGroup, list[int]] = {}
    for one, positions in asks.items():
        layout, n = SITES[one.layers], len(positions)
        groups.setdefault(layout, []).append((one.request.request_id, np.arange(first, first + n)))
        index.setdefault(layout, []).extend(positions)
        at[one.request.request_id] = one.values(positions)
        first += n
    positions_of = torch.tensor([p for part in index.values() for p in part])
    arena = [at[name].flatten(0, 1) for members in groups.values() for name, _ in members]
    return step_rows(1, Blocks(groups), torch.cat(arena), positions_of, landing=LANDING)


def sent(relay: RowRelay, outputs: EngineCoreOutputs) -> tuple[list[EngineCoreOutput], int]:
    """What arrives, and how many tensors and buffers it is."""
    encoder = MsgpackEncoder(size_threshold=0, oob_tensor_consumer=relay.encoder)
    parts = encoder.encode(outputs)
    decoder = MsgpackDecoder(EngineCoreOutputs, oob_tensor_provider=ReceivedPlaces())
    got = decoder.decode([memoryview(p) for p in parts])  # type: ignore[arg-type]
    tensors = sum(len(c.values) for o in got.outputs for c in o.captured or [])
    return got.outputs, tensors + len(parts)


def step(relay: RowRelay, asks: dict[Asks, list[int]]) -> int:
    """All of a step that computes these positions, to the frontends; returns the buffers."""
    takes = {
        one: [p for p in positions if one.loose or p in one.wanted]
        for one, positions in asks.items()
    }
    some = {one: positions for one, positions in takes.items() if positions}
    rows = captured(some) if some else None
    outputs: dict[int, list[EngineCoreOutput]] = {}
    came: dict[str, Request] = {}
    for one, positions in asks.items():
        one.computed = positions[-1] + 1
        emits = one.computed == one.request.num_tokens
        if emits:
            one.request.append_output_token_ids(7)
        if one.request.interventions.comes_at_end:
            came[one.request.request_id] = one.request
        else:
            relay.accept(one.request, rows)
        if emits:
            output = EngineCoreOutput(one.request.request_id, [7])
            outputs.setdefault(one.client, []).append(output)
    messages = {client: EngineCoreOutputs(outputs=outs) for client, outs in outputs.items()}
    relay.join(messages, came, rows)
    buffers = 0
    for client, message in messages.items():
        got, number = sent(relay, message)
        buffers += number
        ahead = got[0].captured or [] if got[0].request_id == "" else []
        for rows_here in (part for chunk in ahead for part in chunk.by_owner()):
            [one] = [a for a in asks if a.request.request_id == rows_here.owners[0][0]]
            assert one.client == client
            one.came.append(rows_here)
    return buffers


def a_relay() -> RowRelay:
    return RowRelay(CaptureSessions(config_of()), None)


REQUEST = st.tuples(
    st.sampled_from([1, 2]),
    st.sets(st.integers(0, PROMPT + MOST - 2), min_size=1),
    st.booleans(),
    st.integers(0, 1),
)


@given(
    st.lists(REQUEST, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60),
)
def test_each_gets_its_own_once_and_in_order(
    asked: list[Any], most: list[tuple[int, bool]]
) -> None:
    """Whatever the steps, with prompts in pieces, preemptions, rows that nobody wants and two
    frontends."""
    everybody = [
        Asks(i, layers, sorted(wanted), loose, client)
        for i, (layers, wanted, loose, client) in enumerate(asked)
    ]
    relay, sizes = a_relay(), iter(most)
    while True:
        left = [a for a in everybody if a.request.num_output_tokens < MOST]
        if not left:
            break
        part = {}
        for one in left:
            size, preempted = next(sizes, (PROMPT + MOST, False))
            one.computed = 0 if preempted else one.computed
            if positions := one.next(size):
                part[one] = positions
        if part:
            step(relay, part)
    for one in everybody:
        positions = [p for chunk in one.came for p in chunk.positions.tolist()]
        assert positions == one.wanted
        values = torch.cat([chunk.values[0] for chunk in one.came])
        assert torch.equal(values, one.values(positions))
        assert not torch.equal(values, one.values([p + 1 for p in positions]))
        assert all(chunk.version == 1 for chunk in one.came)


def test_a_step_is_few_buffers_however_many_requests() -> None:
    """One of rows, also where a step has no outputs; many where each takes a part of its rows."""
    whole, parts = ([Asks(i, 1, list(range(n)), loose=True) for i in range(40)] for n in (7, 2))
    relay = a_relay()
    for positions in ([0, 1, 2], [3, 4], [5], [6]):
        assert 1 < step(relay, dict.fromkeys(whole, positions)) <= 4
    assert step(relay, {one: [0, 1, 2] for one in parts}) > 40
    for one in whole:
        assert [p for c in one.came for p in c.positions.tolist()] == one.wanted


def test_who_does_not_take_all_is_left_out() -> None:
    """The others' rows go as they lie, in as many pieces as they are neighbours."""
    everybody = [Asks(i, 1, [0, 1, 2, 3, 4, 5], loose=True) for i in range(5)]
    everybody[2] = Asks(2, 1, [0, 1, 2, 3, 4], loose=True)
    relay = a_relay()
    for positions in ([0, 1, 2, 3, 4], [5]):
        step(relay, dict.fromkeys(everybody, positions))
    rows = [c.values[0] for one in everybody for c in one.came[1:]]
    assert len(everybody[2].came) == 1 and len(rows) == 4
    assert len({r.untyped_storage().data_ptr() for r in rows}) == 1
