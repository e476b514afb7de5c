# SPDX-License-Identifier: Apache-2.0
"""A step's rows from a worker's process to the engine core's: whole, whatever their size, and
without a copy that is not needed. Through upstream's own message queue."""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.rows import step_rows
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, _reduce_tensor
from vllm.v1.capture.transport.landing import Landing, Places
from vllm.v1.interventions.capture_groups import CaptureGroup, LocalStream
from vllm.v1.interventions.makings import Scores
from vllm.v1.interventions.step_rows import Blocks, StepRows
from vllm.v1.interventions.worker.rows.arena import RowMap
from vllm.v1.interventions.worker.tables.matrices import ProjectionTable
from vllm.v1.outputs import ModelRunnerOutput

pytestmark = pytest.mark.quick

SITES, WIDTH, RING = 8, 64, 16 << 20
"""RING: bytes of a message that leaves the shared-memory ring."""
ALL = tuple(range(SITES))
RAW = CaptureGroup(ALL, SITES, [LocalStream(ALL)])
SCORES = CaptureGroup(
    ALL,
    0,
    [LocalStream(ALL, is_raw=False, width=3, dtype="float32", making=Scores((), 3, (0,)))],
    [1] * SITES,
)


def rows_of(count: int, landing: Landing | None = None) -> tuple[StepRows, torch.Tensor]:
    """The rows of a step in which three requests captured `count` tokens each at all sites, one of
    them scores; and the arena they came from."""
    tokens = [np.arange(i * count, (i + 1) * count) for i in range(3)]
    groups = {RAW: [("a", tokens[0]), ("b", tokens[1])], SCORES: [("c", tokens[2])]}
    arena = torch.randn(3 * SITES * count, WIDTH)
    table = ProjectionTable(WIDTH, torch.device("cpu"))
    table.write([(0, np.eye(3, WIDTH, dtype=np.float32).tobytes())])
    rows = step_rows(7, Blocks(groups), arena, torch.arange(3 * count), table, landing)
    return rows, arena


@pytest.mark.parametrize("size", [1 << 10, 3 << 20, RING, 40 << 20])
def test_a_step_of_any_size_arrives_whole(size: int) -> None:
    count = max(size // (2 * SITES * WIDTH * 4), 1)
    sent, arena = rows_of(count)
    writer = MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=RING)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(2) as pool:
        ready = pool.submit(reader.wait_until_ready)
        writer.wait_until_ready()
        ready.result(timeout=300)
        got = pool.submit(reader.dequeue, timeout=300)
        writer.enqueue(("success", ModelRunnerOutput(["a"], {"a": 0}, captured=sent)))
        _, output = got.result(timeout=300)
    block = arena[: 2 * SITES * count].view(2 * count, SITES, WIDTH)
    for name, part in (("a", block[:count]), ("b", block[count:])):
        chunk = output.captured.of(name)
        assert chunk.version == 7 and torch.equal(chunk.values[0], part)
    assert output.captured.of("b").positions.tolist() == list(range(count, 2 * count))
    scored = arena[2 * SITES * count :].view(count, SITES, WIDTH)[..., :3]
    assert torch.equal(output.captured.of("c").values[0], scored)
    assert not torch.equal(output.captured.of("a").values[0], block[count:])


def test_nothing_is_copied_to_be_sent() -> None:
    """The buffers that a message queue writes into the ring are the tensors' own."""
    rows, _ = rows_of(200)
    rows.of("a")  # views exist: they must not be sent, too
    buffers: list[pickle.PickleBuffer] = []
    pickler = pickle.Pickler(
        stream := io.BytesIO(), pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append
    )
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}
    pickler.dump(rows)
    sent = {np.frombuffer(b.raw(), np.uint8).ctypes.data: len(b.raw()) for b in buffers}
    # The rows, the scores, the positions, and little else.
    size = 2 * 200 * SITES * WIDTH * 4 + 200 * SITES * 3 * 4 + 3 * 200 * 8
    assert sent[rows.tensors()[0].data_ptr()] == rows.blocks.num_bytes == size
    assert sum(sent.values()) < size + 1024
    assert len(stream.getvalue()) < 4096


@pytest.mark.parametrize("lands", [True, False])
def test_no_tensor_is_sent_of_rows_that_landed(lands: bool) -> None:
    """One on a device would wait for all work there, and start CUDA in the engine core."""
    rows, _ = rows_of(4, Landing(1 << 20 if lands else 0))
    row_map = RowMap(SITES, 12, torch.device("cpu"))
    for block in rows.blocks.all:
        row_map.write(block, torch.arange(block.count))
    assert int(row_map.dest.ge(0).sum()) == 8 * SITES
    sent: list[torch.Tensor] = []

    def reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
        sent.append(tensor)
        return _reduce_tensor(tensor)

    pickler = pickle.Pickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: reduced}
    pickler.dump(rows)
    assert len(sent) == (not lands)


@pytest.mark.parametrize("lands", [True, False])
def test_rows_that_landed_are_sent_as_a_place(lands: bool) -> None:
    """However many they are; and the place is free when nobody reads it any more."""
    landing, places = Landing(1 << 20 if lands else 0), Places()
    sent, arena = rows_of(200, landing)
    message = pickle.dumps(sent)
    assert (len(message) < 4096) == lands
    got = pickle.loads(message)
    got.receive(places)
    del sent
    gc.collect()
    chunk = got.of("b")
    values = arena[200 * SITES : 400 * SITES].view(200, SITES, WIDTH)
    assert torch.equal(chunk.values[0], values) and not torch.equal(chunk.values[0], values + 1)
    assert (landing.held > 0) == (places.held > 0) == lands
    del got, chunk
    gc.collect()
    landing.reclaim()
    assert landing.held == places.held == 0
    assert (landing.take(1 << 20) is not None) == lands
