# SPDX-License-Identifier: Apache-2.0
"""Vectors that act at some positions only: over chunks, cache hits, preemptions and generation,
judged position by position against Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.models import HIDDEN
from tests.conformance.reference import Site
from tests.conformance.runner import Reference
from tests.support.serving import Judge, capture, prompt_of, vector
from tests.support.timeline import Own, Timeline, added
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

BLOCK = 32
PROMPT = prompt_of(41, 500)
LONG = prompt_of(70, 501)
FULL = 64
ROWS = capture("all")
GENERATED = 12
LAST = len(PROMPT) + GENERATED - 2
"""The last row."""

V = vector(500)
SITE = ("post_block", 1)

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Chunks of 24, and nine usable blocks: alone nobody is preempted."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        enable_prefix_caching=True,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=10,
        max_model_len=models.MAX_LENGTH,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


@pytest.fixture
def line(pair: tuple[LLM, Judge]) -> Iterator[Timeline]:
    llm, judge = pair
    assert llm.reset_prefix_cache()
    line = Timeline(llm, judge)
    yield line
    line.close()


def limited(positions: Any, tier: str = "", values: torch.Tensor = V, site: Site = SITE) -> Fields:
    """A vector at one site, at `positions`."""
    point, layer = site
    return {f"{tier}steering_vectors": {point: {layer: {"vector": values, "positions": positions}}}}


def at(positions: Sequence[int], values: torch.Tensor = V, site: Site = SITE) -> Own:
    """What that adds."""

    def own(length: int) -> dict[Site, torch.Tensor]:
        rows = torch.zeros(length, HIDDEN)
        rows[[p for p in positions if p < length]] = values
        return {site: rows}

    return own


SELECTORS: list[tuple[Any, Sequence[int]]] = [
    ("last_prompt", [40]),
    ("all_prompt", range(41)),
    ("all_generated", range(41, 52)),
    ("predicting", range(40, 52)),
    ("all", range(52)),
    ([3, -1, -41, 47], [0, 3, 40, 47]),
    ({"start": 5, "stop": 30, "step": 7}, [5, 12, 19, 26]),
    ({"start": 35, "stop": 46}, range(35, 46)),
    ({"start": -6, "stop": -3}, [35, 36, 37]),
    ({"token_ids": PROMPT[22:25], "which": "last"}, [22, 23, 24]),
    (["last_prompt", {"start": 2, "stop": 4}, 45, "last_prompt"], [2, 3, 40, 45]),
]


@pytest.mark.parametrize(("selector", "positions"), SELECTORS, ids=lambda value: str(value)[:40])
def test_selector(line: Timeline, selector: Any, positions: Sequence[int]) -> None:
    """Acts there and nowhere else; the twin is one position off."""
    assert max(positions) <= LAST
    name = line.serve(PROMPT, {"max_tokens": GENERATED, **limited(selector), **ROWS})
    line.check(name, at(positions))
    off = [*list(positions)[:-1], max(positions) - 1 if len(positions) > 1 else positions[0] - 1]
    with pytest.raises(AssertionError, match="off by"):
        line.check(name, at(off))


@pytest.mark.v2
def test_tiers_and_neighbours(line: Timeline) -> None:
    """Several vectors of one request overlap; a batch of differing requests is kept apart."""
    other = vector(501)
    asks: list[tuple[Fields, list[Own]]] = [
        (limited("all_generated", "decode_"), [at(range(41, 99))]),
        (limited([43, 44], "decode_"), [at([43, 44])]),
        (limited([0, 23, 24, 25, -1], "prefill_"), [at([0, 23, 24, 25, 40])]),
        (
            {**limited([30, 41, 42]), **limited([30, 31], "prefill_", other)},
            [at([30, 41, 42]), at([30, 31], other)],
        ),
        (
            {
                "steering_vectors": {
                    "post_block": {1: {"vector": V, "scale": 0.5, "positions": [23, 44]}},
                    "pre_attn": {2: {"vector": other, "positions": "predicting"}, 0: V},
                }
            },
            [
                at([23, 44], 0.5 * V),
                at(range(40, 99), other, ("pre_attn", 2)),
                at(range(99), V, ("pre_attn", 0)),
            ],
        ),
        ({}, []),
    ]
    names = [line.add(PROMPT, {"max_tokens": GENERATED, **fields, **ROWS}) for fields, _ in asks]
    line.finish()
    for name, (_, parts) in zip(names, asks, strict=True):
        line.check(name, summed(parts))


def summed(parts: Sequence[Own]) -> Own:
    return lambda length: added(*(part(length) for part in parts))


@pytest.mark.v2
def test_preempted_and_globals(line: Timeline) -> None:
    """Positions are the same ones when they are computed again, under whatever global tiers."""
    wanted = [[25, 40, 50], [19, 20, 21], list(range(30, 45)), [5], [60], [33, 34]]
    names = [
        line.add(prompt_of(20, 510 + i), {"max_tokens": 45, **limited(positions), **ROWS})
        for i, positions in enumerate(wanted)
    ]
    for count, vectors in ((30, {"pre_attn": {0: vector(502)}}), (20, {})):
        line.step(count)
        line.set("base", vectors, replace=True)
    line.finish()
    assert line.preempted
    again = [name for name in names if len(line.runs(name)) > 1 and len(line.runs(name)[0]) > 21]
    assert again, "no generated position was computed again"
    for name, positions in zip(names, wanted, strict=True):
        line.check(name, at(positions))


TWICE: Fields = {**limited([40]), **limited([40], "prefill_")}


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        pytest.param(limited([40]), limited([40]), FULL, id="the same"),
        pytest.param(limited([40]), limited([-30]), FULL, id="the same, said otherwise"),
        pytest.param(limited([40]), {}, BLOCK, id="plain shares what lies before"),
        pytest.param({}, limited([40]), BLOCK, id="shares with plain what lies before"),
        pytest.param(limited([40]), limited([41]), BLOCK, id="another position of the block"),
        pytest.param(limited([40]), limited([40, 41]), BLOCK, id="one position more"),
        pytest.param(limited([40]), limited([40], values=2 * V), BLOCK, id="another vector"),
        pytest.param(limited([5]), {}, 0, id="in the first block"),
        pytest.param(limited([66]), {}, FULL, id="in the last block, which is not full"),
        pytest.param(limited([72]), {}, FULL, id="at a generated position"),
        pytest.param(
            limited("all"), {"steering_vectors": {"post_block": {1: V}}}, FULL, id="everywhere"
        ),
        pytest.param(
            limited("all_prompt"),
            {"prefill_steering_vectors": {"post_block": {1: V}}},
            FULL,
            id="the prompt",
        ),
        pytest.param(TWICE, limited([40], values=2 * V), FULL, id="one sum"),
    ],
)
def test_sharing(line: Timeline, first: Fields, second: Fields, cached: int) -> None:
    """A block's identity covers its own positions, and those before it."""
    assert line.cached(line.serve(LONG, first)) == 0
    assert line.cached(line.serve(LONG, second)) == cached
    assert line.cached(line.serve(LONG, first)) == FULL


@pytest.mark.parametrize(
    ("positions", "following", "cached"),
    [
        ([3], [3], FULL),
        ([3], [3, 50], BLOCK),
        ([3], [50], 0),
        ([50], [50], FULL),
        ([50], [51], BLOCK),
        ([50], [66], BLOCK),
        ([70], [50], BLOCK),
        ([70], [70], FULL),
    ],
    ids=str,
)
def test_second_turn(
    line: Timeline, positions: list[int], following: list[int], cached: int
) -> None:
    """Position 50 was generated in turn 1 and is prompt in turn 2: the same position, still."""
    first = line.serve(LONG[:40], {"max_tokens": 35, **limited(positions), **ROWS})
    line.check(first, at(positions))
    fields = {**limited(following), **capture([-1, -3])}
    second = line.serve([*line.sequence(first), 7, 8, 9], fields)
    assert line.cached(second) == cached
    line.check(second, at(following))
