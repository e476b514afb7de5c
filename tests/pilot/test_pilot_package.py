# SPDX-License-Identifier: Apache-2.0
"""The package of the toolkit: what it exports is there."""

from __future__ import annotations

import pytest

import vllm.pilot

pytestmark = pytest.mark.quick


def test_what_is_exported_is_there() -> None:
    exported = getattr(vllm.pilot, "__all__", [])
    assert [name for name in exported if not hasattr(vllm.pilot, name)] == []
