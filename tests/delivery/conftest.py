# SPDX-License-Identifier: Apache-2.0
"""A repository in miniature, with a cache that holds its wheel and a stand-in for the codemod."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.delivery import fork
from tools import assemble


@pytest.fixture
def miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fork.Fork:
    """Not assembled yet; its seam's patch file has a header and no diff."""
    monkeypatch.setenv("VLLM_PILOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assemble, "codemod", lambda root: fork.CODEMOD)
    monkeypatch.setattr("tools.rebase.codemod", lambda root: fork.CODEMOD)
    monkeypatch.setattr("tools.rebase.new_classes", lambda root, tree: ["vllm/new.py:NewBlock"])
    pin = fork.write_repository(tmp_path / "repo", tmp_path / "cache")
    return fork.Fork(tmp_path / "repo", pin)
