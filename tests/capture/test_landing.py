# SPDX-License-Identifier: Apache-2.0
"""Rows in memory that processes share: each is read as it was written, whatever is kept and
whatever is given back in the meantime, and a place is used again only when nobody reads it."""

from __future__ import annotations

import gc
import sys
from multiprocessing.connection import Connection
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import warm
from vllm.v1.capture.transport import landing as module
from vllm.v1.capture.transport.landing import (
    Landing,
    Places,
    ReceivedPlaces,
    Room,
    RowEncoder,
    own_memory,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.quick

KB = 1 << 10


def written(landing: Landing, number: int, kilobytes: int) -> torch.Tensor | None:
    """Rows [kilobytes, 2, 128], full of a number."""
    place = landing.take(kilobytes * KB)
    if place is None:
        return None
    rows = place[: kilobytes * KB].view(torch.float32).view(kilobytes, 2, 128)
    return rows.fill_(number)


def taken(room: Room, size: int) -> torch.Tensor | None:
    """A place of a process's own memory."""
    neighbours = room.take_each(size, 1)
    return neighbours[0].each[0] if neighbours else None


def encoder_of(places: Places) -> RowEncoder:
    encoder = RowEncoder()
    encoder.steps = places
    return encoder


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40), random=st.randoms())
@settings(deadline=None, max_examples=60)
def test_what_is_read_is_what_was_written(sizes: list[int], random: Random) -> None:
    """By the worker's process, one that rows are passed on to, and one that it passes them on to;
    some find no place, and none when all are free."""
    landing, middle, last = Landing(100 * KB), Places(), ReceivedPlaces()
    to_last = encoder_of(middle)
    kept: dict[int, torch.Tensor] = {}
    for number, size in enumerate(sizes):
        rows = written(landing, number, size)
        if rows is not None:
            reference = landing.lend(rows)
            assert reference is not None
            passed = middle.borrow(reference).view(torch.float32).view(size, 2, 128)
            del rows
            meta = to_last(passed[:, 1:])
            assert meta is not None
            view = last("float32", (size, 1, 128), meta)
            kept[number] = (passed, view, view[:1])[random.randint(0, 2)]
            del passed, view
        for done in random.sample(sorted(kept), random.randint(0, len(kept))):
            assert bool((kept.pop(done) == done).all())
        middle.reclaim()
        landing.reclaim()
    assert all(bool((tensor == number).all()) for number, tensor in kept.items())
    kept.clear()
    gc.collect()
    middle.reclaim()
    landing.reclaim()
    assert landing.held == middle.held == last.steps.held == 0
    assert written(landing, 0, 100) is not None


def test_a_place_is_free_when_the_last_view_is_gone() -> None:
    landing, places = Landing(100 * KB), ReceivedPlaces()
    encoder = encoder_of(landing)
    first, second = (written(landing, i, 40) for i in range(2))
    assert first is not None and second is not None
    assert landing.held == 80 * KB and written(landing, 2, 40) is None
    # Several tensors of one place, in one message, are one place.
    metas = [encoder(part) for part in (second[:3], second[3:])]
    parts = [places("float32", (3, 2, 128), meta) for meta in metas if meta is not None]
    assert places.steps.held == 40 * KB
    del second
    parts.pop()
    gc.collect()
    encoder.new_message()
    assert written(landing, 2, 40) is None
    parts.pop()
    gc.collect()
    assert places.steps.held == 0
    assert landing.held == 80 * KB, "it is free when that is noticed, as somebody takes a place"
    assert written(landing, 2, 40) is not None
    assert bool((first == 0).all())


@pytest.mark.parametrize("given_back", [0, 300])
def test_places_that_are_kept_cost_nothing_to_look_through(given_back: int) -> None:
    """With a twin in which some were given back: one looks at those alone."""
    landing, places = Landing(KB), Places()
    rows = written(landing, 0, 1)
    assert rows is not None
    references = [landing.lend(rows) for _ in range(5000)]
    assert all(references) and len(set(references)) == 5000
    for reference in references[1 : 1 + given_back]:  # by a receiver that has the place already
        assert reference is not None
        places._map(reference.lease)[reference.lease.first] = 0
    ran = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal ran
        ran += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        landing.reclaim()
    finally:
        sys.settrace(before)
    assert given_back <= ran <= 10 + 4 * given_back
    again = [landing.lend(rows) for _ in range(given_back)]
    assert set(again) == set(references[1 : 1 + given_back]), "those are free, and no others"


def test_ordinary_memory_and_other_hosts_go_by_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    landing = Landing(KB)
    encoder = RowEncoder()
    rows = written(landing, 0, 1)
    assert rows is not None and encoder(rows) is None, "before there was any step"
    encoder.steps = landing
    assert encoder(rows) is not None
    assert encoder(rows.clone()) is None
    assert encoder.for_frontends(["ipc:///tmp/a", "ipc:///tmp/b"]) is encoder
    assert encoder.for_frontends(["ipc:///tmp/a", "tcp://10.0.0.1:5"]) is None
    monkeypatch.setattr(module, "LEASES", 1)
    assert encoder(rows) is None, "more was passed on than there are leases"


def test_what_is_not_ready_is_not_taken() -> None:
    landing = Landing(100 * KB)
    landing.ready = 10 * KB
    assert written(landing, 0, 11) is None and written(landing, 0, 10) is not None
    landing.ready = 100 * KB
    assert written(landing, 0, 11) is not None
    assert Landing(0).take(1) is None


def test_memory_of_a_process_alone_is_used_again() -> None:
    """The lowest place that is free, and never one that somebody has a view of."""
    room = Room(own_memory(100 * KB))
    first, second = (taken(room, 40 * KB) for _ in range(2))
    assert first is not None and second is not None
    assert taken(room, 40 * KB) is None and taken(room, 20 * KB) is not None
    place, view = first.data_ptr(), first.fill_(1)[KB:]
    second.fill_(2)
    del first
    assert taken(room, 40 * KB) is None
    del view
    again = taken(room, 40 * KB)
    assert again is not None and again.data_ptr() == place
    again.fill_(3)
    assert bool((second == 2).all())
    for refused in (0, 1 << 60):
        assert taken(Room(own_memory(refused)), 1) is None


def test_places_next_to_each_other_are_free_one_by_one() -> None:
    room = Room(own_memory(8 * KB))
    [(together, each)] = room.take_each(KB - 1, 4)
    assert (together.shape, {one.shape for one in each}) == ((4, KB), {(KB,)})
    for i in range(4):
        each[i].fill_(i)
    assert together.float().mean(1).tolist() == [0, 1, 2, 3]
    places = [one.data_ptr() for one in each]
    del each[3], each[1]
    assert not room.take_each(KB, 7) and not room.take_each(5 * KB + 1, 1)
    gap, rest = room.take_each(KB, 3)
    assert [one.data_ptr() for one in gap.each] == places[1:2], "gaps are filled first"
    assert [one.data_ptr() for one in rest.each] == [places[3], places[3] + KB]
    for i, run in enumerate((gap, rest)):
        run.together.fill_(10 + i)
    assert together.float().mean(1).tolist() == [0, 10, 2, 11]
    del gap, rest, run, each
    [whole] = room.take_each(8 * KB, 1)
    assert whole.each[0].data_ptr() == places[0], "what is free again is found as one"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(0, 9)), max_size=60))
def test_places_never_overlap(steps: list[tuple[int, int, int]]) -> None:
    """Whatever is taken and given back, and when."""
    room, held = Room(own_memory(4 * KB)), list[torch.Tensor]()
    for size, number, drops in steps:
        places = [one for found in room.take_each(size * 40, number) for one in found.each]
        assert len(places) in (0, number)
        held += places
        del places
        for i in range(len(held)):
            held[i].fill_(i % 251)
        assert all(bool((one == i % 251).all()) for i, one in enumerate(held))
        del held[:drops:2]
    held.clear()
    assert taken(room, 4 * KB) is not None


def _frontend(pipe: Connection) -> None:
    places = ReceivedPlaces()
    decoder = MsgpackDecoder(list[torch.Tensor], oob_tensor_provider=places)
    kept: list[torch.Tensor] = []
    for _ in range(4):
        kept = decoder.decode(pipe.recv())
        pipe.send([(t.dtype, t.shape, t.double().sum().item()) for t in kept])
    pipe.recv()  # the sender is gone, and what is kept is as it was
    pipe.send([t.double().sum().item() for t in kept])


def test_through_messages_to_another_process() -> None:
    """Those that are no neighbours in memory too; and they outlive the memory's maker."""
    context = warm.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_frontend, args=(theirs,), daemon=True)
    process.start()
    landing = Landing(4 << 20)
    encoder = MsgpackEncoder(oob_tensor_consumer=encoder_of(landing))
    for number in range(4):
        place = landing.take(900 * KB)
        assert place is not None
        large = place[: 900 * KB].view(torch.float32).view(300, 3, 256)
        large.normal_().add_(number)
        sent = [large, large[:, 1:], large[7:9], torch.randn(7, 40).double()]
        parts = [bytes(memoryview(part)) for part in encoder.encode(sent)]  # type: ignore[arg-type]
        assert sum(map(len, parts)) < 4 * KB
        ours.send(parts)
        want = [(t.dtype, t.shape, t.double().sum().item()) for t in sent]
        got = ours.recv()
        assert got == want
        assert got[0] != got[1]
        del large, sent, place
    del landing, encoder
    gc.collect()
    ours.send(None)
    assert ours.recv() == [total for _, _, total in got]
    process.join(300)
    assert process.exitcode == 0
