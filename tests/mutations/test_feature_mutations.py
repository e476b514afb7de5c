# SPDX-License-Identifier: Apache-2.0
"""The tests of features and of latches fail where these are computed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from tests.layers import test_steering_terms as written
from tests.mutations.features import OF_FILES, OF_TERMS
from tests.mutations.rules import Mistake
from tests.pilot import test_features as read
from tests.support.terms import Steer
from vllm.model_executor.layers import steering_terms
from vllm.utils import torch_utils

pytestmark = pytest.mark.quick

# The same rows each time, and no smaller ones looked for when a test fails.
SAME = settings(max_examples=5, phases=[Phase.generate], database=None, derandomize=True)

DRAWN: list[tuple[Any, dict[str, Any]]] = [
    (written.test_features_act_at_once_and_keep_what_was_not_reconstructed, {}),
    (written.test_features_read_the_row_from_before_it_is_shifted, {}),
    (written.test_each_operation_is_what_the_reference_says, {"name": "feature", "gated": False}),
    (written.test_drafts_that_are_rejected_latch_nothing, {}),
    (
        written.test_a_gate_that_latches_stays_as_open_as_it_was,
        {"positions": [3, 4, 5, 6], "steps": [5, 4]},
    ),
]
"""Tests of random rows, each with what it is asked beside."""


def fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except (AssertionError, ValueError, IndexError, ExceptionGroup):
        return True
    return False


def misread(folder: Path) -> bool:
    """Tell whether a test of files fails."""
    checks: tuple[Callable[[Path], object], ...] = (
        read.test_an_activation_at_its_threshold_is_none,
        read.test_what_the_tools_say_of_their_own_files,
        read.test_a_reconstruction_is_what_is_decoded,
        partial(read.test_the_engine_writes_features_as_the_file_has_them, subtracts=True),
    )
    places = [folder / str(i) for i in range(len(checks))]
    for place in places:
        place.mkdir()
    pairs = zip(checks, places, strict=True)
    return any(fails(partial(check, place)) for check, place in pairs)


def miswritten(steer: Steer) -> bool:
    """Tell whether a test of operations fails."""

    def drawn(test: Any, asked: dict[str, Any]) -> None:
        run = partial(test.hypothesis.inner_test, steer, **asked)
        SAME(given(maker=written.makers())(lambda maker: run(maker=maker)))()

    checks = [partial(drawn, test, asked) for test, asked in DRAWN]
    checks.append(partial(written.test_a_feature_at_its_threshold_is_not_active, steer))
    return any(map(fails, checks))


def test_what_is_right_is_not_noticed(tmp_path: Path) -> None:
    assert not misread(tmp_path) and not miswritten(steering_terms.steer_rows_torch)


@pytest.mark.parametrize("mistake", OF_FILES, ids=lambda mistake: mistake.name)
def test_a_wrong_activation_is_noticed(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(read, "Autoencoder", mistake.made().Autoencoder)
    assert misread(tmp_path)


@pytest.mark.parametrize("mistake", OF_TERMS, ids=lambda mistake: mistake.name)
def test_a_wrong_operation_is_noticed(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    # The mutant is called as it is, and no op.
    monkeypatch.setattr(torch_utils, "direct_register_custom_op", lambda **_: None)
    assert miswritten(mistake.made().steer_rows_torch)
