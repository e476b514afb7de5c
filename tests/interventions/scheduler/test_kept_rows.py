# SPDX-License-Identifier: Apache-2.0
"""Rows that are kept by block: whatever requests come, in whatever steps, what is found is what a
block with these tokens has, and no more is kept than there is room for. No model: the value of a
row says its text, position and site."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interventions.scheduler.test_row_relay import sent
from tests.support.plans import HIDDEN, config_of, plan_of
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.scheduler.consumers import CaptureSessions
from vllm.v1.interventions.scheduler.kept_rows import KeptRows
from vllm.v1.interventions.scheduler.relay import RowRelay
from vllm.v1.request import Request

pytestmark = pytest.mark.quick

BLOCK, LENGTH, LAYERS = 4, 22, 4
ROW = HIDDEN * 4
TEXTS = 3
"""Texts of the same first blocks: as many blocks as their number says."""


def text_at(text: int, position: int) -> int:
    """The first text that has the same block there, and all before it."""
    return 0 if position < text * BLOCK else text


def values_at(text: int, positions: list[int], layers: list[int]) -> torch.Tensor:
    at = torch.tensor([[1000 * text_at(text, p) + p] for p in positions]).float()
    return (at + torch.tensor(layers) / 8)[..., None] + torch.arange(HIDDEN) / 64


class Steps:
    """`StepRows` of one request."""

    places = None
    packs = False

    def __init__(self, chunk: CapturedChunk | None) -> None:
        self._chunk = chunk

    def receive(self, places: object) -> None:
        pass

    def singles(self) -> dict[str, int]:
        return {}

    def of(self, name: str) -> CapturedChunk | None:
        return self._chunk


class Engine:
    """The relay of one engine core, and one request at a time."""

    def __init__(self, blocks: int) -> None:
        self.kept = KeptRows(blocks * BLOCK * LAYERS * ROW, BLOCK)
        self.relay = RowRelay(CaptureSessions(config_of()), self.kept)
        self.names = count()
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Rows that a result holds, and what they were."""

    def request(self, text: int, layers: list[int], wanted: list[int]) -> Request:
        hooks = {"post_block": layers}
        plan = plan_of(
            prompt=LENGTH,
            max_tokens=1,
            capture={"inline": {"hooks": hooks, "positions": wanted}},
        )
        params = SamplingParams(max_tokens=1)
        request = Request(str(next(self.names)), [0] * LENGTH, params, None, plan=plan)
        request.block_hashes = [
            BlockHash(f"{text_at(text, at)} {at}".encode())
            for at in range(0, LENGTH - BLOCK + 1, BLOCK)
        ]
        request.interventions.use(self.kept)
        return request

    def step(
        self, request: Request, text: int, layers: list[int], at: list[int], stale: bool
    ) -> None:
        """Compute some positions; of a step that is stale, under something else."""
        chunk = None
        if at:
            values = values_at(text, at, layers) + (5000 if stale else 0)
            owners = [(request.request_id, len(at))]
            chunk = CapturedChunk(torch.tensor(at).numpy(), [values], 1, owners)
        rows: Any = Steps(chunk)
        self.relay.accept(request, rows, stale)

    def came(self, request: Request) -> list[tuple[int, torch.Tensor]]:
        """The rows that left since, as a frontend gets them."""
        messages: dict[int, EngineCoreOutputs] = {}
        self.relay.join(messages, {}, None)
        rows: list[tuple[int, torch.Tensor]] = []
        for message in messages.values():
            for output in sent(self.relay, message)[0]:
                for chunk in output.captured or ():
                    self.held.append((chunk.values[0], chunk.values[0].clone()))
                    rows += zip(chunk.positions.tolist(), chunk.values[0], strict=True)
        return rows


HAPPENS = ["", "", "", "stale", "out"]
"""To a request as a step ends: it is taken out, and with "stale" something else acts meanwhile."""

REQUEST = st.tuples(
    st.integers(0, TEXTS - 1),
    st.sampled_from([[0], [1], [0, 1], [0, 1, 3], [3]]),
    st.one_of(st.just(set(range(LENGTH))), st.sets(st.integers(0, LENGTH - 1), min_size=1)),
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["", "", "", "stale", "out"])), max_size=8
    ),
    st.booleans(),
)


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(REQUEST, min_size=2, max_size=8))
def test_what_is_found_is_what_the_block_has(room: int, asked: list[Any]) -> None:
    engine = Engine(room)
    for text, layers, wanted, sizes, drops in asked:
        request = engine.request(text, layers, sorted(wanted))
        rows: list[tuple[int, torch.Tensor]] = []
        spoiled = set[int]()
        computed, more = None, iter(sizes)
        while computed is None or computed < LENGTH:
            if computed is None:
                limit = request.interventions.cache_hit_limit(request.block_hashes)
                computed = min(limit, LENGTH - 1) // BLOCK * BLOCK
                engine.relay.deliver_kept(request, computed, 1)
            size, happens = next(more, (LENGTH, ""))
            stop = min(computed + size, LENGTH)
            at = [p for p in range(computed, stop) if p in wanted]
            if happens:
                engine.kept.leave(request.request_id)
            before = request.interventions.next_row
            request.append_output_token_ids(0) if stop == LENGTH else None
            engine.step(request, text, layers, at, happens == "stale")
            if happens == "stale":
                spoiled |= {p for p in at if p >= before}
            computed = stop if not happens or stop == LENGTH else None
            rows += engine.came(request)
        engine.kept.leave(request.request_id)
        assert [p for p, _ in rows] == sorted(wanted), "each once, in order"
        for position, values in rows:
            want = values_at(text, [position], layers)[0] + (5000 if position in spoiled else 0)
            assert torch.equal(values, want), (position, text)
            assert not torch.equal(values, values_at(text, [position + 1], layers)[0])
        if drops:
            engine.held.clear()
        stats = engine.kept.stats()
        assert stats.num_bytes <= engine.kept.memory.size
        assert stats.hits <= stats.queries <= len(wanted) * (2 + len(sizes))
    assert all(torch.equal(now, then) for now, then in engine.held), "what a result holds changed"


def test_room_is_used_again() -> None:
    """Twin of results that hold rows: once they are gone, their memory takes others."""
    engine = Engine(5)
    everything = list(range(LENGTH))

    def hits(text: int) -> int:
        request = engine.request(text, [0, 1, 3], everything)
        limit = request.interventions.cache_hit_limit(request.block_hashes)
        computed = min(limit, LENGTH - 1) // BLOCK * BLOCK
        engine.relay.deliver_kept(request, computed, 1)
        request.append_output_token_ids(0)
        engine.step(request, text, [0, 1, 3], everything[computed:], False)
        engine.kept.leave(request.request_id)
        engine.came(request)
        return computed

    assert [hits(0), hits(0)] == [0, 20]
    assert hits(2) == 8, "of the blocks that both have"
    assert [hits(1), hits(0), hits(0)] == [0, 0, 0], "results hold what was kept"
    engine.held.clear()
    gc.collect()
    assert [hits(0), hits(0)] == [0, 20]
