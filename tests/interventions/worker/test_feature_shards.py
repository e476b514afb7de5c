# SPDX-License-Identifier: Apache-2.0
"""Features in shards: several ranks, threads here, make of their parts what one makes of all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch

from tests.mutations.rules import Mistake
from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.interventions.makings import Features
from vllm.v1.interventions.worker.making import features as maker
from vllm.v1.interventions.worker.making import shards as shards_module

pytestmark = pytest.mark.quick

HIDDEN, ROWS = 6, 9
NAMES = ("top_ids", "top_values", "values", "active", "error")


def autoencoder(size: int, k: int) -> Autoencoder:
    """Half of its features are others' twins, so that activations are equal; and of small whole
    numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(size + k)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-20, 21, shape, generator=generator).float()

    twins = torch.arange(size) % -(-size // 2)
    return Autoencoder(
        encoder=whole(HIDDEN, size)[:, twins],
        decoder=whole(size, HIDDEN),
        gain=torch.ones(size),
        decoder_gain=torch.ones(size),
        bias=whole(size)[twins],
        decoder_bias=whole(HIDDEN),
        threshold=torch.full((size,), 1.0),
        k=k,
        scaling="",
        transcodes=False,
        skip=None,
        source="made up",
    )


def read(
    sae: Autoencoder, making: Features, rows: torch.Tensor, shards: Any
) -> dict[str, torch.Tensor]:
    widths = [field.width for field in making.fields]
    made = torch.empty(len(rows), sum(widths))
    ids = torch.tensor(making.ids)
    maker._read(making, shards.part(sae), shards, rows, ids, made.split(widths, dim=1))
    parts = dict(zip(NAMES, made.split(widths, dim=1), strict=True))
    return parts | {name: parts[name].view(torch.int32) for name in ("top_ids", "active")}


class Ranks:
    """Threads that stand for ranks, and what they gather."""

    def __init__(self, ranks: int, module: Any, patch: pytest.MonkeyPatch) -> None:
        self.ranks, self.module = ranks, module
        self.barrier = Barrier(ranks, timeout=20)
        self.given: list[Any] = [None] * ranks
        patch.setattr(module, "tensor_model_parallel_all_gather", None)
        patch.setattr(module, "tensor_model_parallel_all_reduce", None)
        self.patch = patch

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """Return what each rank makes."""
        from threading import get_ident

        places: dict[int, int] = {}

        def together(part: torch.Tensor) -> list[torch.Tensor]:
            self.given[places[get_ident()]] = part
            self.barrier.wait()
            all_of_them = [*self.given]
            self.barrier.wait()
            return all_of_them

        gather = "tensor_model_parallel_all_gather"
        self.patch.setattr(self.module, gather, lambda part: torch.cat(together(part), -1))
        total = "tensor_model_parallel_all_reduce"
        self.patch.setattr(self.module, total, lambda part: torch.stack(together(part)).sum(0))

        def one(rank: int) -> Any:
            places[get_ident()] = rank
            try:
                return work(self.module.Shards(rank, self.ranks))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            return [*pool.map(one, range(self.ranks))]


def differs(ranks: int, size: int, k: int, module: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Fields of which some rank has another value than one rank alone."""
    sae, top = autoencoder(size, k), min(size, 8)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-20, 21, (ROWS, HIDDEN), generator=generator).float()
    making = Features("a", size, top, (0, size // 2, size - 1), 2.0, True)
    want = read(sae, making, rows, shards_module.Shards())
    if not k:
        check_one(sae, rows, top, want)
    own = Ranks(ranks, module, patch)
    made = own.run(partial(read, sae, making, rows))
    return [n for n in NAMES for got in made if not torch.equal(got[n], want[n])]


def check_one(
    sae: Autoencoder, rows: torch.Tensor, top: int, made: dict[str, torch.Tensor]
) -> None:
    """One rank has the most active first, and of equal ones the first."""
    f = sae.encode(rows)
    ids = made["top_ids"]
    assert ties(f, top) > 0 and torch.equal(made["active"][:, 0], (f > 2).sum(1))
    for row, own in zip(f, ids.tolist(), strict=True):
        given = [i for i in own if i >= 0]
        assert given == sorted(given, key=lambda i: (-float(row[i]), i))


def ties(f: torch.Tensor, top: int) -> int:
    best = f.topk(min(top, f.shape[1])).values
    return int(((best[:, 1:] == best[:, :-1]) & (best[:, 1:] > 2)).sum())


CASES = [(ranks, size, k) for ranks in (2, 3) for size in (20, 21, 23) for k in (0, 4)]


@pytest.mark.parametrize(("ranks", "size", "k"), CASES)
def test_several_ranks_make_what_one_does(
    ranks: int, size: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal activations stand in the order of their features, wherever these are."""
    assert differs(ranks, size, k, shards_module, monkeypatch) == []


def test_fewer_features_than_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of four ranks has nothing but what was added to fill it."""
    assert shards_module.Shards(3, 4).part(autoencoder(5, 0)).num_features == 2
    assert differs(4, 5, 0, shards_module, monkeypatch) == []


MISTAKES = {
    "shard off by one": ("self.rank * size,", "self.rank * size + 1,"),
    "numbers of another rank": ("ids = ids + self.rank * width", "ids = ids + 0"),
    "what fills is active": ("bias=cut(whole.bias)", "bias=cut(whole.bias - 30) + 30"),
    "each rank its own k largest": (
        "values, ids = self.best(activations, k)",
        "return activations",
    ),
    "equal ones in any order": (
        "ids, order = ids.sort(dim=1)",
        "ids, order = ids.sort(dim=1, descending=True)",
    ),
    "no sum": ("return part if self.ranks == 1 else", "return part if True else"),
    "a neighbour's activation": ("(local >= 0)", "(local > 0)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_shard_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Mistake(name, shards_module, *MISTAKES[name]).made()
    found = [differs(*case, module, monkeypatch) for case in CASES]
    assert any(found)
