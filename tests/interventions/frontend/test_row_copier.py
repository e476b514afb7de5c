# SPDX-License-Identifier: Apache-2.0
"""Inline rows on their way to the memory of their completions: each is copied once, soon, by
threads; and what a result holds."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.capture.transport import copies
from vllm.v1.capture.transport.copies import THREADS, Copies, CopyThreads
from vllm.v1.interventions.frontend import row_copier as module
from vllm.v1.interventions.frontend.row_collector import RowCollector
from vllm.v1.interventions.frontend.row_copier import RowCopier
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, Selection, Stream

pytestmark = pytest.mark.quick

SITES, WIDTH, REQUESTS = 3, 16, 4
ROW_BYTES = SITES * WIDTH * 4


def collector_for(num_rows: int, selected: list[int] | None = None) -> RowCollector:
    """
    Args:
        selected: runs; all rows if it is None.
    """
    sites, runs = [("post_block", i) for i in range(SITES)], [0, num_rows]
    plan = CapturePlan(
        sites=sites,
        runs=runs,
        streams=[Stream(sites, runs, True, WIDTH, "float32")],
        consumers={"inline": Selection(sites, selected or runs)},
        hidden_size=WIDTH,
        dtype="float32",
    )
    return RowCollector(plan, [0], plan.consumers)


class Steps:
    """Steps in which some requests capture a row each; `alive`: of how many there is memory.

    Args:
        shared: their rows come as one chunk.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._blocks: list[weakref.ref[Any]] = []

    def step(self, copier: RowCopier, collectors: list[RowCollector]) -> None:
        at = len(self._blocks)
        # A numpy array, because storages have no weak references.
        memory = np.full((REQUESTS, SITES, WIDTH), float(at), dtype=np.float32)
        self._blocks.append(weakref.ref(memory))
        rows = torch.from_numpy(memory)
        if self._shared:
            owners = [(str(id(collector)), 1) for collector in collectors]
            for (name, _), collector in zip(owners, collectors, strict=True):
                copier.open(name, collector)
            number = len(owners)
            chunk = CapturedChunk(np.full(number, at), [rows[:number]], 1, owners)
            copier.share(chunk)
        for i, collector in enumerate(collectors if not self._shared else ()):
            chunk = CapturedChunk(np.array([at]), [rows[i : i + 1]], 1)
            copier.add(collector, [chunk])
        del memory, rows, chunk
        copier.step()

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(block() is not None for block in self._blocks)


def finish(copier: RowCopier, collector: RowCollector) -> None:
    copier.finish(collector)
    copier.settle()


def check(collector: RowCollector, num_rows: int) -> dict[Any, Any]:
    result = collector.results(
        [0] * num_rows, finished=True, aborted=False, only_new=False, settle=lambda: None
    )
    assert result["inline"].status == "ok", result["inline"].error
    payload: dict[Any, Any] = result["inline"].payload
    for rows in payload.values():
        assert rows.positions.tolist() == list(range(num_rows))
        assert torch.equal(rows.values[:, 0], torch.arange(float(num_rows)))
    return payload


@pytest.mark.parametrize("shared", [False, True])
def test_the_steps_memory_goes_soon(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a request runs: its rows keep those of others for a few steps. Without the
    threads' copies they would keep all, which is what this test can see."""
    num_steps = 20 * module.STEPS
    for copied in (True, False):
        copier, steps = RowCopier(CopyThreads("test")), Steps(shared)
        if not copied:
            monkeypatch.setattr(copier, "step", lambda: None)
        collectors = [collector_for(num_steps) for _ in range(REQUESTS)]
        for at in range(num_steps):
            steps.step(copier, collectors if at < 2 else collectors[:1])  # a straggler
        assert steps.alive <= 4 * module.STEPS if copied else steps.alive == num_steps
        finish(copier, collectors[0])
        check(collectors[0], num_steps)


def test_shared_rows_and_others_stay_in_order() -> None:
    """A request's rows may come with those of others in one step and alone in the next; those of
    who has ended, or wants none, are nobody's."""
    copier, one, two = RowCopier(CopyThreads("test")), collector_for(6), collector_for(3)
    copier.open("one", one)
    copier.open("two", two)
    copier.open("ended", collector_for(3))
    gc.collect()

    def values(*positions: int) -> list[torch.Tensor]:
        return [torch.tensor(positions).float()[:, None, None].repeat(1, SITES, WIDTH)]

    def share(at: int, *names: str) -> None:
        owners = [(name, 1) for name in names]
        rows = [at] * len(names)
        copier.share(CapturedChunk(np.array(rows), values(*rows), 1, owners))

    share(0, "ended", "one", "two")
    copier.add(one, [CapturedChunk(np.array([1]), values(1), 1)])
    share(1, "two")
    share(2, "two", "one")
    copier.step()
    copier.add(one, [CapturedChunk(np.array([3, 4]), values(3, 4), 1)])
    share(3, "nobody")
    share(5, "one", "ended")
    finish(copier, two)
    check(two, 3)
    finish(copier, one)
    check(one, 6)
    share(0, "nobody")
    assert not copier._shared


def test_who_gathers_more_than_the_threads_can_copy_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES", 2 * ROW_BYTES * REQUESTS)
    copier, steps = RowCopier(CopyThreads("test")), Steps()
    stuck: Future[None] = Future()
    monkeypatch.setattr(copier._threads, "start", lambda _: [stuck])
    collectors = [collector_for(8) for _ in range(REQUESTS)]
    for _ in range(5):
        steps.step(copier, collectors)  # the threads have the first two
    assert not stuck.done()
    monkeypatch.setattr(module, "finished", lambda futures: stuck.set_result(None))
    steps.step(copier, collectors)
    assert stuck.done()


@pytest.mark.parametrize("least", [1, 1 << 30])
def test_the_rest_is_copied_at_the_end(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all requests at once; by threads if it is much, and then, too, each row to its place."""
    monkeypatch.setattr(copies, "DIRECT_BYTES", least)
    monkeypatch.setattr(copies, "PIECE_BYTES", 5 * ROW_BYTES)
    monkeypatch.setattr(copies, "THREADS", 3)
    copier = RowCopier(CopyThreads("test"))
    started: list[object] = []
    start = copier._threads.start

    def noted(work: Copies) -> list[Future[None]]:
        started.append(work)
        return start(work)

    monkeypatch.setattr(copier._threads, "start", noted)
    collectors = [collector_for(23) for _ in range(2)]
    for collector in collectors:
        at = 0
        for count in (1, 9, 13):
            values = torch.arange(float(at), at + count)[:, None, None].repeat(1, SITES, WIDTH)
            copier.add(collector, [CapturedChunk(np.arange(at, at + count), [values], 1)])
            at += count
        copier.finish(collector)
        for values in collector._rows.view().values:
            values.fill_(-1)
    copier.step()
    for collector in collectors:
        check(collector, 23)
    assert len(started) == (least == 1)


def test_a_result_that_is_no_view_waits_for_its_rows() -> None:
    """Rows with gaps between them, and what is streamed, are copied out of where rows are put."""
    for only_new, runs in ((False, [0, 1, 2, 5]), (True, [0, 5])):
        copier, collector = RowCopier(CopyThreads("test")), collector_for(5, runs)
        values = torch.arange(5.0)[:, None, None].repeat(1, SITES, WIDTH)
        copier.add(collector, [CapturedChunk(np.arange(5), [values], 1)])
        copier.finish(collector)
        results = collector.results(
            [0] * 5, finished=True, aborted=False, only_new=only_new, settle=copier.settle
        )
        rows = results["inline"].payload["post_block", 0]
        assert rows.positions.tolist() == ([0, 2, 3, 4] if not only_new else [0, 1, 2, 3, 4])
        assert rows.values[:, 0].tolist() == rows.positions.tolist()


COUNT_THREADS = """
import os
from concurrent.futures import ThreadPoolExecutor
import torch
from vllm.v1.capture.transport.copies import CopyThreads, finished

def number():
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
print(*counts, torch.get_num_threads())
"""
"""Apart, because an engine on a CPU ends what `torch.set_num_threads` does in its process."""


def test_a_thread_of_ours_has_no_threads_of_its_own() -> None:
    """Each would keep a team as large as the processor, which spins between copies."""
    command = [sys.executable, "-c", COUNT_THREADS]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    first, copied, before, plain, number = map(int, done.stdout.splitlines()[-1].split())
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
    assert waited == [3]
    small = [torch.zeros(8)], [torch.ones(8)]
    assert threads.follow(small) == [] and torch.equal(*map(torch.stack, small))


def test_a_thread_that_fails_is_no_lost_row() -> None:
    """The error comes out, where a result would be made of rows that are not there."""
    copier, collector = RowCopier(CopyThreads("test")), collector_for(2)
    copier.add(collector, [CapturedChunk(np.arange(2), [torch.zeros(2, SITES, WIDTH + 1)], 1)])
    for _ in range(module.STEPS):
        copier.step()
    with pytest.raises(RuntimeError, match="must match the size"):
        copier.finish(collector)


def test_more_rows_than_the_plan_has_room_for_are_an_error() -> None:
    copier, collector = RowCopier(CopyThreads("test")), collector_for(2)
    copier.add(collector, [CapturedChunk(np.arange(3), [torch.zeros(3, SITES, WIDTH)], 1)])
    with pytest.raises(ValueError, match="wrong shape"):
        for _ in range(module.STEPS):
            copier.step()


def test_a_pickled_site_has_its_own_rows_only() -> None:
    """In memory all sites are views of one block, and a pickled view is a pickle of all of it."""
    collector = collector_for(1000)
    values = torch.arange(1000.0)[:, None, None].repeat(1, SITES, WIDTH)
    copier = RowCopier(CopyThreads("test"))
    copier.add(collector, [CapturedChunk(np.arange(1000), [values], 1)])
    finish(copier, collector)
    rows = check(collector, 1000)["post_block", 1]
    assert rows.values.untyped_storage().nbytes() >= 1000 * ROW_BYTES
    again = pickle.loads(pickle.dumps(rows))
    assert again.values.untyped_storage().nbytes() == 1000 * WIDTH * 4
    assert torch.equal(again.values, rows.values)
    assert not torch.equal(again.values, rows.values + 1)


def test_what_is_reserved_and_not_written_takes_no_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    size = 256 << 20
    collector = collector_for(size // ROW_BYTES)
    before = resident()
    copier = RowCopier(CopyThreads("test"))
    copier.add(collector, [CapturedChunk(np.array([0]), [torch.zeros(1, SITES, WIDTH)], 1)])
    finish(copier, collector)
    check(collector, 1)
    assert resident() - before < size // 8
    written = np.ones(size, dtype=np.uint8)  # and this would be seen
    assert resident() - before > size // 2
    del written
