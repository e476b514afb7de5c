# SPDX-License-Identifier: Apache-2.0
"""Streams in which the rows of a request leave the device: one for each source, making and
process."""

from collections.abc import Sequence

import msgspec

from vllm.config.points import INNER_POINTS, POINTS
from vllm.config.points import Rows as RowKind
from vllm.v1.capture.registry import is_inline
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.makings import AnySource, Difference, Heads, Rows, Source
from vllm.v1.interventions.plan import Selection, Site, Stream
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order

_Part = tuple[type[Source], int, int]
"""Source of sites, width of what is made of it, and width of a head where that counts; else 0."""

_WHOLE = (0,)
"""The heads of rows that have none, and a width of their own."""


class Streams:
    """The streams of one request, and the consumers that get each.

    Args:
        shape: what the model offers.
    """

    def __init__(self, shape: TapShape) -> None:
        self._shape = shape
        self._members: dict[Stream, list[Selection]] = {}
        """Stream without positions, and without sites unless all members have the same -> what is
        selected of it."""

    def add(self, name: str, selection: Selection, relayed: bool, path: str) -> Selection:
        """Add what a consumer gets.

        Args:
            path: of its request.

        Returns:
            The selection with its streams.

        Raises:
            ValueError: rows of several widths for a consumer other than `inline`.
        """
        making, parts = selection.making, self._parts(selection)
        if len(parts) > 1 and not making.mixes:
            reject(
                f"{path}.{making.field}",
                "takes points of one kind: branches (attn_out, mlp_out), final where the stream "
                "has lanes, or others; give a list of captures",
            )
        if len(parts) > 1 and not is_inline(name):
            reject(
                f"{path}.{making.field}",
                "rows have different widths or dtypes, and only 'inline' takes these together; "
                "choose sites with as many heads of one width each, or branches (attn_out, "
                "mlp_out) alone, which are float32",
            )
        streams = []
        for (kind, width, _), sites in parts.items():
            source: AnySource = Difference() if kind is Difference else Rows()
            if kind is Heads:
                source = Heads(tuple(selection.heads.get(site, _WHOLE) for site in sites))
            stream = Stream(
                sites=tuple(sites) if kind is Heads or making.by_site else (),
                width=width,
                dtype=making.dtype or source.dtype or self._shape.dtype,
                source=source,
                making=making,
                relayed=relayed,
            )
            part = selection if len(parts) == 1 else msgspec.structs.replace(selection, sites=sites)
            self._members.setdefault(stream, []).append(part)
            streams.append(list(self._members).index(stream))
        if tuple(streams) == selection.streams:
            return selection
        return msgspec.structs.replace(selection, streams=tuple(streams))

    def _parts(self, selection: Selection) -> dict[_Part, list[Site]]:
        """The sites of a selection that share a stream."""
        making, parts = selection.making, dict[_Part, list[Site]]()
        whole = making.width(1, self._shape.hidden_size)
        points = {point for point, _ in selection.sites}
        of_point: dict[str, _Part] = {
            point: (Difference if POINTS[point].rows is RowKind.BRANCH else Rows, whole, 0)
            for point in points
        }
        several = selection.heads or not points.isdisjoint(INNER_POINTS)
        if not several and len(kinds := {*of_point.values()}) == 1:
            return {kinds.pop(): selection.sites}
        for site in selection.sites:
            kind = of_point[site[0]]
            inner = _WHOLE if site[0] in INNER_POINTS else ()
            if chosen := selection.heads.get(site, inner):
                width = self._shape.parts(site)[1]
                kind = Heads, making.width(len(chosen), width), width * making.by_head
            parts.setdefault(kind, []).append(site)
        return parts

    def placed(self) -> list[Stream]:
        """The streams, in the order of the selections' indices."""
        made = []
        for stream, members in self._members.items():
            sites, runs = union(members)
            made.append(msgspec.structs.replace(stream, sites=tuple(sites), runs=tuple(runs)))
        return made


def union(parts: Sequence[Selection | Stream]) -> tuple[list[Site], list[int]]:
    """All sites in layer order, and all positions as runs."""
    if len(parts) == 1:
        return list(parts[0].sites), list(parts[0].runs)
    rows = Positions()
    for part in parts:
        rows = rows | Positions.from_flat(part.runs)
    return sorted({s for part in parts for s in part.sites}, key=site_order), rows.flat()
