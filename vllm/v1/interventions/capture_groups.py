# SPDX-License-Identifier: Apache-2.0
"""Captures of a request in one worker: the sites it owns, and the streams their rows leave in."""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, groupby
from math import ceil
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from vllm.v1.interventions.makings import AnyMaking, AsIs, Making
from vllm.v1.interventions.messages import WorkerRequest, WorkerStream
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_Asked = tuple[tuple[Site, ...], tuple[WorkerStream, ...]]


def num_senders(config: "VllmConfig") -> int:
    """Number of tensor-parallel ranks of a stage that send rows in a step of many, each its share.

    It is the first alone where all ranks make a part of what is captured, where a KV connector
    aggregates outputs in its way, and where the engine core has not started all workers here.
    """
    parallel, whole = config.parallel_config, config.capture_config.shared
    here = parallel.distributed_executor_backend == "mp" and parallel.nnodes == 1
    alone = whole or not here or config.kv_transfer_config is not None
    return 1 if alone else parallel.tensor_parallel_size


class LocalStream(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """The part of a stream that this worker has; equal to itself alone."""

    places: tuple[int, ...]
    """Indices into the group's sites; sites of other workers are left out."""
    columns: np.ndarray | None = None
    """int64 [sites * width]: where the numbers of heads lie among a token's in its block's rest;
    None at points of the residual stream."""
    width: int = 0
    """Numbers that leave of a site, if that is not its row as it is."""
    making: AnyMaking = AsIs()
    """Values that are made of the rows and leave in their place."""
    heads: Sequence[tuple[int, tuple[int, ...]]] = ()
    """Pair (layer, heads) of each site in `places`; heads is () where rows are not of heads."""
    minus: tuple[int, ...] = ()
    """Indices of the sites whose rows are taken away from those in `places`, one for each; () for
    none."""
    runs: Sequence[tuple[int, int]] = ()
    """`places` as runs of neighbours in the arena that are made together: (first index, number).
    Each place is one where something is taken away."""

    @property
    def lanes(self) -> int:
        """Rows of hidden_size of a token at a site, where something is made of them."""
        return max((len(chosen) for _, chosen in self.heads), default=0) or 1

    @property
    def is_raw(self) -> bool:
        """True if rows leave as they are."""
        return not self.width


class CaptureGroup:
    """Sites and streams that a set of requests captures alike: the requests' rows lie in one dense
    block of the arena. The group goes to the engine core with the rows of each step, so it has
    nothing on a device.

    Args:
        sites: the worker's index of each site.
        num_raw: number of the first sites, whose rows leave the device as they are. Of the other
            sites only what is made of their rows leaves: first come those of the residual stream,
            then those of heads.
        streams: without their runs.
        sizes: how many arena rows a token takes at each of the other sites.
    """

    def __init__(
        self,
        sites: Sequence[int],
        num_raw: int,
        streams: Iterable[LocalStream],
        sizes: Sequence[int] = (),
    ) -> None:
        self.num_raw = num_raw
        self.sites = np.array(sites, dtype=np.int64)
        """The raw ones first."""
        self.site_set = frozenset(sites)
        self.rest_rows = sum(sizes)
        """Arena rows of a token at the sites that are not raw, together."""
        self.rest_at = np.cumsum([0, *sizes])[:-1]
        """The first of them of each of these sites, int64."""
        self.streams = [msgspec.structs.replace(s, runs=self._runs(s)) for s in streams]
        self.kinds: frozenset[type[Making]] = frozenset(type(s.making) for s in self.streams)
        """Kinds of values that are made."""
        self.shared = any(kind.shared for kind in self.kinds)
        """True if every tensor-parallel rank makes a part of it."""

    def _runs(self, stream: LocalStream) -> list[tuple[int, int]]:
        places, making = stream.places, stream.making
        if stream.minus:
            return [(place, 1) for place in places]
        groups = groupby(
            enumerate(places), lambda p: (p[1] - p[0], p[1] < self.num_raw, making.apart(p[0]))
        )
        runs = [[place for _, place in group] for _, group in groups]
        return [(run[0], len(run)) for run in runs]


class CaptureGroups:
    """The groups in use. Requests that capture the same get the same `CaptureGroup`, so that a step
    compares no lists of sites.

    Args:
        sites: the sites of this worker, with the index of each.
        shape: of the model.
        sender: which one of `senders` this is that share these sites: of what a request captures
            here, each has about as many neighbouring layers.
        layers: those that count; None for all.
    """

    def __init__(
        self,
        sites: dict[Site, int],
        shape: TapShape,
        sender: int = 0,
        senders: int = 1,
        layers: Collection[int] | None = None,
    ) -> None:
        self._sites = sites
        self._shape = shape
        self._sender, self._senders = sender, senders
        self._layers = layers
        self._groups: WeakValueDictionary[_Asked, CaptureGroup] = WeakValueDictionary()

    def of(self, request: WorkerRequest) -> CaptureGroup | None:
        """The group of a request; None where it captures nothing on this worker."""
        asked = request.capture_sites
        streams = tuple(
            s
            if (grouped := s.making.grouped()) is s.making
            else msgspec.structs.replace(s, making=grouped)
            for s in request.capture_streams
        )
        group = self._groups.get((asked, streams))
        if group is not None:
            return group
        own = [i for i, site in enumerate(asked) if site in self._sites]
        layers = sorted({asked[i][1] for i in own})
        of_each = len(layers) / self._senders
        share = layers[ceil(of_each * self._sender) : ceil(of_each * (self._sender + 1))]
        if self._layers is not None:
            share = [layer for layer in share if layer in self._layers]
        own = [i for i in own if asked[i][1] in share]
        if not own:
            return None
        of_heads = {i for s in streams if s.heads for i in s.sites}
        made = [s for s in streams if s.width]
        raw = {i for s in streams if s not in made for i in s.sites}
        own.sort(key=lambda i: (i not in raw, i in of_heads))
        sizes = {i: self._shape.arena_rows(asked[i]) for i in own if i not in raw}
        firsts = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
        place = {i: n for n, i in enumerate(own)}
        local = []
        for stream in streams:
            here = [n for n, i in enumerate(stream.sites) if i in place]
            places = tuple(place[stream.sites[n]] for n in here)
            columns, making = None, stream.making.at_sites(here)
            of_site = zip(stream.sites, stream.heads or [()] * len(stream.sites), strict=True)
            own_heads = [(i, chosen) for i, chosen in of_site if i in place]
            heads = [(asked[i][1], chosen) for i, chosen in own_heads]
            if stream.heads:
                parts = [self._columns(asked[i], firsts[i], chosen) for i, chosen in own_heads]
                columns = np.concatenate([np.empty(0, np.int64), *parts])
            minus = tuple(place[i] for i in stream.minus if i in place)
            of_rows = making, heads, minus
            local.append(LocalStream(places, columns, stream.width, *of_rows))
        group = self._groups[asked, streams] = CaptureGroup(
            [self._sites[asked[i]] for i in own], len(own) - len(sizes), local, list(sizes.values())
        )
        return group

    def _columns(self, site: Site, first_row: int, heads: tuple[int, ...]) -> np.ndarray:
        """Return the columns of heads of a site whose numbers begin in row `first_row`: int64
        [heads * width]."""
        _, width = self._shape.parts(site)
        starts = first_row * self._shape.hidden_size + np.array(heads, np.int64) * width
        return (starts[:, None] + np.arange(width)).ravel()
