# SPDX-License-Identifier: Apache-2.0
"""Every method, probe and metric over sizes of rows: nothing knows how large a row usually is.

Rows times c give what c makes of the answer, to the last digits, in every dtype. What is in
`vllm/pilot` and neither here nor named with a reason is an error, so that a new method is tried.
"""

from __future__ import annotations

import importlib
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

import vllm.pilot
from tests.support.toolkit_sizes import (
    ABSENT,
    BAD,
    CASES,
    COUNT,
    DIRECTIONS,
    HIDDEN,
    OF_ROWS,
    SIZES,
    Rows,
    in_sums,
)
from vllm.pilot.attention import mean_weights, query_weights
from vllm.pilot.choice import divergence
from vllm.pilot.directions import (
    Method,
    PairSums,
    d_prime,
    logistic,
    mean_difference,
    pca,
)
from vllm.pilot.linear_probe import fit_probe
from vllm.pilot.linking import link
from vllm.pilot.row_checks import as_float32
from vllm.v1.capture import AttentionRows
from vllm.v1.interventions.makings import Attention

pytestmark = pytest.mark.quick


def test_everything_is_tried_or_named() -> None:
    public = set()
    for path in Path(vllm.pilot.__file__).parent.glob("[a-z]*.py"):
        module = importlib.import_module(f"vllm.pilot.{path.stem}")
        public |= {
            f"{path.stem}.{name}"
            for name, made in inspect.getmembers(module)
            if not name.startswith("_")
            and (inspect.isfunction(made) or inspect.isclass(made))
            and made.__module__ == module.__name__
        }
    tried = {name.split(",")[0] for name in CASES} & public
    named = {name for name in public if name in ABSENT or name.split(".")[0] in ABSENT}
    assert public - tried - named == set()
    assert not tried & named
    assert {name for name in ABSENT if "." in name} <= public
    assert {name for name in get_args(Method)} <= {
        name.split(", ")[1] for name in CASES if name.startswith("directions.direction")
    } | {"logistic"}


def rows_of(seed: int = 0, count: int = COUNT, hidden: int = HIDDEN) -> tuple[Rows, Rows]:
    """Pairs with a concept, float64 of few digits, so that bfloat16 has them too."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, count, hidden, generator=generator)
    concept = torch.randn(hidden, generator=generator)
    away = 1 + torch.rand(count, 1, generator=generator)
    p, n = noise[0] + away * concept, noise[1]
    return p.bfloat16().double(), n.bfloat16().double()


def flat(made: Any) -> np.ndarray:
    """All numbers of an answer."""
    if isinstance(made, list | tuple):
        return np.concatenate([flat(part) for part in made] or [np.empty(0)])
    return np.asarray(made, dtype=np.float64).reshape(-1)


def near(found: Any, want: Any) -> bool:
    ours, others = flat(found), flat(want)
    assert np.isfinite(others).all()
    return ours.shape == others.shape and bool(
        np.allclose(ours, others, rtol=1e-6, atol=1e-6 * np.abs(others).max(initial=0.0))
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_any_size(name: str, size: float) -> None:
    """In every dtype, with many rows and with fewer than there are dimensions."""
    for count, hidden in ((COUNT, HIDDEN), (8, 30)):
        p, n = rows_of(count=count, hidden=hidden)
        want = CASES[name](p, n, 1.0)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            assert near(CASES[name]((p * size).to(dtype), (n * size).to(dtype), size), want), dtype


@pytest.mark.parametrize("size", (1.0, *SIZES))
@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_massive_channel(name: str, size: float) -> None:
    """One that is alike in all rows is nothing to a direction; lat and sums see it as rounding."""
    p, n = rows_of()
    want, moved = DIRECTIONS[name](p, n, 1.0), torch.zeros(HIDDEN).double()
    moved[5] = 22528.0
    found = DIRECTIONS[name]((p + moved) * size, (n + moved) * size, size)
    if "find" in name:  # a bench has float32
        assert np.allclose(flat(found), flat(want), atol=3e-3)
    else:
        assert near(found, want)


@pytest.mark.parametrize("size", (1.0, *SIZES))
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_that_are_all_alike(name: str, size: float) -> None:
    """Each class is one row, again and again: a direction from one to the other, or none at all."""
    p, n = (rows[:1].expand(COUNT, -1) * size for rows in rows_of())
    try:
        found = flat(OF_ROWS[name](p, n, size))
    except ValueError as error:
        assert "centred" in str(error)
        return
    if name in DIRECTIONS:
        want = (p[0] - n[0]).numpy() / 2 / size
        assert np.allclose(found, want, rtol=1e-5, atol=1e-5)
    assert not np.isnan(found).any()


@pytest.mark.parametrize("size", (1.0, *SIZES))
@pytest.mark.parametrize("name", DIRECTIONS)
def test_rows_that_are_there_twice(name: str, size: float) -> None:
    p, n = (rows.repeat(2, 1) for rows in rows_of(count=9))
    found, once = DIRECTIONS[name](p * size, n * size, size), DIRECTIONS[name](p, n, 1.0)
    assert near(found, once)
    if "lat" not in name and "logistic" not in name and "mean" not in name:
        assert near(once, DIRECTIONS[name](*rows_of(count=9), 1.0))


@pytest.mark.parametrize("name", DIRECTIONS)
def test_classes_that_do_not_differ(name: str) -> None:
    p, _ = rows_of()
    for rows in (p, p[:1].expand(COUNT, -1), torch.zeros_like(p)):
        with pytest.raises(ValueError, match="do not differ"):
            DIRECTIONS[name](rows, rows, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_row_that_is_not_finite_is_named(name: str, value: float) -> None:
    p, n = rows_of()
    p[BAD, 2] = value
    with pytest.raises(ValueError, match=rf"\b{BAD}\b.*finite"):
        OF_ROWS[name](p, n, 1.0)


def test_layers_are_named_too() -> None:
    p, n = (torch.stack([rows, rows, rows], 1) for rows in rows_of())
    p[BAD, 1, 0] = torch.nan
    with pytest.raises(ValueError, match="positive: row 3 is not finite at layer 1"):
        mean_difference(p, n)
    sums = PairSums(3, HIDDEN)
    sums.add(n[:2], n[:2] + 1)
    with pytest.raises(ValueError, match="positive: row 5 is not finite at layer 1"):
        sums.add(p, n)


def test_what_float32_cannot_hold_is_refused() -> None:
    p, n = rows_of()
    for size in (1e-60, 1e60):
        with pytest.raises(ValueError, match="float32 cannot hold it"):
            mean_difference(p * size, n * size)
        with pytest.raises(ValueError, match="float32 cannot hold it"):
            fit_probe(p * size, n * size, size**2)
    assert as_float32(torch.full((2, 3), 3e38), "x").isfinite().all()


def test_pairs_that_differ_by_nearly_the_same() -> None:
    """What centring leaves is a millionth: rows and sums find it, and of none they say so."""
    _, n = rows_of()
    noise = torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(9)).double()
    noise[:, 4] *= 5
    for share, size in ((1e-9, 1.0), (1e-9, 2.0**40), (1e-6, 2.0**-40)):
        ours = (n + 1 + share * noise) * size
        around = ours - n * size - (ours - n * size).mean(0)
        top = torch.linalg.svd(around).Vh[0]
        for found in (pca(ours, n * size, centred=True), in_sums(ours, n * size).pca(True)[0]):
            along = float((found.double() / found.double().norm()) @ top)
            assert abs(along) > 0.999
    with pytest.raises(ValueError, match="centring leaves nothing"):
        pca(n + 0.1, n, centred=True)
    with pytest.raises(ValueError, match="centring leaves nothing at layers"):
        in_sums(n + 0.1, n).pca(True)


def test_scores_that_differ_by_rounding_alone() -> None:
    """The mean of three times 0.1 is not 0.1."""
    few, many = (torch.full((count,), 0.1, dtype=torch.float64) for count in (3, 5))
    assert d_prime(few, many) == 0
    assert d_prime(few + 1e-9, many) == torch.inf
    assert d_prime(few, many + 1e-9) == -torch.inf
    with pytest.raises(ValueError, match="two of each"):
        d_prime(few[:1], many)


@pytest.mark.parametrize("penalty", [1.0, 1e-3])
@pytest.mark.parametrize("size", SIZES)
def test_a_probe_whose_penalty_is_not_that_of_its_rows(size: float, penalty: float) -> None:
    """Small rows: the penalty is all there is, and the weights are the sum of rows by class. Large
    ones: it is next to nothing, and the classes are apart as far as they can be."""
    p, n = rows_of(count=9, hidden=30)
    probe = fit_probe(p * size, n * size, penalty)
    if size < 2.0**-30:
        want = (p.sum(0) - n.sum(0)) / 2 * size / penalty
        assert torch.allclose(probe.weight.double() / want.norm(), want / want.norm(), atol=1e-6)
        assert probe.bias == pytest.approx(0.0, abs=1e-6)
    if size > 1:
        weight = probe.weight.double() * size
        margins = torch.cat([p @ weight + probe.bias, -(n @ weight + probe.bias)]) / weight.norm()
        other = logistic(p * size, n * size, paired=False, penalty=penalty).double()
        # No other direction that was found keeps the nearest row further away.
        for vector in (other, (p.mean(0) - n.mean(0))):
            along = torch.cat([p @ vector, -(n @ vector)]) / vector.norm()
            apart = (along[:9].min() + along[9:].min()) / 2
            assert float(margins.min()) > 0.9 * float(apart)
    assert probe.accuracy(p * size, n * size) == 1


def attended(weights: list[float]) -> Any:
    """An output with the weights of one query of one head, of layer 0."""
    at = np.array([len(weights) - 1])
    rows = AttentionRows(
        at,
        at,
        torch.tensor(weights)[None],
        at,
        Attention(("weights",), (), (), 0, "", len(weights)),
        heads=(0,),
    )
    result = SimpleNamespace(status="ok", payload={("attn", 0): rows})
    return SimpleNamespace(capture_results={"inline": result})


def test_a_temperature_of_any_size() -> None:
    items = {"a": [0], "b": [1], "c": [2]}
    for temperature in (1e-310, 1e-12, 1.0, 1e12):
        made = link(attended([0.5, 0.3, 0.2]), items, temperature=temperature)
        assert np.isfinite(made.chances).all() and made.chances.sum() == pytest.approx(1)
        assert made.names == ["a", "b", "c"]


def test_attention_that_is_not_finite_is_named() -> None:
    rows = attended([0.5, float("nan"), 0.2]).capture_results["inline"].payload["attn", 0]
    for call in (query_weights, mean_weights):
        with pytest.raises(ValueError, match=r"query 2: .*not finite"):
            call(rows)


def test_what_has_become_impossible_is_infinitely_far() -> None:
    """And what never was possible is no difference."""
    impossible, possible = {0: 0.0, 1: -math.inf}, {0: math.log(0.5), 1: math.log(0.5)}
    assert divergence(possible, impossible) == math.inf
    assert divergence(impossible, possible) == pytest.approx(math.log(2))
