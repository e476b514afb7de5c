# SPDX-License-Identifier: Apache-2.0
"""The start-up check's forwards are collective: all ranks must run as many, whatever they see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.plans import SHAPE
from vllm.v1.interventions.worker.tap_check import NUM_TOKENS, _lent_blocks, _lent_by, check_sites

pytestmark = pytest.mark.quick

HIDDEN = SHAPE.hidden_size
SITE = ("pre_attn", 0)


class Rank:
    """A worker with one site, whose taps act or do not."""

    shape = SHAPE
    tokens = SimpleNamespace(slots=torch.zeros(1))

    def __init__(self, *, captures: bool, steers: bool = True, acts: bool = True) -> None:
        self.sites = [SITE]
        self.captures = lambda site: captures
        self.table = SimpleNamespace(at={SITE: torch.zeros(1, HIDDEN)}) if steers else None
        self.capture = SimpleNamespace(arena=torch.full((1, HIDDEN), float("nan")))
        self.acts = acts
        self.forwards = 0

    @contextmanager
    def probing(self, site: Any, vector: torch.Tensor | None) -> Iterator[None]:
        if self.acts:
            self.capture.arena[0] = torch.ones(HIDDEN) + (0 if vector is None else vector)
        yield

    def capture_final(self, hidden_states: torch.Tensor) -> None:
        """Its site is another."""

    def run(self, *, hidden: bool) -> None:
        def dummy_run(num_tokens: int) -> list[Any]:
            self.forwards += 1
            return [self.capture.arena.expand(num_tokens, -1) if hidden else None]

        check_sites(self, dummy_run)  # type: ignore[arg-type]


@pytest.mark.parametrize("steers", [True, False])
def test_all_ranks_run_as_many_forwards(steers: bool) -> None:
    first = Rank(captures=True, steers=steers)
    second = Rank(captures=False, steers=steers)
    of_first_stage = Rank(captures=False, steers=steers)
    first.run(hidden=True)
    second.run(hidden=True)
    of_first_stage.run(hidden=False)
    assert first.forwards == second.forwards == of_first_stage.forwards == 1 + steers


def test_also_where_a_tap_is_silent() -> None:
    silent = Rank(captures=True, acts=False)
    with pytest.raises(RuntimeError, match="do not act"):
        silent.run(hidden=True)
    assert silent.forwards == 2


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
