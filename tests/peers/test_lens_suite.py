# SPDX-License-Identifier: Apache-2.0
"""vLLM-Lens's own tests, as its wheel ships them, against engines with `compat=["lens"]`.

See `tests/peers/lens_suite.py` for what is said to them, and `tests/gpu/lens.py` for the same on a
GPU host. docs/coming-from.md lists what cannot pass.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.http.server import save_tokenizer
from tests.peers.lens_runs import (
    CROSS,
    HEADS,
    LAYERS,
    LONGER,
    MODEL,
    OFFLINE,
    QK,
    QK_POINTS,
    judged,
    run,
)
from tests.peers.packages import folder_of

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

TWO = {"tensor_parallel_size": 2}
"""Of engines that they want on one device."""


@pytest.fixture
def working(request: Any, tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A folder in which their model's name is one of a model, with other fields of its config."""
    row = tiny_models.row("qwen2")

    def config() -> Any:
        plain = row.config()
        fields = {**plain.to_dict(), "layer_types": None, "max_position_embeddings": 2048}
        return type(plain)(**{**fields, "num_hidden_layers": LAYERS, **request.param})

    saved = models.save(replace(row, name="qwen2-lens", config=config), tmp_path / "saved")
    (tmp_path / MODEL).parent.mkdir()
    saved.rename(tmp_path / MODEL)
    save_tokenizer(tmp_path / MODEL)
    return tmp_path


@pytest.mark.parametrize(
    ("working", "modules", "engine"),
    [
        pytest.param({}, OFFLINE, {}, id="offline"),
        pytest.param(HEADS, QK, QK_POINTS, id="qk"),
        pytest.param({}, LONGER, {}, id="longer", marks=pytest.mark.long),
        pytest.param(HEADS, OFFLINE, TWO, id="two", marks=pytest.mark.long),
        pytest.param(HEADS, CROSS, {}, id="cross", marks=pytest.mark.long),
    ],
    indirect=["working"],
)
def test_theirs(
    working: Path, modules: dict[str, tuple[int, dict[str, str]]], engine: dict[str, Any]
) -> None:
    settings = {"LENS_ENGINE": json.dumps(engine)}
    beside = [folder_of("inspect")] if modules is CROSS else []
    ran = run(working, folder_of("lens"), [*modules], settings, beside=beside)
    for module, cases in ran.items():
        expected, refused = modules[module]
        passed, failed = judged(cases)
        wrong = {name: why for name, why in failed.items() if name not in refused}
        assert not wrong, json.dumps(wrong)[:4000]
        assert failed.keys() == refused.keys()
        for name, said in refused.items():
            assert said in failed[name]
        on_two = len(cases) - expected - len(refused)  # those that want two GPUs
        assert expected <= passed <= expected + (on_two if torch.cuda.is_available() else 0)
