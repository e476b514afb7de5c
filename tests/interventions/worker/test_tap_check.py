# SPDX-License-Identifier: Apache-2.0
"""The start-up check's forwards are collective: all ranks must run as many, whatever they see."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.plans import SHAPE
from vllm.config.points import STREAM_POINTS
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.worker.check.taps import NUM_TOKENS, _lent_blocks, _lent_by, check_sites

pytestmark = pytest.mark.quick

HIDDEN = SHAPE.hidden_size
SITES = [(point, layer) for layer in (0, 1) for point in STREAM_POINTS]


class Rank:
    """A worker whose taps act or do not.

    Args:
        captures: whether it does; the others of its ranks do in any case.
        room: rows of the arena.
        places: the site whose place a site's rows go to.
    """

    shape = SHAPE
    tokens = SimpleNamespace(slots=torch.zeros(1))

    def __init__(
        self,
        *,
        captures: bool,
        steers: bool = True,
        acts: bool = True,
        sites: Sequence[Site] = SITES,
        room: int = 100,
        places: Mapping[Site, Site] = MappingProxyType({}),
    ) -> None:
        self.sites = sites
        self.captures = lambda site: captures
        tables = {site: torch.zeros(1, HIDDEN) for site in sites}
        self.table = SimpleNamespace(at=tables) if steers else None
        arena = torch.full((room if captures else 1, HIDDEN), float("nan"))
        self.capture = SimpleNamespace(arena=arena, sites=sites, most_rows=room)
        self.acts, self.places = acts, places
        self.forwards = 0

    @contextmanager
    def capturing(self, rows: Mapping[Site, int], size: int) -> Iterator[None]:
        assert size <= len(self.capture.arena)
        self.capture.arena[:size] = float("nan")
        for site in rows if self.acts else ():
            if (place := self.places.get(site, site)) in rows:
                self.capture.arena[rows[place]] = float(self.sites.index(site))
        yield

    @contextmanager
    def probing(self, site: Site, vector: torch.Tensor) -> Iterator[None]:
        with self.capturing({site: 0} if self.captures(site) else {}, self.captures(site)):
            self.capture.arena[0] += vector
            yield

    def capture_final(self, hidden_states: torch.Tensor) -> None:
        """Its site is another."""

    def run(self, *, hidden: bool = True) -> None:
        def dummy_run(draw: int) -> list[Any]:
            self.forwards += 1
            return [torch.rand(NUM_TOKENS, HIDDEN) if hidden else None]

        check_sites(self, dummy_run)  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [1, 2, 5, 100])
@pytest.mark.parametrize("steers", [True, False])
def test_all_ranks_run_as_many_forwards(steers: bool, room: int) -> None:
    first = Rank(captures=True, steers=steers, room=room)
    second = Rank(captures=False, steers=steers, room=room)
    of_first_stage = Rank(captures=False, steers=steers, room=room)
    first.run()
    second.run()
    of_first_stage.run(hidden=False)
    # Numbers of six sites have three bits; those of parts have fewer.
    unsteered = {1: 6, 2: 3 * 2, 5: 3 + 1, 100: 3}[room]
    assert first.forwards == second.forwards == of_first_stage.forwards == unsteered + 6 * steers


def test_also_where_a_tap_is_silent() -> None:
    silent = Rank(captures=True, acts=False)
    with pytest.raises(RuntimeError, match="do not act"):
        silent.run()
    assert silent.forwards == 3 + 6


def test_rows_in_the_place_of_another_site_are_seen() -> None:
    """As of an artifact that was compiled for another order of sites: rows arrive at all places."""
    a, b = SITES[1], SITES[4]
    with pytest.raises(
        RuntimeError, match=re.escape(f"do not act although they are bound: {[a, b]}")
    ):
        Rank(captures=True, steers=False, places={a: b, b: a}).run()


def test_no_two_groups_of_a_hybrid_get_the_same_blocks() -> None:
    """Their memory is one: attention would read as keys what a mixer left there, which need not be
    numbers. And what was lent is given back."""

    def numbers(tables: Any) -> list[int]:
        return [int(block) for table in tables for block in table[:NUM_TOKENS, 0]]

    own = [SimpleNamespace(cpu=torch.zeros(5, 3), gpu=torch.zeros(5, 3)) for _ in range(3)]
    with _lent_blocks([SimpleNamespace(block_table=buffers) for buffers in own]):  # type: ignore[misc]
        assert numbers(b.cpu for b in own) == numbers(b.gpu for b in own) == [1, 2, 3, 4, 5, 6]
    assert not any(tensor.any() for buffers in own for tensor in (buffers.cpu, buffers.gpu))

    tables = [torch.zeros(5, 3) for _ in range(3)]
    provider: Any = SimpleNamespace(
        get_dummy_block_tables=lambda n: tuple(table[:n].zero_() for table in tables),
        block_sizes=[16] * 3,
    )
    with _lent_by(provider):
        assert numbers(provider.get_dummy_block_tables(2)) == [1, 2, 3, 4, 5, 6]
    assert not any(numbers(provider.get_dummy_block_tables(2)))
