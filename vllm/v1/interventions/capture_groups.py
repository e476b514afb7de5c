# SPDX-License-Identifier: Apache-2.0
"""What a worker captures of a request: the sites it owns, and the streams their rows leave in."""

from itertools import groupby
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from vllm.v1.interventions.messages import WorkerRequest, WorkerStream
from vllm.v1.interventions.plan import Site

_Asked = tuple[tuple[Site, ...], tuple[WorkerStream, ...]]
_Projection = tuple[tuple[int, ...], int]
_Stream = tuple[tuple[int, ...], _Projection | None, tuple[int, ...]]
_Key = tuple[tuple[int, ...], int, tuple[_Stream, ...]]


class LocalStream(NamedTuple):
    """The part of a stream that this worker's pipeline stage has."""

    places: tuple[int, ...]
    """Indices into the group's sites; sites of other pipeline stages are left out."""
    runs: list[tuple[int, int]]
    """`places` as runs of neighbours in the arena with one matrix: (first index, number)."""
    projection: _Projection | None
    """As in `WorkerStream`, of the sites in `places`."""
    summed: tuple[int, ...] = ()
    """As in `WorkerStream`."""

    @property
    def raw(self) -> bool:
        """Whether rows leave as they are."""
        return self.projection is None and not self.summed


class CaptureGroup:
    """What a set of requests captures alike: their rows lie in one dense block of the arena."""

    def __init__(self, key: _Key) -> None:
        sites, self.num_raw, streams = key
        self.sites = np.array(sites, dtype=np.int64)
        """int64: the worker's index of each site. Rows of the first `num_raw` leave the device as
        they are, of the others only scores or sums do."""
        self.streams = [
            LocalStream(at, self._runs(at, used), used, summed) for at, used, summed in streams
        ]

    def _runs(
        self, places: tuple[int, ...], projection: _Projection | None
    ) -> list[tuple[int, int]]:
        firsts = projection[0] if projection is not None else (0,) * len(places)
        groups = groupby(
            enumerate(places), lambda p: (p[1] - p[0], p[1] < self.num_raw, firsts[p[0]])
        )
        runs = [[place for _, place in group] for _, group in groups]
        return [(run[0], len(run)) for run in runs]


class CaptureGroups:
    """The groups in use. Requests that capture the same get the same `CaptureGroup`, so that a step
    compares no lists of sites.

    Args:
        sites: the sites of this worker, with the index of each.
    """

    def __init__(self, sites: dict[Site, int]) -> None:
        self._sites = sites
        self._groups: WeakValueDictionary[_Asked, CaptureGroup] = WeakValueDictionary()

    def of(self, request: WorkerRequest) -> CaptureGroup | None:
        """The group of a request; None where it captures nothing on this worker."""
        streams = request.capture_streams
        group = self._groups.get((request.capture_sites, streams))
        if group is not None:
            return group
        own = [i for i, site in enumerate(request.capture_sites) if site in self._sites]
        if not own:
            return None
        raw = {i for s in streams if s.projection is None and not s.summed for i in s.sites}
        own.sort(key=lambda i: i not in raw)
        place = {i: n for n, i in enumerate(own)}
        group = self._groups[request.capture_sites, streams] = CaptureGroup(
            (
                tuple(self._sites[request.capture_sites[i]] for i in own),
                len(raw & place.keys()),
                tuple(
                    (tuple(place[i] for i in s.sites if i in place), _local(s, place), s.summed)
                    for s in streams
                ),
            )
        )
        return group


def _local(stream: WorkerStream, place: dict[int, int]) -> _Projection | None:
    """The projection of those of a stream's sites that have a place on this worker."""
    if stream.projection is None:
        return None
    firsts, size = stream.projection
    return tuple(n for i, n in zip(stream.sites, firsts, strict=True) if i in place), size
