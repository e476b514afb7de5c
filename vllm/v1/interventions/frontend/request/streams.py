# SPDX-License-Identifier: Apache-2.0
"""Streams in which the rows of a request leave the device: one for each form and process."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from vllm.config.points import POINTS, Rows
from vllm.v1.capture.registry import is_inline
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.makings import AnyMaking, AsIs, Attention, Lens, Scores
from vllm.v1.interventions.plan import Selection, Site, Stream
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order


class _Form(NamedTuple):
    """Properties that the rows of a stream have in common."""

    relayed: bool
    apart: tuple[Site, ...] = ()
    """The sites, where each has a matrix of its own."""
    width: int = 0
    """The width of a site's heads together; 0 in the residual stream."""
    consumer: str = ""
    """Name of the consumer whose heads the rows are; "" in the residual stream."""
    making: AnyMaking = AsIs()
    differs: bool = False


class Streams:
    """The streams of one request, and the consumers that get each.

    Args:
        shape: what the model offers.
    """

    def __init__(self, shape: TapShape) -> None:
        self._shape = shape
        self._members: dict[_Form, list[Selection]] = {}

    def add(
        self,
        name: str,
        selection: Selection,
        relayed: bool,
        path: str,
    ) -> Selection:
        """Add what a consumer gets.

        Args:
            path: of its request.

        Returns:
            The selection with its streams.

        Raises:
            ValueError: rows of several widths for a consumer other than `inline`.
        """
        making = selection.making
        parts: dict[_Form, list[Site]] = {}
        differing = [s for s in selection.sites if POINTS[s[0]].rows is Rows.BRANCH]
        widths = {0}
        if selection.heads:
            widths = {self._width(selection, site) for site in selection.sites}
        if len(widths) == 1 and len(differing) in (0, len(selection.sites)):
            by_site = isinstance(making, Scores) and len(making.digests) > 1
            apart = tuple(selection.sites) if by_site else ()
            [width], kind = widths, bool(differing)
            consumer = name if width else ""
            of_rows = width, consumer, making, kind
            parts[_Form(relayed, apart, *of_rows)] = selection.sites
        elif not making.mixes:
            reject(
                f"{path}.{making.field}",
                "takes points of one kind: branches (attn_out, mlp_out), final where the stream "
                "has lanes, or others; give a list of captures",
            )
        for site in () if parts else selection.sites:
            width, differs = self._width(selection, site), site in differing
            consumer = name if width else ""
            form = _Form(relayed, (), width, consumer, making, differs)
            parts.setdefault(form, []).append(site)
        if len(parts) > 1 and not is_inline(name):
            reject(
                f"{path}.{making.field}",
                "rows have different widths or dtypes, and only 'inline' takes these together; "
                "choose sites with as many heads of one width each, or branches (attn_out, "
                "mlp_out) alone, which are float32",
            )
        for form, sites in parts.items():
            part = selection if len(parts) == 1 else msgspec.structs.replace(selection, sites=sites)
            self._members.setdefault(form, []).append(part)
        order = list(self._members)
        streams = tuple(order.index(form) for form in parts)
        if streams == selection.streams:
            return selection
        return msgspec.structs.replace(selection, streams=streams)

    def _width(self, selection: Selection, site: Site) -> int:
        """The width of the heads chosen at a site together; 0 for the residual stream."""
        heads = selection.heads.get(site)
        if heads and isinstance(selection.making, Attention):
            return selection.making.width(len(heads), 0)
        return len(heads) * self._shape.parts(site)[1] if heads else 0

    def placed(self) -> list[Stream]:
        """The streams, in the order of the selections' indices."""
        shape, made = self._shape, []
        for form, members in self._members.items():
            sites, runs = union(members)
            width, dtype = form.width or shape.hidden_size, shape.dtype
            if isinstance(form.making, Scores):
                width = form.making.width(width // shape.hidden_size, shape.hidden_size)
            if isinstance(form.making, Lens):
                width = form.making.width(1, width)
            heads = [members[0].heads[site] for site in sites] if form.width else []
            dtype = form.making.dtype or ("float32" if form.differs else dtype)
            of_rows = heads, form.making, form.differs
            made.append(Stream(sites, runs, form.relayed, width, dtype, *of_rows))
        return made


def union(parts: Sequence[Selection | Stream]) -> tuple[list[Site], list[int]]:
    """All sites in layer order, and all positions as runs."""
    if len(parts) == 1:
        return parts[0].sites, parts[0].runs
    rows = Positions()
    for part in parts:
        rows = rows | Positions.from_flat(part.runs)
    return sorted({s for part in parts for s in part.sites}, key=site_order), rows.flat()
