# SPDX-License-Identifier: Apache-2.0
"""Captures of a request in one worker: the sites it owns, and the streams their rows leave in."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from math import ceil
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from vllm.config.points import POINTS
from vllm.v1.interventions.makings import AnyMaking, AsIs, Difference, Heads, Making
from vllm.v1.interventions.messages import WorkerRequest
from vllm.v1.interventions.plan import Site, Stream
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def taps_of(stream: Stream) -> list[Site]:
    """Site that is copied for each of a stream; of a branch the one from which another is taken
    away."""
    return [(POINTS[point].copied[0], layer) for point, layer in stream.sites]


def minus_of(stream: Stream) -> list[Site]:
    """Site of the rows that are taken away from those of each of `taps_of`; [] for none."""
    if not isinstance(stream.source, Difference):
        return []
    return [(POINTS[point].copied[1], layer) for point, layer in stream.sites]


def all_make(config: "VllmConfig") -> bool:
    """Tell whether every tensor-parallel rank makes a part of something that is captured."""
    steering = config.steering_config
    has_features = bool(steering.features or steering.features_root)
    return config.capture_config.shared or has_features


def num_senders(config: "VllmConfig") -> int:
    """Number of tensor-parallel ranks of a stage that send rows in a step of many, each its share.

    It is the first alone where all ranks make a part of what is captured, where a KV connector
    aggregates outputs in its way, and where the engine core has not started all workers here.
    """
    parallel, whole = config.parallel_config, all_make(config)
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
    is_raw: bool = True
    """True if rows leave as they were copied."""
    width: int = 0
    """Number of numbers that leave of a site, where these are not rows as they were copied."""
    dtype: str = ""
    """Their dtype, there too."""
    making: AnyMaking = AsIs()
    """Values that are made of the rows and leave in their place."""
    heads: Sequence[tuple[int, tuple[int, ...]]] = ()
    """Pair (layer, heads) of each site in `places`; heads is () where rows are not of heads."""
    minus: tuple[int, ...] = ()
    """Indices of the sites whose rows are taken away from those in `places`, one for each; () for
    none."""
    lanes: int = 1
    """Rows of hidden_size of a token at a site, where something is made of them."""
    runs: Sequence[tuple[int, int]] = ()
    """`places` as runs of neighbours in the arena that are made together: (first index, number).
    Each place is one where something is taken away."""


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
        self.late = any(kind.late for kind in self.kinds)
        """True if some of it is made when the forward has ended."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what only the worker asks for: each step's rows are sent with their groups."""
        own = {"sites", "site_set", "rest_at", "kinds", "shared", "late"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

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
        self._groups: WeakValueDictionary[tuple[Stream, ...], CaptureGroup] = WeakValueDictionary()

    def of(self, request: WorkerRequest) -> CaptureGroup | None:
        """The group of a request; None where it captures nothing on this worker."""
        streams = tuple(
            s
            if (grouped := s.making.grouped()) is s.making
            else msgspec.structs.replace(s, making=grouped)
            for s in request.streams
        )
        group = self._groups.get(streams)
        if group is not None:
            return group
        copied = {tap for s in streams for tap in (*taps_of(s), *minus_of(s))}
        taps = sorted(copied, key=site_order)
        own = [site for site in taps if site in self._sites]
        layers = sorted({layer for _, layer in own})
        of_each = len(layers) / self._senders
        share = layers[ceil(of_each * self._sender) : ceil(of_each * (self._sender + 1))]
        if self._layers is not None:
            share = [layer for layer in share if layer in self._layers]
        own = [site for site in own if site[1] in share]
        if not own:
            return None
        of_heads = {tap for s in streams if isinstance(s.source, Heads) for tap in taps_of(s)}
        raw = {tap for s in streams if s.is_raw for tap in taps_of(s)}
        own.sort(key=lambda site: (site not in raw, site in of_heads))
        sizes = {site: self._shape.arena_rows(site) for site in own if site not in raw}
        firsts = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
        place = {site: n for n, site in enumerate(own)}
        local = [self._local(stream, place, firsts) for stream in streams]
        group = self._groups[streams] = CaptureGroup(
            [self._sites[site] for site in own], len(own) - len(sizes), local, [*sizes.values()]
        )
        return group

    def _local(
        self, stream: Stream, place: Mapping[Site, int], firsts: Mapping[Site, int]
    ) -> LocalStream:
        """The part of a stream at sites that have a place here.

        Args:
            firsts: the first row of a token's of each site that is not raw.
        """
        taps = taps_of(stream)
        here = [n for n, tap in enumerate(taps) if tap in place]
        heads, columns = [(taps[n][1], tuple[int, ...]()) for n in here], None
        if isinstance(stream.source, Heads):
            chosen = stream.source.chosen
            heads = [(taps[n][1], chosen[n]) for n in here]
            parts = [self._columns(taps[n], firsts[taps[n]], chosen[n]) for n in here]
            columns = np.concatenate([np.empty(0, np.int64), *parts])
        return LocalStream(
            places=tuple(place[taps[n]] for n in here),
            columns=columns,
            is_raw=stream.is_raw,
            width=stream.width,
            dtype=stream.dtype,
            making=stream.making.at_sites(here),
            heads=heads,
            minus=tuple(place[tap] for tap in minus_of(stream) if tap in place),
            lanes=max((len(chosen) for _, chosen in heads), default=0) or 1,
        )

    def _columns(self, site: Site, first_row: int, heads: tuple[int, ...]) -> np.ndarray:
        """Return the columns of heads of a site whose numbers begin in row `first_row`: int64
        [heads * width]."""
        _, width = self._shape.parts(site)
        starts = first_row * self._shape.hidden_size + np.array(heads, np.int64) * width
        return (starts[:, None] + np.arange(width)).ravel()
