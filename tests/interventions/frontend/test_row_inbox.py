# SPDX-License-Identifier: Apache-2.0
"""Inline rows on their way to results: they stay where they landed, until results hold too much of
that; then each is copied once, by threads; and what a result holds."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import warm
from tests.support.collecting import texts_of
from vllm.v1.capture import copies
from vllm.v1.capture.copies import THREADS, CopyThreads, empty, finished
from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.frontend.results import inbox as row_inbox
from vllm.v1.interventions.frontend.results import memory as kept_memory
from vllm.v1.interventions.frontend.results import pieces as row_pieces
from vllm.v1.interventions.frontend.results.collector import RowCollector
from vllm.v1.interventions.frontend.results.inbox import RowInbox
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, Selection, Stream

pytestmark = pytest.mark.quick

SITES, WIDTH, REQUESTS = 3, 16, 4
ROW_BYTES = SITES * WIDTH * 4
STEP_BYTES = REQUESTS * ROW_BYTES


def collector_for(
    num_rows: int, selected: list[int] | None = None, memory: KeptMemory | None = None
) -> RowCollector:
    """
    Args:
        selected: runs; all rows if it is None.
        memory: what rows are copied to; none is kept if it is None.
    """
    sites, runs = [("post_block", i) for i in range(SITES)], [0, num_rows]
    plan = CapturePlan(
        sites=sites,
        runs=runs,
        streams=[Stream(tuple(sites), WIDTH, "float32", relayed=True, runs=tuple(runs))],
        consumers={"inline": Selection(sites, selected or runs)},
        arena_rows=SITES,
        hidden_size=WIDTH,
        dtype="float32",
    )
    copied = CopyThreads("test"), memory or KeptMemory()
    return RowCollector(plan, [0], plan.consumers, {}, *copied, texts_of)


class Steps:
    """Steps in which some requests capture a row each.

    Args:
        landing: where rows lie; without, in ordinary memory.
        senders: how many workers sent a part of the sites, in every other step.
    """

    def __init__(self, landing: Landing | None = None, senders: int = 1) -> None:
        self._landing, self._senders = landing, senders
        self._number = 0
        self._ordinary: list[weakref.ref[Any]] = []
        link: Any = SimpleNamespace(places=[landing] if landing else [])
        self.inbox = RowInbox(link, frontends=1)

    def open(self, number: int, num_rows: int) -> list[RowCollector]:
        made = [collector_for(num_rows, memory=self.inbox.memory) for _ in range(number)]
        for collector in made:
            self.inbox.open(str(id(collector)), collector)
        return made

    def step(self, *collectors: RowCollector) -> None:
        """A row of each, full of the step's number; the version is one more."""
        at, self._number = self._number, self._number + 1
        shape = REQUESTS, SITES, WIDTH
        place = None if self._landing is None else self._landing.take(STEP_BYTES)
        if place is None:
            memory = np.empty(shape, dtype=np.float32)
            self._ordinary.append(weakref.ref(memory))
            rows = torch.from_numpy(memory)
        else:
            rows = place.view(torch.float32).view(shape)
        rows.fill_(at)
        owners = [(str(id(collector)), 1) for collector in collectors]
        positions = np.full(len(owners), at)
        parts = self._senders if at % 2 else 1
        values = list(rows[: len(owners)].tensor_split(parts, dim=1))
        self.inbox.add([CapturedChunk(positions, values, at + 1, owners, senders=parts)])
        self.inbox.step()

    def of_one(self, num_rows: int) -> dict[Any, Any]:
        """The payload of a request that was alone in as many steps, counted anew."""
        self._number = 0
        [one] = self.open(1, num_rows)
        for _ in range(num_rows):
            self.step(one)
        payload = finish(self.inbox, one, num_rows)
        del one
        self.inbox.step()
        return payload

    @property
    def ordinary(self) -> int:
        """Steps in ordinary memory that somebody has views of."""
        gc.collect()
        return sum(block() is not None for block in self._ordinary)


def finish(inbox: RowInbox, collector: RowCollector, num_rows: int) -> dict[Any, Any]:
    inbox.finish(collector)
    result = collector.results([0] * num_rows, finished=True, aborted=False, only_new=False)
    assert result["inline"].status == "ok", result["inline"].error
    payload: dict[Any, Any] = result["inline"].payload
    return payload


def check(payload: dict[Any, Any], num_rows: int) -> None:
    for rows in payload.values():
        assert rows.positions.tolist() == list(range(num_rows))
        assert torch.equal(rows.values[:, 0], torch.arange(float(num_rows)))
        assert not torch.equal(rows.values[:, 0], torch.arange(float(num_rows)) + 1)


def test_rows_stay_where_they_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until somebody reads what came in several steps; one step's are a view for ever."""
    monkeypatch.setattr(row_pieces, "SHARED_BYTES", 0)
    landing = Landing(1 << 20)
    steps = Steps(landing)
    collectors = steps.open(REQUESTS, 3)
    for _ in range(3):
        steps.step(*collectors)
    payloads = [finish(steps.inbox, collector, 3) for collector in collectors]
    [single] = steps.open(1, 4)
    steps.step(single)
    del collectors
    steps.inbox.step()
    gc.collect()
    assert landing.held == 4 * STEP_BYTES
    for payload in payloads:
        check(payload, 3)
    gc.collect()
    assert landing.held == STEP_BYTES, "what was read was joined"
    del single
    steps.inbox.step()
    gc.collect()
    assert landing.held == 0


def test_a_place_is_free_before_the_next_message() -> None:
    """If all whose rows are there have ended; others may have more in the next."""
    landing = Landing(64 * STEP_BYTES)
    steps = Steps(landing)
    [other] = steps.open(1, 1)
    for beside in ([], [other]):
        [one] = steps.open(1, 1)
        steps.step(one, *beside)
        del one
        steps.inbox.step()
        gc.collect()
        assert landing.held == len(beside) * STEP_BYTES


def test_steps_go_on_after_they_were_read() -> None:
    """What a run's requests share of its steps is put together again when there are more."""
    steps = Steps(Landing(1 << 20))
    stream, whole = steps.open(2, 9)
    for number in range(5):
        steps.step(stream, whole)
        tokens = [0] * (number + 1)
        delta = stream.results(tokens, finished=False, aborted=False, only_new=True)
        for rows in delta["inline"].payload.values():
            assert (rows.positions.tolist(), rows.versions.tolist()) == ([number], [number + 1])
            assert torch.equal(rows.values[:, 0], torch.tensor([float(number)]))
    payload = finish(steps.inbox, whole, 5)
    check(payload, 5)
    assert all(rows.versions.tolist() == [1, 2, 3, 4, 5] for rows in payload.values())


def test_where_rows_lie_is_found_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each completion again, which many that end together would wait for; of ordinary
    memory among it each is told all the same."""
    landing = Landing(64 * STEP_BYTES)
    find, move = Mock(wraps=landing.address_of), Mock(side_effect=RowCollector.move)
    monkeypatch.setattr(landing, "address_of", find)
    monkeypatch.setattr(RowCollector, "move", lambda *args: move(*args))
    steps = Steps(landing)
    collectors = steps.open(REQUESTS, 5)
    for _ in range(2):
        steps.step(*collectors)
    stays = collectors.pop()
    check(finish(steps.inbox, stays, 2), 2)
    assert not move.called
    for place in (landing, landing, None):  # the last finds no place
        steps._landing = place
        steps.step(*collectors)
    for collector in collectors:
        check(finish(steps.inbox, collector, 5), 5)
    assert move.call_count == len(collectors)
    assert find.call_count == 5


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize("lands", [True, False])
def test_results_cannot_fill_the_landing(
    lands: bool, senders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a request runs, and however many results are kept: there is always room for
    steps; and rows in ordinary memory keep those of others for a while only."""
    monkeypatch.setattr(row_pieces, "SHARED_BYTES", 0)
    monkeypatch.setattr(row_inbox, "ORDINARY_BYTES", 8 * STEP_BYTES)
    landing = Landing(64 * STEP_BYTES) if lands else None
    steps, kept, num_steps = Steps(landing, senders), [], 300
    long, *_ = everybody = steps.open(REQUESTS, num_steps)
    for at in range(num_steps):
        steps.step(*(everybody if at < 2 else [long]))
    for collector in steps.open(100, 1):
        steps._number = 0
        steps.step(collector)
        kept.append(finish(steps.inbox, collector, 1))
    payload = finish(steps.inbox, long, num_steps)
    if landing is not None:
        assert landing.held <= 54 * STEP_BYTES and steps.ordinary == 0
    assert steps.ordinary <= 12
    check(payload, num_steps)
    for one in kept:
        check(one, 1)
    if landing is not None:
        assert landing.held >= 40 * STEP_BYTES, "and what could stay did"


@pytest.mark.parametrize(("size", "stay"), [(64, 48), (16, 9), (8, 4)])
def test_large_steps_have_room(size: int, stay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the landing, or seven steps, or half of it."""
    moved: list[RowCollector] = []
    monkeypatch.setattr(RowCollector, "move", lambda collector: moved.append(collector))
    steps, kept = Steps(Landing(size * STEP_BYTES)), []
    while not moved:
        steps._number = 0
        collectors = steps.open(REQUESTS, 1)
        steps.step(*collectors)
        kept += [finish(steps.inbox, collector, 1) for collector in collectors]
    assert len(kept) == (stay + 1) * REQUESTS


@pytest.mark.parametrize("kept_bytes", [0, 1 << 40])
def test_memory_of_copied_rows_is_used_again(
    kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of results that are gone; what is kept stays as it is."""
    monkeypatch.setattr(row_pieces, "SHARED_BYTES", 0)
    monkeypatch.setattr(kept_memory, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(kept_memory, "empty", new := Mock(side_effect=empty))
    landing = Landing(8 * STEP_BYTES)
    held = [landing.take(STEP_BYTES) for _ in range(7)]
    steps, payloads, places = Steps(landing), list[dict[Any, Any]](), list[set[int]]()
    for _ in range(3):
        steps._number = 0
        collectors = steps.open(REQUESTS, 1)
        steps.step(*collectors)
        payloads += [finish(steps.inbox, collector, 1) for collector in collectors]
        del collectors
        steps.inbox.step()
        rows = [payload["post_block", 0].values for payload in payloads[-REQUESTS:]]
        places.append({each.data_ptr() for each in rows})
        del rows
        for payload in payloads:
            check(payload, 1)
        del payload, payloads[1:]
    assert new.call_count == (3 * REQUESTS if kept_bytes else 0)
    if not kept_bytes:
        assert len(places[0]) == REQUESTS and len(places[0] & places[1]) == REQUESTS - 1
        assert places[1] == places[2]
    assert len(held) == 7


def test_without_copies_the_landing_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above can see."""
    monkeypatch.setattr(RowCollector, "move", lambda _: None)
    landing = Landing(64 * STEP_BYTES)
    steps = Steps(landing)
    [long] = steps.open(1, 100)
    for _ in range(100):
        steps.step(long)
    assert landing.held == 64 * STEP_BYTES and steps.ordinary == 36
    check(finish(steps.inbox, long, 100), 100)


def test_a_request_alone_and_with_others() -> None:
    """Its rows are in order whoever they come with; those of who has ended are nobody's."""
    steps = Steps(Landing(1 << 20))
    one, two = steps.open(2, 6)
    steps.step(one, two)
    steps.step(two, one)
    steps.step(one, collector_for(6))
    steps.step(one)
    steps.step(one, two)
    steps.step(one)
    check(finish(steps.inbox, one, 6), 6)
    steps.inbox.finish(two)
    result = two.results([0] * 6, finished=True, aborted=True, only_new=False)["inline"]
    assert result.status == "partial_error"
    assert result.payload["post_block", 0].positions.tolist() == [0, 1, 4]
    assert result.payload["post_block", 0].values[:, 0].tolist() == [0, 1, 4]


def test_parts_of_several_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has some of the sites, and they stay where they landed."""
    monkeypatch.setattr(row_pieces, "SHARED_BYTES", 0)
    collector, landing = collector_for(2), Landing(1 << 20)
    inbox = Steps(landing).inbox
    inbox.open("r", collector)
    values = torch.arange(2 * SITES * WIDTH).float().view(2, SITES, WIDTH)
    parts = []
    for part in values.split([1, 2], dim=1):
        place = landing.take(part.nbytes)
        assert place is not None
        parts.append(place[: part.nbytes].view(torch.float32).view(part.shape).copy_(part))
    inbox.add([CapturedChunk(np.arange(2), parts, 1, [("r", 2)], senders=len(parts))])
    payload = finish(inbox, collector, 2)
    for i in range(SITES):
        rows = payload["post_block", i].values
        assert torch.equal(rows, values[:, i]) and landing.address_of(rows) is not None
        assert not torch.equal(rows, values[:, i - 1])


def test_who_reads_waits_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is there at once; its rows when they were copied, and their error is not lost."""
    steps = Steps()
    first, second = steps.open(2, 1)
    stuck: Future[None] = Future()
    monkeypatch.setattr(CopyThreads, "follow", lambda *_: [stuck])
    steps.step(first, second)
    payload = finish(steps.inbox, first, 1)
    assert not stuck.done()
    stuck.set_exception(OSError("no memory"))
    with pytest.raises(OSError, match="no memory"):
        _ = payload["post_block", 0].values


def test_rows_with_gaps_between_them() -> None:
    for only_new, runs in ((False, [0, 1, 2, 5]), (True, [0, 5])):
        inbox, collector = Steps().inbox, collector_for(5, runs)
        inbox.open("r", collector)
        values = torch.arange(5.0)[:, None, None].repeat(1, SITES, WIDTH)
        inbox.add([CapturedChunk(np.arange(5), [values], 1, [("r", 5)])])
        inbox.finish(collector)
        results = collector.results([0] * 5, finished=True, aborted=False, only_new=only_new)
        rows = results["inline"].payload["post_block", 0]
        assert rows.positions.tolist() == ([0, 2, 3, 4] if not only_new else [0, 1, 2, 3, 4])
        assert rows.values[:, 0].tolist() == rows.positions.tolist()


def count_threads(told: Connection) -> None:
    """How many the process has, before and after copies by threads of ours and by a plain one."""

    def number() -> int:
        return len(os.listdir("/proc/self/task"))

    torch.set_num_threads(4)
    rows = [torch.ones(64, 4096) for _ in range(6)]
    into = [torch.zeros(64, 4096) for _ in rows]
    threads = CopyThreads("test")
    counts = [number()]
    finished(threads.start((into, rows)))
    counts.append(number())
    assert all(bool((values == 1).all()) for values in into)
    counts.append(number())
    with ThreadPoolExecutor(1) as plain:
        plain.submit(torch.Tensor.copy_, into[0], rows[0]).result()
        counts.append(number())
    told.send([*counts, torch.get_num_threads()])


def test_a_thread_of_ours_has_no_threads_of_its_own() -> None:
    """Each would keep a team as large as the processor, which spins between copies. In a process
    of its own: an engine on a CPU ends what `torch.set_num_threads` does in its."""
    ours, theirs = warm.context().Pipe()
    process = warm.context().Process(target=count_threads, args=(theirs,))
    process.start()
    theirs.close()
    first, copied, before, plain, number = ours.recv()
    process.join()
    assert 0 < copied - first <= THREADS and number == 4
    assert plain - before == 4  # and such a team is seen


def test_who_does_not_wait_is_not_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "DIRECT_BYTES", 4096)
    monkeypatch.setattr(copies, "UNDERWAY_BYTES", 8192)
    threads, stuck = CopyThreads("test"), Future[None]()
    monkeypatch.setattr(threads, "start", lambda _: [stuck])
    work = [torch.zeros(1024)], [torch.ones(1024)]
    for _ in range(3):
        assert threads.follow(work) == [stuck]
    waited: list[int] = []
    monkeypatch.setattr(copies, "wait", lambda futures: waited.append(len(futures)))
    threads.follow(work)
    assert waited == [1], "the oldest, while others go on"
    small = [torch.zeros(8)], [torch.ones(8)]
    assert threads.follow(small) == [] and torch.equal(*map(torch.stack, small))


def saved(tensor: torch.Tensor) -> int:
    torch.save(tensor, stream := io.BytesIO())
    return len(stream.getvalue())


def test_few_rows_are_their_own_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept or saved of them is they alone, and their step's place is free again. Of one
    step, other sites' are not touched."""
    monkeypatch.setattr(CopyThreads, "run", Mock(side_effect=AssertionError))
    landing = Landing(64 * STEP_BYTES)
    steps = Steps(landing)
    payload = steps.of_one(1)
    values = [payload["post_block", i].values for i in range(SITES)]
    assert [v.untyped_storage().nbytes() for v in values] == [WIDTH * 4] * SITES
    gc.collect()
    assert landing.held == 0
    assert np.array_equal(np.asarray(payload["post_block", 0]), values[0].numpy())
    assert repr(payload["post_block", 0]) == "CapturedRows(1 rows, positions=[0])"
    step = torch.zeros(1000, SITES, WIDTH)
    assert saved(values[0]) < 4096 < saved(step[:1, 0])


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 40])
@pytest.mark.parametrize("least", [0, 1 << 40])
def test_few_rows_of_several_steps_are_their_own(
    least: int, kept_bytes: int, senders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that is kept, where they are copied once, and in other; by threads or without."""
    monkeypatch.setattr(kept_memory, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(copies, "JOINED_BYTES", least)
    joined = Mock(side_effect=row_pieces.joined)
    monkeypatch.setattr(row_pieces, "joined", joined)
    ran: list[int] = []
    run = CopyThreads.run

    def counted(threads: CopyThreads, some: copies.Copies) -> None:
        ran.append(len(some[0]))
        run(threads, some)

    monkeypatch.setattr(CopyThreads, "run", counted)
    landing = Landing(64 * STEP_BYTES)
    steps = Steps(landing, senders)
    payload = steps.of_one(5)
    for order in (reversed(range(SITES)), range(SITES)):
        for i in order:
            values = payload["post_block", i].values
            assert values.untyped_storage().nbytes() == 5 * WIDTH * 4
            assert torch.equal(values, torch.arange(5.0)[:, None].repeat(1, WIDTH))
    by_threads = ran[:1] if kept_bytes else ran  # `joined` of each site would have them, too
    assert by_threads == ([] if least else [5 if senders == 1 else 7])
    assert joined.call_count == (SITES if kept_bytes else 0)
    gc.collect()
    assert landing.held == 0


@pytest.mark.parametrize("senders", [1, 2])
def test_a_site_that_is_kept_keeps_no_other(senders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several steps: the memory of the others is used again, and that of the site is not
    before it is let go."""
    monkeypatch.setattr(kept_memory, "KEPT_BYTES", 0)
    steps, kept = Steps(Landing(64 * STEP_BYTES), senders), []
    for _ in range(9):
        payload = steps.of_one(5)
        last = [payload["post_block", i].values for i in range(SITES)]
        kept.append(last[1])
        del payload
    everything = [*kept[:-1], *last]
    assert len({rows.data_ptr() for rows in everything}) == 8 + SITES
    room: Any = steps.inbox.memory._room
    places = (8 + 2 * SITES) * 5 * WIDTH * 4
    assert max(rows.data_ptr() for rows in everything) - room.memory.ctypes.data < places
    for rows in everything:
        assert torch.equal(rows, torch.arange(5.0)[:, None].repeat(1, WIDTH))


def test_reading_rows_of_several_steps_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontend has some; to start others takes longer than to copy 16 MiB."""
    payload = Steps(Landing(64 * STEP_BYTES)).of_one(5)
    monkeypatch.setattr(row_pieces, "SHARED_BYTES", 0)
    monkeypatch.setattr(copies, "JOINED_BYTES", 0)
    monkeypatch.setattr(copies, "DIRECT_BYTES", 0)
    monkeypatch.setattr(copies, "CopyThreads", Mock(side_effect=AssertionError))
    values = payload["post_block", 0].values.as_subclass(torch.Tensor)
    assert torch.equal(values, torch.arange(5.0)[:, None].repeat(1, WIDTH))
    with pytest.raises(AssertionError):
        copies.joined([values, values])


def test_a_pickled_site_has_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory many rows are views of one block, and a pickled view is a pickle of all of it."""
    monkeypatch.setattr(row_pieces, "SHARED_BYTES", 1000 * WIDTH * 4)
    collector, inbox = collector_for(1000), Steps().inbox
    inbox.open("r", collector)
    values = torch.arange(1000.0)[:, None, None].repeat(1, SITES, WIDTH)
    inbox.add([CapturedChunk(np.arange(1000), [values], 1, [("r", 1000)])])
    rows = finish(inbox, collector, 1000)["post_block", 1]
    assert rows.values.untyped_storage().nbytes() >= 1000 * ROW_BYTES
    again = pickle.loads(pickle.dumps(rows))
    assert again.values.untyped_storage().nbytes() == 1000 * WIDTH * 4
    assert torch.equal(again.values, rows.values)
    assert not torch.equal(again.values, rows.values + 1)
    plain = rows.values.as_subclass(torch.Tensor)
    assert saved(rows.values) < 1100 * WIDTH * 4 < 1000 * ROW_BYTES < saved(plain)
    copied = copy.deepcopy(rows.values)
    assert torch.equal(copied, plain) and copied.untyped_storage().nbytes() == 1000 * WIDTH * 4
    # What is computed from it is a plain tensor.
    assert {type(t) for t in (again.values, copied, rows.values + 0, rows.at(3))} == {torch.Tensor}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("least", [0, 1 << 40])
def test_rows_are_joined_alike_by_one_thread_and_by_several(
    least: int, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of any number of steps, or senders; and no thread stays."""
    monkeypatch.setattr(copies, "JOINED_BYTES", least)
    monkeypatch.setattr(copies, "THREADS", 4)
    monkeypatch.setattr(copies, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(copies, "DIRECT_BYTES", 0)
    copied: list[int] = []
    copy_some = copies.copy

    def counted(some: copies.Copies) -> None:
        copied.append(threading.get_ident())
        copy_some(some)

    monkeypatch.setattr(copies, "copy", counted)
    whole = torch.randn(96, 96, 8).bfloat16()
    parts = list(whole.split([1, 60, 35], dim=axis))
    before = threading.active_count()
    assert torch.equal(copies.joined(parts, axis), whole)
    assert not torch.equal(copies.joined(parts[::-1], axis), whole)
    assert bool(copied) == (not least) and threading.get_ident() not in copied
    gc.collect()
    until = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_thread_that_copies_alone_has_no_team() -> None:
    """Large copies are numpy's there; what is copied is the same, of any strides."""
    rows = torch.randn(96, 8, 1024).bfloat16()
    for number, torchs in ((1, 1), (96, 0)):
        own = torch.zeros(8, number, 1024, dtype=torch.bfloat16)
        into, parts = own.transpose(0, 1), rows[:number]
        with patch.object(copies, "copy", wraps=copies.copy) as torchs_copy:
            copies.copy_alone(([into], [parts]))
        assert torch.equal(own, parts.transpose(0, 1)) and torchs_copy.call_count == torchs
    copies.copy_alone(([], []))


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sets(st.integers(1, 5))), min_size=1, max_size=6),
    st.sets(st.integers(1, 5)),
    st.booleans(),
)
def test_rows_of_steps_by_any_senders_at_any_places(
    steps: list[tuple[int, set[int]]], cuts: set[int], by_threads: bool
) -> None:
    """Each step has so many rows, and its sites cut among senders there; places are cut, too."""
    values = torch.randn(sum(number for number, _ in steps), 6, 4).bfloat16()
    parts = [
        [copies.integers(part) for part in rows.tensor_split(sorted(at), dim=1)]
        for rows, (_, at) in zip(values.split([n for n, _ in steps]), steps, strict=True)
    ]
    places = [torch.zeros_like(part) for part in values.tensor_split(sorted(cuts), dim=1)]
    filled = copies.steps_into([copies.integers(place) for place in places], parts)
    with patch.object(copies, "JOINED_BYTES", 0 if by_threads else 1 << 40):
        copies.fill(filled, CopyThreads("test"))
    assert torch.equal(torch.cat(places, dim=1), values)
    assert not torch.equal(torch.cat(places, dim=1), values.flip(0, 1))
