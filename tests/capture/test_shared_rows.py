# SPDX-License-Identifier: Apache-2.0
"""Large tensors between processes: each arrives as it was sent, whatever is kept and whatever is
given back in the meantime, and a place is used again only when nobody reads it."""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.connection import Connection
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.config.capture import CaptureConfig
from vllm.v1.capture.transport import copies
from vllm.v1.capture.transport import shared_rows as module
from vllm.v1.capture.transport.shared_rows import RowsOfOthers, SharedRows, share_rows
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.full

KB = 1 << 10


def rows(number: int, kilobytes: int) -> torch.Tensor:
    return torch.full((kilobytes, 2, 256), float(number), dtype=torch.bfloat16)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    random=st.randoms(),
    places=st.sampled_from([2, 5, 4096]),
)
@settings(deadline=None, max_examples=40)
def test_what_is_read_is_what_was_sent(sizes: list[int], random: Random, places: int) -> None:
    """Tensors that are kept are not written over; some are refused, and none when all are free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_BYTES", KB)
        patch.setattr(module, "PLACES", places)
        memory, others = SharedRows(100 * KB), RowsOfOthers()
        kept: dict[int, torch.Tensor] = {}
        for number, size in enumerate(sizes):
            meta = memory(rows(number, size))
            if meta is not None:
                # Of a slice: what keeps the place is the memory, not one tensor.
                kept[number] = others("bfloat16", (size, 2, 256), meta)[:, :1]
            for done in random.sample(sorted(kept), random.randint(0, len(kept))):
                assert bool((kept.pop(done) == done).all())
        assert all(bool((tensor == number).all()) for number, tensor in kept.items())
        kept.clear()
        gc.collect()
        assert memory(rows(0, 40)) is not None


def test_no_place_is_refused_until_one_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", KB)
    memory, others = SharedRows(100 * KB), RowsOfOthers()
    metas = [memory(rows(i, 40)) for i in range(2)]
    kept = [others("bfloat16", (40, 2, 256), meta) for meta in metas if meta is not None]
    assert len(kept) == 2 and memory(rows(2, 40)) is None
    del kept[1]
    again = memory(rows(2, 40))
    assert again is not None and metas[1] is not None and again["first"] == metas[1]["first"]
    assert memory(rows(3, 101)) is None
    assert memory(rows(3, 1)[:0]) is None


def _frontend(pipe: Connection) -> None:
    others = RowsOfOthers()
    decoder = MsgpackDecoder(list[torch.Tensor], oob_tensor_provider=others)
    for _ in range(3):
        tensors = decoder.decode(pipe.recv())
        pipe.send([(t.dtype, t.shape, t.double().sum().item()) for t in tensors])


def test_through_messages_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones and those that are no neighbours in memory too; with few buffers."""
    monkeypatch.setattr(module, "LEAST_BYTES", KB)
    monkeypatch.setattr(copies, "DIRECT_BYTES", 300 * KB)  # by several threads, and by none
    monkeypatch.setattr(copies, "PIECE_BYTES", 100 * KB)
    monkeypatch.setattr(copies, "THREADS", 3)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_frontend, args=(theirs,), daemon=True)
    process.start()
    memory = SharedRows(8 << 20)
    encoder = MsgpackEncoder(oob_tensor_consumer=memory)
    for number in range(3):
        large = torch.randn(300, 3, 128) + number
        sent = [large, large[:, 1:], torch.randn(2, 2), torch.randn(7, 40).double()]
        parts = [bytes(memoryview(part)) for part in encoder.encode(sent)]  # type: ignore[arg-type]
        assert len(parts) == 1 and len(parts[0]) < KB
        ours.send(parts)
        want = [(t.dtype, t.shape, t.double().sum().item()) for t in sent]
        got = ours.recv()
        assert got == want
        assert got[0] != got[1]
    process.join(30)
    assert process.exitcode == 0


def test_only_where_all_frontends_share_the_host() -> None:
    captures = CaptureConfig(capture_consumers=["inline"])
    assert isinstance(share_rows(captures, ["ipc:///tmp/a", "ipc:///tmp/b"]), SharedRows)
    assert share_rows(captures, ["ipc:///tmp/a", "tcp://10.0.0.1:5"]) is None
    assert share_rows(CaptureConfig(), ["ipc:///tmp/a"]) is None
