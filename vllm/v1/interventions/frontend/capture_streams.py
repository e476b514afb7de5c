# SPDX-License-Identifier: Apache-2.0
"""Which streams the rows of a request leave the device in: one for each form and process."""

from collections.abc import Mapping, Sequence

import msgspec

from vllm.v1.capture.registry import INLINE
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.plan import Selection, Site, Stream, TapShape
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.sites import site_order


class Streams:
    """The streams of one request, and the consumers that get each.

    Args:
        shape: what the model offers.
    """

    def __init__(self, shape: TapShape) -> None:
        self._shape = shape
        self._members: dict[tuple[bool, str, int, str], list[Selection]] = {}
        """Who gets rows, by (relayed, digest of a projection, width of heads, their consumer)."""

    def add(
        self, name: str, selection: Selection, relayed: bool, digest: str, path: str
    ) -> Selection:
        """Add what a consumer gets.

        Args:
            digest: of its projection, "" for none.
            path: of its request.

        Returns:
            The selection with its streams.

        Raises:
            ValueError: rows of several widths for a consumer other than `inline`, or heads under a
                projection.
        """
        if not selection.heads:
            return self._join(selection, [((relayed, digest, 0, ""), selection.sites)])
        if digest:
            reject(f"{path}.project", "is for the residual stream; leave out q, k, v and z")
        sites: dict[tuple[bool, str, int, str], list[Site]] = {}
        for site in selection.sites:
            width = self._width(selection, site)
            key = (relayed, "", width, name) if width else (relayed, "", 0, "")
            sites.setdefault(key, []).append(site)
        if len(sites) > 1 and name != INLINE:
            reject(
                f"{path}.hooks",
                "rows have different widths, and only 'inline' takes these together; choose sites "
                "with as many heads of one width each",
            )
        return self._join(selection, list(sites.items()))

    def _width(self, selection: Selection, site: Site) -> int:
        """The width of the heads chosen at a site together; 0 for the residual stream."""
        point, layer = site
        heads = selection.heads.get(site)
        return len(heads) * self._shape.heads[layer][point][1] if heads else 0

    def _join(
        self, selection: Selection, parts: list[tuple[tuple[bool, str, int, str], list[Site]]]
    ) -> Selection:
        for key, sites in parts:
            part = selection if len(parts) == 1 else msgspec.structs.replace(selection, sites=sites)
            self._members.setdefault(key, []).append(part)
        order = list(self._members)
        streams = tuple(order.index(key) for key, _ in parts)
        if streams == selection.streams:
            return selection
        return msgspec.structs.replace(selection, streams=streams)

    def placed(self, projections: Mapping[str, bytes]) -> list[Stream]:
        """The streams, in the order of the selections' indices.

        Args:
            projections: as in `CapturePlan`.
        """
        shape, made = self._shape, []
        for (relayed, digest, width, _), members in self._members.items():
            sites, runs = union(members)
            stream = Stream(sites, runs, relayed, width=shape.hidden_size, dtype=shape.dtype)
            if width:
                heads = [members[0].heads[site] for site in sites]
                stream = msgspec.structs.replace(stream, width=width, heads=heads)
            elif digest:
                stream = msgspec.structs.replace(
                    stream,
                    width=len(projections[digest]) // (4 * shape.hidden_size),
                    dtype="float32",
                    projection=digest,
                )
            made.append(stream)
        return made


def union(parts: Sequence[Selection | Stream]) -> tuple[list[Site], list[int]]:
    """All sites in layer order, and all positions as runs."""
    if len(parts) == 1:
        return parts[0].sites, parts[0].runs
    rows = Positions()
    for part in parts:
        rows = rows | Positions.from_flat(part.runs)
    return sorted({s for part in parts for s in part.sites}, key=site_order), rows.flat()
