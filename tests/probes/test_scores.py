# SPDX-License-Identifier: Apache-2.0
"""Scores of probes: pools by their definitions, whatever parts the rows come in, and heads beside
what scikit-learn and torch make of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.support.probes import pooled
from vllm.v1.probes.files import (
    load_probe,
    made_probe,
    probe_from_sklearn,
    probe_from_torch,
    save_probe,
)
from vllm.v1.probes.heads import ACTIVATIONS
from vllm.v1.probes.pools import (
    AnyPool,
    Attention,
    Each,
    Exponential,
    Max,
    Mean,
    MultiMax,
    RollingMax,
)

pytestmark = pytest.mark.quick

POOLS: list[tuple[AnyPool, int]] = [
    (Each(), 1),
    (Mean(), 1),
    (Max(), 1),
    (Exponential(0.3), 1),
    (RollingMax(1), 1),
    (RollingMax(3), 1),
    (MultiMax(), 3),
    (Attention(), 2),
    (Attention(), 6),
]
"""Pools, each with a number of outputs that it takes."""

SITES = [("post_block", 1), ("pre_attn", 3)]
HIDDEN = 5


@pytest.mark.parametrize(("pool", "outputs"), POOLS, ids=repr)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 999))
def test_pools_are_what_they_say_in_parts_of_any_size(
    pool: AnyPool, outputs: int, parts: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(sum(parts), outputs)) * rng.choice([0.1, 30.0])
    whole = pool.scores(numbers)
    np.testing.assert_allclose(whole, pooled(pool, numbers), rtol=1e-9, atol=1e-9)
    state, first, made = pool.start(outputs), 0, []
    for part in parts:
        some = numbers[first : first + part]
        if part == 1:  # beside another completion
            states, scores = pool.advance(
                np.stack([state, pool.start(outputs)]), np.tile(some, (2, 1))
            )
            state, scores = states[0], scores[:1]
        else:
            state, scores = pool.run(state, some)
        made.append(scores)
        first += part
    assert np.concatenate(made).tobytes() == whole.tobytes()


def test_pools_differ() -> None:
    """The definitions that the test above compares with are not one and the same."""
    numbers = np.array([[3.0, 1.0], [-1.0, 2.0], [2.0, -4.0], [5.0, 1.0], [-2.0, 0.5]])
    of_one = [tuple(p.scores(numbers[:, :1])) for p, n in POOLS if n == 1]
    assert len(set(of_one)) == len(of_one) - 1, "a window of one row is the largest row"
    assert Attention().scores(numbers)[-1] != MultiMax().scores(numbers)[-1]


def test_large_query_scores_overflow_nothing() -> None:
    """The rows of the largest score alone count; of -1e6 and less nothing is left."""
    numbers = np.array([[-1e6, 5.0], [1e6, 2.0], [1e6, 4.0], [0.0, 100.0]])
    assert Attention().scores(numbers).tolist() == pytest.approx([5.0, 2.0, 3.0, 3.0])


def test_linear_and_mlp_heads_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(200, 2 * HIDDEN)) * 3 + 1
    labels = (rows @ rng.normal(size=2 * HIDDEN) + rng.normal(size=200) > 1).astype(int)
    stacked = rows.reshape(-1, 2, HIDDEN)
    for estimator in (
        LogisticRegression(),
        RidgeClassifier(),
        make_pipeline(StandardScaler(), LogisticRegression()),
        make_pipeline(StandardScaler(with_mean=False), LogisticRegression()),
    ):
        fitted = estimator.fit(rows, labels)
        want = fitted.decision_function(rows)
        probe = probe_from_sklearn(fitted, SITES)
        np.testing.assert_allclose(probe.scores(stacked), want, rtol=1e-4, atol=1e-4)
        assert np.abs(probe.scores(stacked[:, ::-1]) - want).max() > 0.5, "sites may change places"
    for activation in ("relu", "tanh", "logistic"):
        mlp = MLPClassifier((7,), activation=activation, random_state=0, max_iter=30)
        fitted = make_pipeline(StandardScaler(), mlp).fit(rows, labels)
        shares = fitted.predict_proba(rows)[:, 1]
        probe = probe_from_sklearn(fitted, SITES)
        want = np.log(shares / (1 - shares))
        np.testing.assert_allclose(probe.scores(stacked), want, rtol=1e-3, atol=1e-3)
        other = made_probe(SITES, probe.weight, np.zeros(7), **_last(probe.head, "relu"))
        assert np.abs(other.scores(stacked) - want).max() > 0.05, "a bias more or less shows"


def _last(head: Any, activation: str) -> dict[str, Any]:
    fields = head.fields()
    return {**{k: fields[k] for k in ("output_weight", "output_bias")}, "activation": activation}


def test_activations_are_those_of_torch() -> None:
    z = np.linspace(-20, 20, 401)
    of_torch = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    assert of_torch.keys() == ACTIVATIONS.keys()
    for name, function in of_torch.items():
        want = function(torch.from_numpy(z)).numpy()
        np.testing.assert_allclose(ACTIVATIONS[name](z), want, atol=1e-14)


def test_state_dicts_of_torch(tmp_path: Path) -> None:
    """Of a Linear, a Sequential and an attention probe, beside what torch computes."""
    torch.manual_seed(4)
    rows, path = torch.randn(9, 2, HIDDEN), tmp_path / "state.pt"
    flat = rows.flatten(1)
    linear = torch.nn.Linear(2 * HIDDEN, 1)
    silu = torch.nn.Sequential(
        torch.nn.Linear(2 * HIDDEN, 6), torch.nn.SiLU(), torch.nn.Linear(6, 1)
    )
    for module, more in ((linear, {}), (silu, {"activation": "silu"})):
        torch.save(module.state_dict(), path)
        probe = probe_from_torch(path, SITES, **more)
        want = module(flat)[:, 0].detach().numpy()
        np.testing.assert_allclose(probe.scores(rows), want, atol=1e-5)
    assert np.abs(probe_from_torch(path, SITES).scores(rows) - want).max() > 0.01, "relu"
    attention = {n: torch.nn.Linear(2 * HIDDEN, 3, bias=False) for n in ("query", "value")}
    torch.save(torch.nn.ModuleDict(attention).state_dict(), path)
    weights = torch.softmax(attention["query"](flat), 0)
    want = float((weights * attention["value"](flat)).sum().detach())
    scores = probe_from_torch(path, SITES).scores(rows)
    assert scores[-1] == pytest.approx(want, abs=1e-5) and abs(scores[-2] - want) > 1e-3


@pytest.mark.parametrize("activation", ["", "tanh"])
def test_a_file_has_all_of_a_probe(activation: str, tmp_path: Path) -> None:
    rng, path = np.random.default_rng(1), tmp_path / "probe.safetensors"
    more: dict[str, Any] = {"pool": RollingMax(2), "threshold": 0.25, "about": {"made": "here"}}
    units = 3 if activation else 1
    if activation:
        more |= {"activation": activation, "output_weight": rng.normal(size=(1, units))}
        more |= {"output_bias": rng.normal(size=1)}
    probe = made_probe(SITES, rng.normal(size=(units, 2, HIDDEN)), rng.normal(size=units), **more)
    save_probe(probe, path)
    read, rows = load_probe(path), rng.normal(size=(6, 2, HIDDEN))
    assert (read.sites, read.head, read.pool) == (probe.sites, probe.head, probe.pool)
    assert (read.threshold, read.about) == (0.25, {"made": "here"})
    assert read.scores(rows).tobytes() == probe.scores(rows).tobytes()
    assert abs(read.scores(rows)[-1] - read.scores(2 * rows)[-1]) > 1e-3
    assert repr(read).startswith(f"ServedProbe({'mlp' if activation else 'linear'}, rolling_max, ")
