# SPDX-License-Identifier: Apache-2.0
"""Directions of the same pairs, found by repeng and by steering-vectors as they were published,
over transformers; by ours over an engine. Where they differ, this says in what."""

from __future__ import annotations

import importlib
import random
import shutil
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from tests.conformance import models
from tests.conformance.engine import engine
from tests.conformance.models import LAYERS
from tests.http.server import save_tokenizer
from tests.peers.packages import folder_of
from vllm.pilot import Pairs, logistic, mean_difference, pca, read_rows

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

NEAR = 1e-6
"""How far a cosine may be from 1."""
APART = 1e-3
"""How far it must be where the two are not of the same rows."""


@dataclass(frozen=True)
class Same:
    """A model, and pairs whose rows ours are made of."""

    name: str
    model: Any
    tokenizer: Any
    texts: list[tuple[str, str]]
    positive: torch.Tensor
    negative: torch.Tensor


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2"])
def same(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    tmp_path_factory: pytest.TempPathFactory,
) -> Same:
    row = tiny_models.row(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(tiny_models.path(request.param), path)
    save_tokenizer(path)
    rng = random.Random(3)
    starts = ["".join(rng.choices(string.ascii_letters, k=rng.randint(3, 20))) for _ in range(24)]
    texts = [(f"{start} Ya", f"{start} Nb") for start in starts]
    options: dict[str, Any] = {"enable_steering": True, "capture_consumers": ["inline"]}
    with engine(path, **row.engine, **options, skip_tokenizer_init=False) as llm:
        rows = read_rows(llm, Pairs.of([p for p, _ in texts], [n for _, n in texts]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, pad_token="<unk>")
    return Same(request.param, models.load(row, path), tokenizer, texts, *rows)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Both packages; repeng is written for numpy 1."""
    monkeypatch.syspath_prepend(str(folder_of("directions")))
    monkeypatch.setattr(np, "float_", np.float64, raising=False)
    return importlib.import_module("steering_vectors"), importlib.import_module("repeng")


def off(a: Any, b: Any) -> float:
    """How far the cosine of two vectors is from 1, whichever way they point."""
    a, b = (torch.as_tensor(x).double().flatten() for x in (a, b))
    return 1 - abs(float(a @ b / a.norm() / b.norm()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_steering_vectors(same: Same, theirs: tuple[Any, Any], side: str) -> None:
    """Of all layers. What it makes of a batch that is padded on the left is of other rows where
    positions are absolute."""
    package, _ = theirs
    same.tokenizer.padding_side = side
    # scikit-learn's default of `tol` is 1e-4, which can be seen here.
    exact = {"tol": 1e-10, "max_iter": 100_000}
    for find, aggregator, length in (
        (mean_difference, package.mean_aggregator(), 2.0),
        (pca, package.pca_aggregator(), None),
        (logistic, package.logistic_aggregator(exact), None),
    ):
        ours = find(same.positive, same.negative)
        for batch in (1, len(same.texts)):
            found = package.train_steering_vector(
                same.model, same.tokenizer, same.texts, aggregator=aggregator, batch_size=batch
            ).layer_activations
            assert sorted(found) == list(range(LAYERS))
            padded = same.name == "gpt2" and side == "left" and batch > 1
            for layer, vector in found.items():
                far = off(ours[layer], vector)
                assert far >= APART if padded else far <= NEAR, (find, layer, batch)
                assert off(ours[layer - 1], vector) >= APART, "another layer is another direction"
                if length and not padded:
                    assert torch.allclose(vector, length * ours[layer], atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["pca_diff", "pca_center"])
def test_repeng(same: Same, theirs: tuple[Any, Any], method: str, side: str) -> None:
    """Of layers between the first, which it has not, and the last, where it reads the final norm's
    output."""
    _, package = theirs
    same.tokenizer.padding_side = side
    entries = [package.DatasetEntry(*texts) for texts in same.texts]
    centred = method == "pca_diff"
    ours, others = (pca(same.positive, same.negative, c) for c in (centred, not centred))
    for batch in (1, len(entries)):
        found = package.ControlVector.train(
            same.model, same.tokenizer, entries, method=method, batch_size=batch
        ).directions
        assert sorted(found) == list(range(1, LAYERS))
        for layer, vector in found.items():
            far = off(ours[layer], vector)
            padded = same.name == "gpt2" and side == "left" and batch > 1
            assert far >= APART if padded or layer == LAYERS - 1 else far <= NEAR, (layer, batch)
            assert off(others[layer], vector) >= APART, "centred or not is another direction"
