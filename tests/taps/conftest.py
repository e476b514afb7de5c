# SPDX-License-Identifier: Apache-2.0
"""The pinned upstream tree, and its classes with taps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.taps_wired import Wired
from tools.pins import ROOT, load_pin
from tools.wheels import upstream_folder


@pytest.fixture(scope="session")
def upstream() -> Path:
    """The pinned wheel, unpacked; nobody writes to it."""
    return upstream_folder(load_pin(ROOT, "cpu"), ROOT / "build")


@pytest.fixture(scope="session")
def wired(upstream: Path) -> Wired:
    return Wired(upstream)
