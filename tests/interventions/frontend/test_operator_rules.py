# SPDX-License-Identifier: Apache-2.0
"""Rules of the operator are in the plan of every request, before its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plans import VECTOR, config_of, plan_of
from vllm.sampling_params import RequestOutputKind
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.plan import Rule
from vllm.v1.steering.rule_files import parse_operator_rules

pytestmark = pytest.mark.quick

RULE: dict[str, Any] = {
    "name": "ours",
    "point": "post_block",
    "layer": 1,
    "probe": VECTOR,
    "threshold": 0.5,
    "need": 2,
    "of": 3,
    "then": "stop",
}


def rules_of(*operators: dict[str, Any], **asked: Any) -> list[Rule]:
    catalog = ModuleCatalog(config_of())
    catalog.state.rules[""] = parse_operator_rules(list(operators), "rules", config_of(), {})
    plan = plan_of(catalog=catalog, **asked)
    return plan.capture.rules if plan is not None and plan.capture is not None else []


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"n": 3},
        {"steering_inherit_global": False},
        {"steering_vectors": {"post_block": {1: VECTOR}}},
        {"capture": {"inline": {"hooks": {"post_block": [1]}}}},
        {"rules": [{**RULE, "name": "own", "threshold": 9.0}]},
    ],
)
def test_every_request_has_them(kind: RequestOutputKind, asked: dict[str, Any]) -> None:
    rules = rules_of(RULE, {**RULE, "name": "two", "over": "prompt"}, output_kind=kind, **asked)
    ours, two, *own = rules
    assert (ours.name, ours.for_all, ours.runs, ours.then) == ("ours", True, [5, 8], "stop")
    assert (ours.threshold, ours.need, ours.of, ours.below) == (0.5, 2, 3, False)
    assert (two.name, two.runs) == ("two", [0, 5])
    assert [(rule.name, rule.for_all) for rule in own] == [("own", False)] * ("rules" in asked)


def test_positions_are_those_of_each_prompt() -> None:
    over = {"generated": [7, 9], "prompt": [0, 7], "all": [0, 9], "predicting": [6, 9]}
    for name, runs in over.items():
        [rule] = rules_of({**RULE, "over": name}, prompt=7, max_tokens=3)
        assert rule.runs == runs
    [rule] = rules_of({**RULE, "over": ["last_prompt", "generated"]}, prompt=7, max_tokens=3)
    assert rule.runs == [6, 9]
    assert rules_of(RULE, max_tokens=1) == [], "an answer of one token has no row that counts"


def test_what_is_told_of_them_has_no_probe() -> None:
    rules = parse_operator_rules(
        [RULE, {**RULE, "name": "b", "then": "flag"}], "r", config_of(), {}
    )
    told = [rule.told() for rule in rules]
    assert [rule["then"] for rule in told] == ["stop", "flag"]
    given = {key: value for key, value in RULE.items() if key != "probe"}
    assert told[0].pop("probe_norm") > 0
    kinds = {"head": "linear", "pool": "each"}
    assert told[0] == {**given, **kinds, "below": False, "over": "generated"}
