# SPDX-License-Identifier: Apache-2.0
"""How much memory directions of very many pairs take, above what is there before.

Each measurement is of a process of its own, as the most that a process ever had is what it says.
The model is made up; the engine's own memory is not in this.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests import ROOT
from vllm.pilot import Pairs, read_rows
from vllm.pilot.bench import Fields, Reply
from vllm.pilot.fitting import find_directions
from vllm.pilot.pairs import Text

pytestmark = pytest.mark.full

SHAPES = {"many": (100_000, 1, 1024), "wide": (1_000, 32, 4096)}
"""Pairs, layers and width: rows of 781 MiB; those of an 8B model, of 1,000."""
MEAN = 190 << 20
"""Just below 200 MB."""
MEMORY = 160 << 20
"""Of `--memory`."""


class MadeUp:
    """Each number of a row is the number that the text is, but one, which says of which class."""

    name = "made up"

    def __init__(self, layers: int, hidden: int) -> None:
        self.hidden = hidden
        self.layers: dict[int, tuple[str, ...]] = dict.fromkeys(range(layers), ("post_block",))

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        return [int(str(text)), 0]

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        numbers = torch.tensor([ids[0] for ids in prompts]).float()
        rows = (numbers % 7)[:, None, None].expand(-1, len(self.layers), self.hidden).clone()
        rows[..., 1] += numbers[:, None] % 2
        return [
            Reply(
                tuple(ids), (0,), "", False, [], {("post_block", i): of[:, i] for i in self.layers}
            )
            for ids, of in zip(prompts, rows.split(1), strict=True)
        ]


def work(what: str, pairs: int, layers: int, hidden: int) -> None:
    bench = MadeUp(layers, hidden)
    even, odd = ([str(2 * i + side) for i in range(pairs)] for side in (0, 1))
    data, every = Pairs.of(even, odd), [*range(layers)]
    if what == "keep":
        read_rows(bench, data)
    else:
        method: Any = what
        find_directions(bench, data, every, method, "last", "post_block", memory=MEMORY)


def most() -> int:
    """The most bytes that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def child(what: str, shape: str) -> None:
    """Print by how many bytes the work made this process larger."""
    work(what, 20, 1, 8)  # libraries are loaded
    before = most()
    work(what, *SHAPES[shape])
    print(most() - before)


def growth(what: str, shape: str) -> int:
    code = f"from {__name__} import child; child({what!r}, {shape!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_the_mean_of_wide_rows_keeps_none() -> None:
    assert growth("mean", "wide") < MEAN < 4 * MEAN < growth("keep", "wide")


@pytest.mark.long
@pytest.mark.parametrize(("method", "bound"), [("mean", MEAN), ("pca", MEMORY)])
def test_many_pairs_stay_within_the_bound(method: str, bound: int) -> None:
    pairs, layers, hidden = SHAPES["many"]
    assert growth(method, "many") < bound < 4 * bound < 2 * pairs * layers * hidden * 4
