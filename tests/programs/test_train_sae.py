# SPDX-License-Identifier: Apache-2.0
"""`examples/train_sae.py` on rows that are made of known features: it finds them, and the one
that it names is that of the topic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples import train_sae
from vllm.pilot import Autoencoder

pytestmark = pytest.mark.quick

HIDDEN, TRUE, TEXTS, LENGTH = 32, 48, 40, 50
TOPICS = ["birds", "fish", "trees", "tools"]


def made() -> tuple[Any, torch.Tensor]:
    """Rows, each of three features of length 5 at an offset, and the features [TRUE, HIDDEN]. The
    first feature is active in every second row of texts about fish, and nowhere else."""
    seeded = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(TRUE, HIDDEN, generator=seeded), dim=1)
    text = torch.arange(TEXTS * LENGTH) // LENGTH
    active = 1 + torch.randint(TRUE - 1, (len(text), 3), generator=seeded)
    fish = (text % 4 == 1) & (torch.arange(len(text)) % 2 == 0)
    active[fish, 0] = 0
    rows = 5 * features[active].sum(1) + 3 * torch.randn(HIDDEN, generator=seeded)
    rows[7] *= 100  # a token that all others look at
    columns = {"example": text.numpy(), "token_id": (~fish).long().numpy()}
    asked = SimpleNamespace(
        tensor=lambda: rows,
        labels=lambda: np.array([TOPICS[number % 4] for number in text.tolist()]),
        column=columns.__getitem__,
    )
    return asked, features


def test_what_is_found_and_named(tmp_path: Path) -> None:
    rows, features = made()
    torch.manual_seed(5)  # the result does not depend on it
    trained = train_sae.train(rows.tensor(), features=64, k=3, steps=1000)
    train_sae.save(tmp_path / "sae", trained)
    sae = Autoencoder.load(tmp_path / "sae")
    kept = rows.tensor()[train_sae.ordinary(rows.tensor())]
    assert len(kept) == len(rows.tensor()) - 1
    active = sae.encode(kept)

    def left(some: torch.Tensor) -> float:
        return float((sae.decode(some) - kept).pow(2).sum() / (kept - kept.mean(0)).pow(2).sum())

    assert left(active) < 0.2 < 0.5 < left(active.roll(1, 0))
    assert 1.5 < float((active > 0).sum(1).float().mean()) < 4.5
    found = train_sae.name(sae, rows, lambda token: ["fish", "other"][token])
    assert found.topic == "fish" and found.share > 0.9 and found.reach == 1.0
    assert (
        found.words[0] == "fish" and max(found.by_topic, key=found.by_topic.__getitem__) == "fish"
    )
    alike = torch.nn.functional.normalize(sae.decoder[found.feature], dim=0) @ features.T
    assert float(alike[0]) > 0.9 > 0.7 > float(alike[1:].max())
    again = train_sae.train(rows.tensor(), features=64, k=3, steps=1000)
    assert all(torch.equal(again[name], tensor) for name, tensor in trained.items())


def test_the_prompts(tmp_path: Path) -> None:
    train_sae.write_topics(tmp_path / "topics.jsonl")
    lines = (tmp_path / "topics.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(train_sae.TOPICS) * len(train_sae.KINDS) == 120
