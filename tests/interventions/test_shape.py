# SPDX-License-Identifier: Apache-2.0
"""What a loaded model offers: one layer as several tensor-parallel ranks report it."""

import pytest

from vllm.v1.interventions.shape import AttentionRule, LayerShape

pytestmark = pytest.mark.quick

PLAIN: AttentionRule = {"scale": 0.5, "group": 2}


def layer_of(unread: str = "", rule: AttentionRule | None = None) -> LayerShape:
    return LayerShape(("pre_attn",), {"q": (4, 2)}, unread=unread, rule=rule)


def test_each_rank_has_heads_of_its_own() -> None:
    first: AttentionRule = {**PLAIN, "slopes": [1.0], "sinks": [2.0]}
    second: AttentionRule = {**PLAIN, "slopes": [3.0], "sinks": [4.0]}
    joined = layer_of(rule=first).joined(layer_of(rule=second))
    assert joined.rule == {**PLAIN, "slopes": [1.0, 3.0], "sinks": [2.0, 4.0]}
    assert first["slopes"] == [1.0], "what a rank reported was changed"
    assert layer_of(rule=PLAIN).joined(layer_of(rule=PLAIN)) == layer_of(rule=PLAIN)


def test_a_layer_is_read_where_all_ranks_read_it() -> None:
    good, bad = layer_of(rule=PLAIN), layer_of("a head of stone")
    assert good.joined(bad) == bad.joined(good) == bad != good
