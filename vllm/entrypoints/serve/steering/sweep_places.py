# SPDX-License-Identifier: Apache-2.0
"""Places of a sweep, each of which a cell changes: positions of the stream, or heads."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.sites import site_order

Rows = Mapping[Site, Any]
"""A capture's payload: `CapturedRows` by point and layer."""


class Cell(NamedTuple):
    """One position and scale."""

    point: str
    layer: int
    position: int
    scale: float | None


class HeadCell(NamedTuple):
    """One head and scale, at all positions of the sweep."""

    point: str
    layer: int
    head: int
    scale: float | None


AnyCell = Cell | HeadCell
C = TypeVar("C", bound=AnyCell)


@dataclass(frozen=True)
class Places(ABC, Generic[C]):
    """Places on three axes: points, layers and `along`."""

    sites: list[Site]
    """The sites, in the order of the stream."""
    positions: list[int]
    """Positions of the prompt, ascending."""
    shift: int
    """Number to add to a position of the prompt to get the same place in the clean prompt."""
    name: ClassVar[str]
    """Name of the third axis."""

    @property
    @abstractmethod
    def along(self) -> Sequence[int]:
        """The third axis, ascending."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of places."""

    @abstractmethod
    def cell(self, i: int, scale: float | None) -> C:
        """Return the cell at a place."""

    @abstractmethod
    def reads(self, cells: Iterable[C]) -> dict[str, Any]:
        """Return the capture, for `inline`, of the prompt's rows at some cells."""

    @abstractmethod
    def of_clean(self) -> dict[str, Any]:
        """Return the capture of the clean prompt's rows at all places."""

    @abstractmethod
    def steered(self, op: Mapping[str, Any], cell: C, rows: Rows | None, shift: int) -> Any:
        """Return the operations of a cell.

        Args:
            op: without its place, and without values where there are rows.
            rows: what is put in.
            shift: what to add to a position of the prompt to find its row.
        """


@dataclass(frozen=True)
class StreamPlaces(Places[Cell]):
    """Each position of each site."""

    name: ClassVar[str] = "positions"

    @property
    def along(self) -> Sequence[int]:
        """The positions."""
        return self.positions

    @property
    def count(self) -> int:
        """Number of sites times that of positions."""
        return len(self.sites) * len(self.positions)

    def cell(self, i: int, scale: float | None) -> Cell:
        """Return the cell, by falling position: those of one share the prefix before it."""
        i, site = divmod(i, len(self.sites))
        return Cell(*self.sites[site], self.positions[-1 - i], scale)

    def reads(self, cells: Iterable[Cell]) -> dict[str, Any]:
        """Read the sites and positions of the cells."""
        at = list(cells)
        sites = sorted({(cell.point, cell.layer) for cell in at}, key=site_order)
        return _read(sites, sorted({cell.position for cell in at}))

    def of_clean(self) -> dict[str, Any]:
        """Read all sites."""
        return _read(self.sites, [position + self.shift for position in self.positions])

    def steered(self, op: Mapping[str, Any], cell: Cell, rows: Rows | None, shift: int) -> Any:
        """Do it at the position; the row that is put in is the operation's values."""
        place = {"point": cell.point, "layers": cell.layer, "positions": [cell.position]}
        if rows is None:
            return [{**op, **place}]
        values = rows[cell.point, cell.layer].at(cell.position + shift)[None]
        return [{**op, "values": values, **place}]


@dataclass(frozen=True)
class HeadPlaces(Places[HeadCell]):
    """Each head of each layer, changed at all positions at once."""

    name: ClassVar[str] = "heads"
    heads: Mapping[int, tuple[int, ...]]
    """Layer -> heads, sorted."""

    @property
    def along(self) -> Sequence[int]:
        """Numbers of heads, up to the greatest."""
        return range(max(max(heads) for heads in self.heads.values()) + 1)

    @property
    def count(self) -> int:
        """Number of heads of all layers."""
        return sum(map(len, self.heads.values()))

    @cached_property
    def _pairs(self) -> list[tuple[Site, int]]:
        return [(site, head) for site in self.sites for head in self.heads[site[1]]]

    def cell(self, i: int, scale: float | None) -> HeadCell:
        """Return the cell, layer by layer."""
        site, head = self._pairs[i]
        return HeadCell(*site, head, scale)

    def reads(self, cells: Iterable[HeadCell]) -> dict[str, Any]:
        """Read these heads at all positions."""
        heads: dict[int, list[int]] = {}
        for cell in cells:
            heads.setdefault(cell.layer, []).append(cell.head)
        return {"hooks": {self.sites[0][0]: heads}, "positions": self.positions}

    def of_clean(self) -> dict[str, Any]:
        """Read all heads."""
        heads = {layer: list(own) for layer, own in self.heads.items()}
        at = [position + self.shift for position in self.positions]
        return {"hooks": {self.sites[0][0]: heads}, "positions": at}

    def steered(self, op: Mapping[str, Any], cell: HeadCell, rows: Rows | None, shift: int) -> Any:
        """Do it at the head; what is put in is added to what was multiplied by 0."""
        place = {"point": cell.point, "heads": {cell.layer: [cell.head]}}
        place["positions"] = self.positions
        if rows is None:
            return [{**op, **place}]
        found = rows[cell.point, cell.layer]
        values = found.values[:, found.heads.index(cell.head)]
        nothing = {"op": "scale", "factor": 0.0, **place}
        return [nothing, {"op": "add", "values": values, **place}]


def _read(sites: Sequence[Site], positions: list[int]) -> dict[str, Any]:
    hooks: dict[str, list[int]] = {}
    for point, layer in sites:
        hooks.setdefault(point, []).append(layer)
    return {"hooks": hooks, "positions": positions}
