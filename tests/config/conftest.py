# SPDX-License-Identifier: Apache-2.0
"""The model that configs are of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import TinyModels


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Path:
    return tiny_models.path("llama")
