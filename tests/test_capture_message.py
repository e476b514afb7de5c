# SPDX-License-Identifier: Apache-2.0
"""The rows of a step in a message: few buffers, and each request gets its own, in order."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.message import pack, unpack
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions import CapturedChunk
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

SITES, WIDTH = 3, 32
Asked = tuple[int, bool, int, int]
"""(rows, whether the request has memory of its own, number of chunks, version)."""


def sent(outputs: list[EngineCoreOutput]) -> tuple[list[EngineCoreOutput], int]:
    """What arrives, and in how many buffers."""
    message = EngineCoreOutputs(outputs=outputs)
    pack({0: message})
    parts = MsgpackEncoder(size_threshold=0).encode(message)
    got = MsgpackDecoder(EngineCoreOutputs).decode([memoryview(p) for p in parts])  # type: ignore[arg-type]
    return got.outputs, len(parts)


def received(outputs: list[EngineCoreOutput]) -> dict[str, list[CapturedChunk]]:
    """As a frontend takes them: the first may be the rows of those that follow."""
    ahead: dict[str, list[CapturedChunk]] = {}
    if outputs and outputs[0].captured and outputs[0].captured[0].owners:
        ahead = unpack(outputs.pop(0).captured or [])
    found = {o.request_id: ahead.pop(o.request_id, o.captured) for o in outputs}
    assert not ahead
    return {name: chunks for name, chunks in found.items() if chunks is not None}


def same(one: CapturedChunk, other: CapturedChunk) -> bool:
    values = zip(one.values, other.values, strict=True)
    return (
        one.positions.tolist() == other.positions.tolist()
        and one.version == other.version
        and all(a.shape == b.shape and torch.equal(a, b) for a, b in values)
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 2), st.integers(1, 2)),
        max_size=6,
    ),
    st.randoms(),
    st.sampled_from([slice(0, SITES), slice(0, 2), slice(1, SITES)]),
    st.booleans(),
)
def test_each_gets_its_own(asked: list[Asked], random: Random, sites: slice, scores: bool) -> None:
    """Whatever the order, with chunks that cannot be joined, and streams that are not relayed."""
    total = sum(count * chunks for count, _, chunks, _ in asked)
    rows, first = torch.randn(total, SITES, WIDTH)[:, sites], 0
    other = torch.randn(total, 1, 2)
    want: dict[str, list[CapturedChunk]] = {}
    for i, (count, own, chunks, version) in enumerate(asked):
        for _ in range(chunks):
            mine = slice(first, first := first + count)
            values = [rows[mine].clone() if own else rows[mine], rows[mine, :0]]
            values += [other[mine]] if scores else []
            chunk = CapturedChunk(np.arange(mine.start, mine.stop), values, version)
            want.setdefault(str(i), []).append(chunk)
    outputs = [EngineCoreOutput(str(i), [i], captured=want.get(str(i))) for i in range(len(asked))]
    random.shuffle(outputs)
    got = received(sent(outputs)[0])
    assert got.keys() == want.keys()
    for name, chunks_of in want.items():
        assert all(same(a, b) for a, b in zip(got[name], chunks_of, strict=True))
    if len(want) > 1:
        one, two = list(want)[:2]
        assert not same(got[one][0], want[two][0])


def test_neighbours_are_one_buffer() -> None:
    """However many they are; copies, which cannot be, show what it would be without."""
    for own, most in ((False, 4), (True, 40)):
        rows = torch.randn(40, SITES, WIDTH).split(1)
        chunks = [
            CapturedChunk(np.array([i]), [row.clone() if own else row], 1)
            for i, row in enumerate(rows)
        ]
        outputs = [EngineCoreOutput(str(c.positions[0]), [1], captured=[c]) for c in chunks]
        _, parts = sent(outputs)
        assert (parts > most) == own


def test_nothing_captured_is_nothing_more_to_send() -> None:
    outputs = [EngineCoreOutput(str(i), [1]) for i in range(3)]
    assert len(sent(outputs)[0]) == 3
    assert pack(None) is None


def test_neighbours_in_different_memory_are_not_joined() -> None:
    """Two allocations may happen to touch; a view of one must not reach into the other."""
    memory = np.arange(4 * SITES * WIDTH, dtype=np.float32)
    halves = [torch.from_numpy(half.reshape(2, SITES, WIDTH)) for half in np.split(memory, 2)]
    assert halves[0].data_ptr() + halves[0].nbytes == halves[1].data_ptr()
    chunks = {str(i): CapturedChunk(np.array([i, 9]), [half], 1) for i, half in enumerate(halves)}
    outputs = [EngineCoreOutput(name, [1], captured=[chunk]) for name, chunk in chunks.items()]
    got = received(sent(outputs)[0])
    assert all(same(got[name][0], chunk) for name, chunk in chunks.items())
    assert not same(got["0"][0], chunks["1"])
