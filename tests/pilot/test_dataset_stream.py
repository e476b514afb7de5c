# SPDX-License-Identifier: Apache-2.0
"""Streams without an engine: every row once, shuffled, whoever of the two is started again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from vllm.pilot import dataset
from vllm.pilot.dataset import feeding
from vllm.pilot.dataset.capture_run import Captured
from vllm.pilot.dataset.examples import DataFile, Example
from vllm.pilot.dataset.feeding import Feeder
from vllm.pilot.dataset.trainer import streaming
from vllm.pilot.dataset.trainer.streaming import Batch, Place

pytestmark = pytest.mark.quick

EXAMPLES, WIDTH, BATCH, BLOCK = 23, 4, 8, 24
COUNTS = [number % 7 for number in range(EXAMPLES)]
ROWS = [(number, at) for number, count in enumerate(COUNTS) for at in range(count)]
PLAN = "p"


def row(number: int, at: int) -> torch.Tensor:
    return torch.tensor([number, at, number * at, 1.0]).bfloat16()


class Run:
    """In place of a run through an engine."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        """Numbers of the examples, in the order in which they were captured."""

    def __call__(self, examples: Iterable[Example]) -> Iterator[Captured]:
        for example in examples:
            self.captured.append(example.number)
            number = example.number % EXAMPLES
            at = np.arange(COUNTS[number])
            values = (
                torch.stack([row(number, i) for i in at.tolist()])
                if len(at)
                else torch.empty(0, WIDTH)
            )
            rows = {"post_block.1": values.bfloat16()}
            yield Captured(example, at, at + 100 * number, rows, 1, 0, "", None)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(feeding, "WAIT_SECONDS", 0.05)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/rows"


@pytest.fixture
def data(tmp_path: Path) -> DataFile:
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(EXAMPLES)))
    return DataFile(str(tmp_path / "d.jsonl"))


def feeder(data: DataFile, run: Any, epochs: int | None = 1, seed: int = 0) -> Feeder:
    total = None if epochs is None else epochs * EXAMPLES
    return Feeder(run, data, EXAMPLES, "post_block.1", PLAN, BATCH, BLOCK, total, seed)


def started(feeder: Feeder, address: str) -> threading.Thread:
    thread = threading.Thread(target=feeder.serve, args=(address,), daemon=True)
    thread.start()
    return thread


def identities(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """Example and position of each row, whose values are checked."""
    found = []
    for batch in batches:
        pairs = list(zip(batch.examples.tolist(), batch.positions.tolist(), strict=True))
        assert batch.token_ids.tolist() == [at + 100 * number for number, at in pairs]
        assert torch.equal(batch.values, torch.stack([row(*pair) for pair in pairs]))
        found += pairs
    return found


def drained(feeder: Feeder, first: Place = (0, 0, 0, 0)) -> list[tuple[Place, Batch]]:
    """Every batch from a place on, without a socket."""
    found: list[tuple[Place, Batch]] = []
    place = first
    while True:
        while (answer := feeder._answer(place)) is None:
            feeder._fill()
        said = json.loads(answer[0])
        if "end" in said:
            return found
        columns = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in answer[1:]]
        values = columns[0].view(torch.bfloat16).reshape(said["shape"])
        found.append((place, Batch(values, *(c.view(torch.int64) for c in columns[1:]))))
        place = streaming.need_place(said["next"])


def test_every_row_once_and_shuffled(data: DataFile, address: str) -> None:
    thread = started(feeder(data, Run(), epochs=2), address)
    batches = list(dataset.stream(address))
    thread.join(10)
    assert not thread.is_alive()
    seen = identities(batches)
    assert sorted(seen) == sorted(ROWS * 2) and seen != ROWS * 2
    assert {len(batch.values) for batch in batches[:-1]} == {BATCH}
    # A block is of neighbours in the data: those of another seed are the same, in another order.
    other = identities(batch for _, batch in drained(feeder(data, Run(), epochs=2, seed=1)))
    assert other != seen and sorted(other[:BLOCK]) == sorted(seen[:BLOCK])


def test_a_place_says_what_comes(data: DataFile) -> None:
    """From every place on, an engine that was just started gives what the first one gave."""
    whole = drained(feeder(data, Run(), epochs=2))
    for at, (place, _) in enumerate(whole):
        rest = drained(feeder(data, Run(), epochs=2), place)
        assert [p for p, _ in rest] == [p for p, _ in whole[at:]]
        for (_, one), (_, other) in zip(rest, whole[at:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({place for place, _ in whole}) == len(whole) > 10


def test_places_are_asked_for_in_any_order(data: DataFile) -> None:
    """As by trainers that go on from an old checkpoint, or skip a block that is there."""
    whole = dict(drained(feeder(data, Run(), epochs=2)))
    one = feeder(data, Run(), epochs=2)
    places = list(whole)
    while one._fill():
        pass  # the first block is there, and the trainer wants the second
    for at in (3, 0, 5, 1, -1, 4, 3, 7):
        place = places[at]
        for _ in range(3 * EXAMPLES):
            if (answer := one._answer(place)) is not None:
                break
            one._fill()
        assert answer is not None, "it never comes"
        assert bytes(answer[2]) == whole[place].examples.numpy().tobytes()


def test_no_more_is_captured_than_two_blocks(data: DataFile) -> None:
    run = Run()
    endless = feeder(data, run, epochs=None)
    while endless._fill():
        pass
    captured = sum(COUNTS[number % EXAMPLES] for number in run.captured)
    assert BLOCK <= captured <= BLOCK + max(COUNTS)


def test_a_trainer_that_is_lost(data: DataFile, address: str) -> None:
    """The next one goes on behind its state; without one it gets the last batch again."""
    started(feeder(data, Run()), address)
    first = dataset.stream(address)
    batches = [next(first) for _ in range(4)]
    first.close()
    again = dataset.stream(address)
    repeated = next(again)
    assert torch.equal(repeated.examples, batches[3].examples)
    again.close()
    state = json.loads(json.dumps(again.state))
    rest = list(dataset.stream(address, state))
    assert sorted(identities([*batches, *rest])) == sorted(ROWS)


def test_a_trainer_that_is_lost_at_the_last_batch(data: DataFile, address: str) -> None:
    """The engine waits until that batch is acknowledged, too, though the end was asked for."""
    thread = started(feeder(data, Run()), address)
    first = dataset.stream(address)
    batches = [next(first) for _ in range(-(-len(ROWS) // BATCH))]
    assert first._socket is not None and first._socket.poll(5000), "the end is not told"
    first.close()
    assert thread.is_alive()
    again = list(dataset.stream(address, patience=5))
    thread.join(10)
    assert not thread.is_alive()
    assert len(again) == 1 and torch.equal(again[0].values, batches[-1].values)


def test_an_engine_that_is_lost(data: DataFile, tmp_path: Path) -> None:
    """The trainer waits, and another engine goes on where the trainer is."""
    addresses = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    started(feeder(data, Run()), addresses[0])
    first = dataset.stream(addresses[0])
    batches = [next(first) for _ in range(5)]
    waiting = dataset.stream(addresses[1], first.state)
    timer = threading.Timer(0.7, lambda: started(feeder(data, Run()), addresses[1]))
    timer.start()
    assert sorted(identities([*batches, *waiting])) == sorted(ROWS)


def test_what_is_refused(data: DataFile, address: str) -> None:
    started(feeder(data, Run()), address)
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(address)
        for message in (b"", b"\xff", b"[]", b"{}", b'{"plan": null, "next": [0, 0, 0]}',
                        b'{"plan": null, "next": [0, 0, 0, true]}', b"[" * 100_000):  # fmt: skip
            socket.send(message)
            assert "refused" in json.loads(socket.recv())
        socket.send(b'{"plan": null, "next": [0, 0, 0, 99]}')
        while "wait" in (said := json.loads(socket.recv_multipart()[0])):
            socket.send(b'{"plan": null, "next": [0, 0, 0, 99]}')
        assert "refused" in said
    state = {"plan": PLAN, "next": [0, 0, 0, 0]}
    assert len(next(dataset.stream(address, state)).values) == BATCH
    with pytest.raises(dataset.StreamError, match="of other data"):
        next(dataset.stream(address, {**state, "plan": "q"}))


def test_adapters(data: DataFile, tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    for address in addresses:
        started(feeder(data, Run()), address)
    rows = list(dataset.for_sae_lens(dataset.stream(addresses[0])))
    assert {each.dtype for each in rows} == {torch.float32}
    buffer = dataset.for_dictionary_learning(dataset.stream(addresses[1]))
    assert all(torch.equal(a, b) for a, b in zip(rows, buffer, strict=True))
    assert buffer.config["stream"]["plan"] == PLAN


def test_examples_keep_their_numbers(data: DataFile) -> None:
    """Over all epochs; those of the data are unchanged."""
    numbered = list(feeder(data, Run(), epochs=2)._examples(EXAMPLES + 3))
    assert [each.number for each in numbered] == list(range(EXAMPLES + 3, 2 * EXAMPLES))
    assert replace(numbered[0], number=3) == list(data)[3]
