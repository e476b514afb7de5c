# SPDX-License-Identifier: Apache-2.0
"""A few mistakes in the wiring, each noticed by the comparison with transformers. `make mutations`
runs all of them on six models, into docs/mutations.md.
"""

from __future__ import annotations

import pytest

from tests.mutations.run import UNMUTATED, run_model

pytestmark = pytest.mark.full

CHOSEN = {
    ("tap after the norm", "pre_attn"),
    ("missing residual half", "post_block"),
    ("post_attn where post_block is", "post_attn"),
    ("steering call missing", "mlp_in"),
    ("wrong layer", "all"),
    ("capture before steering", "all"),
}


def test_mistakes_are_caught() -> None:
    verdicts = list(run_model("llama", lambda *mutant: mutant in CHOSEN))
    assert [v.mutant for v in verdicts if not v.point] == [UNMUTATED, UNMUTATED]
    assert {(v.mutant, v.point) for v in verdicts if v.point} == CHOSEN
    assert all(v.right for v in verdicts), [v for v in verdicts if not v.right]
    assert {v.proof for v in verdicts if v.point not in ("", "all")} == {"refuses"}
