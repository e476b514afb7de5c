# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints that upstream's CPU build loads: rows read and written, against the same
rounded weights in transformers. `python -m tests.gpu.quantised` has the others, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.model import save_model
from tests.gpu.quantised import LAYERS, serve
from tests.support.quantised import roughen

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model before rounding."""
    made = tmp_path_factory.mktemp("quantised")
    save_model(made / "model", LAYERS)
    roughen(made / "model")
    return made


@pytest.mark.parametrize(
    "name",
    [
        "AWQ",
        "INT8 W8A8",
        "GPTQ",
        "INT4 W4A16",
        "FP8 W8A8",
    ],
)
def test_rows_and_writes_are_of_the_rounded_weights(folder: Path, name: str) -> None:
    try:
        checks = serve(folder, name, {"enforce_eager": True})
    except ValueError as error:
        if "Failed to find a kernel" not in str(error):
            raise
        pytest.skip(f"upstream has no kernel of {name} for this CPU")
    print(checks)
    assert len(checks) == 3 and all(check["ok"] for check in checks), checks
