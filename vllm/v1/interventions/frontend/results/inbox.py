# SPDX-License-Identifier: Apache-2.0
"""Rows as they come from the engine core: those of many requests together, for each to read."""

from weakref import WeakValueDictionary

from vllm.v1.capture.transport.landing import Places
from vllm.v1.interventions.frontend.results.collector import RowCollector
from vllm.v1.interventions.frontend.results.link import CaptureLink
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.frontend.results.pieces import Run
from vllm.v1.interventions.messages import CapturedChunk

ORDINARY_BYTES = 192 << 20
"""Rows in ordinary memory that may gather before they are copied: each keeps its whole step's."""
LANDING_SHARE = 16
"""Divisor of the landing's size: the part that may gather before rows are copied, where results
hold too much of the landing."""
RUN_STEPS = 64
"""Steps of a run, at most: a stream has all of its run's put together again at each step."""
ROOM_STEPS = 7
"""The steps that have room in the landing beside what results hold: two that run, two on their way
here, one that is copied, and two whose places are on their way back to their worker."""


class RowInbox:
    """Gives the rows of one frontend's requests to their collectors.

    They stay where they landed, and results are views of them, until those hold three quarters of
    the landing, or less where steps are large, but half. From then on threads copy rows to memory
    of their request's own: of one that ends, and of those that run when their steps hold much.

    Args:
        frontends: how many frontends the engine core has.
    """

    def __init__(self, link: CaptureLink, frontends: int) -> None:
        self._link, self._frontends = link, frontends
        self._collectors: WeakValueDictionary[str, RowCollector] = WeakValueDictionary()
        self._runs: dict[tuple[tuple[str, int], ...], Run] = {}
        """Runs of the last message, by owners; the next message may continue them."""
        self._ordinary = self._landed = 0
        """Bytes that came since rows were last copied."""
        self._largest = 0
        """The most bytes that a message had in the landing."""
        self._size = 0
        """Bytes of the landing."""
        self.memory = KeptMemory()
        """Memory that rows are copied to: as much of it is kept as this frontend's share of the
        landing."""

    def open(self, request_id: str, collector: RowCollector) -> None:
        """Give a collector what comes for its request, for as long as it is in use."""
        self._collectors[request_id] = collector

    def close(self, request_id: str) -> None:
        """Let go of what comes for a request."""
        self._collectors.pop(request_id, None)

    def add(self, chunks: list[CapturedChunk]) -> None:
        """Take the rows of a message; some of their owners may have no collector."""
        before, self._runs, landed = self._runs, {}, self._landed
        places = self._link.places
        for chunk in chunks:
            key = tuple(chunk.owners)
            run = before.get(key)
            if run is None or len(run.chunks) == RUN_STEPS:
                collectors = {name: c for name, _ in key if (c := self._collectors.get(name))}
                if not collectors:
                    continue
                run = Run(chunk.owners)
                for name, collector in collectors.items():
                    collector.add(run, name)
            run.chunks.append(chunk)
            self._runs[key] = run
            num_bytes = sum(values.nbytes for values in chunk.values)
            if all(any(p.address_of(v) for p in places) for v in chunk.values if v.numel()):
                self._landed += num_bytes
            else:
                self._ordinary += num_bytes
                run.last_ordinary = len(run.chunks) - 1
        self._largest = max(self._largest, self._landed - landed)
        if places:
            self._size = places[0].size
            self.memory.most = self._size // self._frontends

    @property
    def _crowded(self) -> bool:
        """True if results hold too much of a landing, or of what is kept, for further ones to stay
        there."""
        return any(map(self._is_crowded, self._link.places))

    def _is_crowded(self, places: Places) -> bool:
        share = places.size // self._frontends
        return places.held > share - min(max(share // 4, ROOM_STEPS * self._largest), share // 2)

    def finish(self, collector: RowCollector) -> None:
        """Have the rows of an ended request copied where they cannot stay."""
        if self._crowded or not collector.lies_in_landing:
            collector.move()

    def step(self) -> None:
        """Have rows of running requests copied where too many gather, after a message."""
        # What nobody's request will continue keeps no place.
        self._runs = {
            key: run
            for key, run in self._runs.items()
            if any(name in self._collectors for name, _ in key)
        }
        if not self._collectors:
            self._ordinary = self._landed = 0
        full = LANDING_SHARE * self._landed > self._size
        if self._ordinary > ORDINARY_BYTES or (full and self._crowded):
            self._runs = {}
            self._ordinary = self._landed = 0
            for collector in list(self._collectors.values()):
                collector.move()
