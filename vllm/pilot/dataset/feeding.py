# SPDX-License-Identifier: Apache-2.0
"""Feeds a trainer in another process with rows of a data set, shuffled, as `stream` asks for them.

The rows of all examples, in the order of the data, are cut into blocks of `buffer_rows`. A block is
shuffled by a seed of its own, and leaves in batches. So a batch follows from its place alone

    [block, example, skip, batch]

where the block begins: with rows from `skip` on of that example, counted over all epochs. Who asks
for the next place has the one before. Neither process keeps anything on a disk: an engine that was
started again goes on from the place that the trainer names. A trainer asks for a batch while it
still works on the one before, and says so: that one is not its own yet.

Messages are JSON and plain bytes: nothing that is received is executed.
"""

import hashlib
import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import zmq

from vllm import LLM
from vllm.pilot.dataset.capture_run import Captured, CaptureRun
from vllm.pilot.dataset.examples import DataFile, Example
from vllm.pilot.dataset.trainer.streaming import FORMAT, Place, need_address, need_place
from vllm.pilot.records import DatasetError
from vllm.v1.capture.copies import empty, integers

WAIT_SECONDS = 0.5
"""Seconds after which a trainer hears that its batch is not there yet."""
IDLE_MILLISECONDS = 200
BUFFER_BYTES = 1 << 30
"""Bytes of rows that may wait in the run for an earlier example to end."""


@dataclass(frozen=True)
class Block:
    """Rows that are shuffled together."""

    start: Place
    """Place of its first batch."""
    stop: Place
    """Place of the first batch of the next one."""
    columns: tuple[torch.Tensor, ...]
    """Fields of a `Batch`, shuffled."""

    def batch(self, number: int, rows: int) -> tuple[torch.Tensor, ...] | None:
        """Return a batch of so many rows, of the last block the rest; None if there is no such."""
        at = slice(number * rows, (number + 1) * rows)
        if at.start >= len(self.columns[0]):
            return None
        return tuple(column[at] for column in self.columns)


class Filling:
    """A block that is captured: its rows are put where the shuffled block has them.

    Args:
        start: place of its first batch.
        rows: number of rows that it takes.
        seed: of all blocks.
    """

    def __init__(self, start: Place, rows: int, seed: int) -> None:
        self.start, self.left = start, rows
        digest = hashlib.sha256(f"{seed} {start[0]}".encode()).digest()
        seeded = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        self._places = torch.randperm(rows, generator=seeded)
        """int64 [rows]: the place of each row that comes, in the order in which they come."""
        self._labels = [torch.empty(rows, dtype=torch.int64) for _ in range(3)]
        self._values: torch.Tensor | None = None

    def put(self, values: torch.Tensor, *labels: torch.Tensor) -> None:
        """Take further rows, [n, width], and their labels, [n] each; no more than are `left`."""
        if self._values is None:
            self._values = empty((len(self._places), values.shape[1]), values.dtype)
        came = len(self._places) - self.left
        places = self._places[came : came + len(values)]
        # By numpy, which does it in this thread: torch would wait for a team of others.
        integers(self._values)[places.numpy()] = integers(values)
        for column, label in zip(self._labels, labels, strict=True):
            column[places] = label
        self.left -= len(values)

    def block(self, stop: Place) -> Block:
        """Return the rows that came, shuffled, which are all or the last of the data."""
        assert self._values is not None
        columns = (self._values, *self._labels)
        if self.left:
            kept = self._places[: len(self._places) - self.left].sort().values
            columns = tuple(column[kept] for column in columns)
        return Block(self.start, stop, columns)


class Feeder:
    """Answers one trainer, and captures the next block meanwhile; `feed` says what arguments are.

    Args:
        run: sends examples to the engine.
        site: the site's name in `Captured.values`.
        total: number of examples in all epochs; None if they do not end.
    """

    def __init__(
        self,
        run: CaptureRun,
        data: DataFile,
        num_examples: int,
        site: str,
        plan: str,
        batch_rows: int,
        buffer_rows: int,
        total: int | None,
        seed: int,
    ) -> None:
        self._run, self._data, self._num_examples, self._site = run, data, num_examples, site
        self._plan, self._batch_rows, self._block_rows = plan, batch_rows, buffer_rows
        self._total, self._seed = total, seed
        self._asked: Place = (0, 0, 0, 0)
        """Place of the first batch that is not the trainer's own."""
        self._rewind(self._asked)

    def serve(self, address: str) -> None:
        """Answer until the trainer has asked for what is behind the last batch."""
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.setsockopt(zmq.LINGER, 1000)
            socket.bind(address)
            since: float | None = None
            place = self._asked
            try:
                while True:
                    busy = self._fill()
                    if since is None and socket.poll(0 if busy else IDLE_MILLISECONDS):
                        read = self._read(socket.recv())
                        if isinstance(read, str):
                            socket.send(_say(refused=read))
                            continue
                        place, since = read, time.monotonic()
                    if since is None:
                        continue
                    answer = self._answer(place)
                    if answer is not None or time.monotonic() - since > WAIT_SECONDS:
                        socket.send_multipart(answer or [_say(wait=True)], copy=False)
                        since = None
                        if answer is END and place == self._asked:
                            return
            finally:
                self._blocks.close()

    def _read(self, message: bytes) -> Place | str:
        """The place that a trainer asks for; or why it gets nothing. What lies before "done" is the
        trainer's own; by default what lies before the place."""
        try:
            asked = json.loads(message)
            plan, place = asked["plan"], asked["next"]
            if plan not in (None, self._plan):
                return "state is of other data, or of another engine, site, seed or batch size"
            place = self._asked if place is None else need_place(place)
            done = asked.get("done")
            self._asked = place if done is None else need_place(done)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "the request is none of vllm.pilot.dataset.stream"
        return place

    def _rewind(self, place: Place) -> None:
        self._current: Block | None = None
        self._next: Block | None = None
        self._filling: Place = (*place[:3], 0)
        self._blocks = self._made(self._filling)
        self._ended = False

    def _fill(self) -> bool:
        """Take one more example into the next block; False if that is full, or there are none."""
        if self._next is not None or self._ended:
            return False
        for block in self._blocks:
            if block is not None:
                self._next, self._filling = block, block.stop
            return True
        self._ended = True
        return False

    def _answer(self, place: Place) -> list[Any] | None:
        """The answer to who asks for a place; None while its rows are captured."""
        start: Place = (*place[:3], 0)
        if self._next is not None and self._next.start == start:
            self._current, self._next = self._next, None
        block = self._current
        if block is not None and block.start == start:
            batch = block.batch(place[3], self._batch_rows)
            if batch is None:
                return [_say(refused=f"there is no batch {list(place)}")]
            more = block.batch(place[3] + 1, self._batch_rows) is not None
            after = (*start[:3], place[3] + 1) if more else block.stop
            dtype = str(batch[0].dtype).removeprefix("torch.")
            shape = [*batch[0].shape]
            said = _say(at=place, next=after, plan=self._plan, shape=shape, dtype=dtype)
            return [said, *(column.contiguous().view(torch.uint8).numpy() for column in batch)]
        if self._filling == start:
            self._next = None  # an earlier one, which is the trainer's already
        else:
            self._blocks.close()
            self._rewind(place)
        return END if self._ended else None

    def _made(self, start: Place) -> Generator[Block | None]:
        """Blocks from a place on; None after each example, so that others have their turn."""
        skip, filling = start[2], Filling(start, self._block_rows, self._seed)
        for captured in self._run(self._examples(start[1])):
            number, at, count = captured.example.number, skip, len(captured.positions)
            skip = 0
            while at < count:
                until = min(count, at + filling.left)
                filling.put(*self._cut(captured, at, until))
                at = until
                if not filling.left:
                    stop = (filling.start[0] + 1, number, at, 0)
                    yield filling.block(stop)
                    filling = Filling(stop, self._block_rows, self._seed)
            yield None
        if filling.left < self._block_rows:
            assert self._total is not None
            yield filling.block((filling.start[0] + 1, self._total, 0, 0))

    def _examples(self, first: int) -> Iterator[Example]:
        """Examples from `first` on, numbered over all epochs."""
        number = first - first % self._num_examples
        while self._total is None or number < self._total:
            for example in self._data:
                if number >= first:
                    yield replace(example, number=number)
                number += 1

    def _cut(self, captured: Captured, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        number = captured.example.number % self._num_examples
        labels = torch.from_numpy(captured.positions), torch.from_numpy(captured.token_ids)
        rows = captured.values[self._site][start:stop]
        return rows, torch.full((stop - start,), number), *(c[start:stop] for c in labels)


def feed(
    llm: LLM,
    data: DataFile,
    address: str,
    point: str,
    layer: int,
    positions: Any = "all_prompt",
    *,
    more: Mapping[str, Any] | None = None,
    batch_rows: int = 4096,
    buffer_rows: int = 1 << 18,
    epochs: int | None = None,
    seed: int = 0,
    skip_refused: bool = False,
) -> None:
    """Capture the rows of a site over a data set for a trainer that reads them by `stream`.

    Returns when the trainer has all epochs. It can be ended and called again at any moment.

    Args:
        llm: an engine with `capture_consumers=["inline"]`; with `capture_stop_after=layer` it does
            no more than this.
        address: `ipc:///path`, or `tcp://127.0.0.1:port`. Who can connect gets the rows.
        point, layer, positions: which rows.
        more: further keys of the capture request.
        batch_rows: number of rows in a batch.
        buffer_rows: number of rows that are shuffled together, a multiple of `batch_rows`; twice as
            many are in memory, and no more are captured ahead.
        epochs: how often the data is gone through; None for as long as the trainer asks.
        seed: of the shuffling.
        skip_refused: go on where the engine refuses an example, as one that is too long.

    Raises:
        StreamError: `address` is wrong.
        DatasetError: another argument is wrong, the data cannot be read, or the engine refuses an
            example.
    """
    need_address(address)
    if batch_rows < 1 or buffer_rows < 1 or buffer_rows % batch_rows:
        raise DatasetError(
            f"buffer_rows: must be a multiple of batch_rows={batch_rows}, got {buffer_rows}"
        )
    if epochs is not None and epochs < 1:
        raise DatasetError(f"epochs: must be at least 1, or None for no end, got {epochs}")
    contents = data.contents()
    asked = {"hooks": {point: [layer]}, "positions": positions, **(more or {})}
    run = CaptureRun(llm, asked, 1, skip_refused, BUFFER_BYTES)
    facts = [
        FORMAT, str(llm.model_config.model), contents.sha256, data.prompt_column, repr(asked),
        batch_rows, buffer_rows, seed,
    ]  # fmt: skip
    plan = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    total = None if epochs is None else epochs * contents.num_examples
    feeder = Feeder(
        run,
        data,
        contents.num_examples,
        f"{point}.{layer}",
        plan,
        batch_rows,
        buffer_rows,
        total,
        seed,
    )
    feeder.serve(address)


def _say(**facts: Any) -> bytes:
    return json.dumps(facts).encode()


END = [_say(end=True)]
"""The answer to who asks for what is behind the last batch."""
