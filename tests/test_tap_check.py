# SPDX-License-Identifier: Apache-2.0
"""The start-up check's forwards are collective: all ranks must run as many, whatever they see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plans import SHAPE
from vllm.v1.worker.tap_check import check_sites

HIDDEN = SHAPE.hidden_size
SITE = ("pre_attn", 0)


class Rank:
    """A worker with one site, whose taps act or do not."""

    shape = SHAPE
    tokens = SimpleNamespace(slots=torch.zeros(1))

    def __init__(self, *, captures: bool, steers: bool = True, acts: bool = True) -> None:
        self.sites = [SITE]
        self.captures = lambda site: captures
        self.table = SimpleNamespace(at={SITE: None}) if steers else None
        self.arena = torch.full((1, HIDDEN), float("nan"))
        self.acts = acts
        self.forwards = 0

    @contextmanager
    def probing(self, site: Any, vector: torch.Tensor | None) -> Iterator[None]:
        if self.acts:
            self.arena[0] = torch.ones(HIDDEN) + (0 if vector is None else vector)
        yield

    def run(self, *, hidden: bool) -> None:
        def dummy_run(num_tokens: int) -> list[Any]:
            self.forwards += 1
            return [self.arena.expand(num_tokens, -1) if hidden else None]

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
