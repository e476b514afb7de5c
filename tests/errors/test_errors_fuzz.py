# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in the fields of a request: a plan or an `InterventionError`, and soon."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import HIDDEN, SHAPE, VECTOR, config_of, plan_of
from vllm.config.operations import STREAM_OPERATIONS
from vllm.config.points import STREAM_POINTS
from vllm.config.steering import FAMILIES
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.request.selectors import NAMED_SELECTORS
from vllm.v1.interventions.plan import UNSTEERED, Plan, SteeringPlan
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.steering.modules import parse_module

pytestmark = pytest.mark.quick

CONFIG = config_of(
    max_steering_configs=1,
    steering_points=["pre_attn", "post_block"],
    steering_families=[family for family in FAMILIES if family != "pin"],
    max_steering_rows=4,
    max_steering_ops=2,
)
MODULES = {
    name: parse_module(value, name, SHAPE, CONFIG.steering_config)
    for name, value in {
        "m": {"pre_attn": {0: VECTOR}},
        "n": {"ops": [{"op": "normalize", "point": "pre_attn", "layers": [0]}]},
    }.items()
}
SECONDS = 2.0
"""Of processor time, for a request of a few kilobytes."""

NUMBERS = st.one_of(
    st.integers(-6, 12),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**63, True]),
    st.floats(),
)
# fmt: off
WORDS = st.sampled_from([
    "pre_attn", "post_block", "all", "0", "0-3", "3-1", "0-999999999", "", "vector", "scale",
    "hooks", "positions", "start", "stop", "step", "inline", "text", "token_ids",
    "which", *NAMED_SELECTORS,
])
# fmt: on
SCALARS = st.one_of(st.none(), NUMBERS, WORDS, st.text(max_size=8))
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(SCALARS, inner, max_size=4),
        st.tuples(inner),
    ),
    max_leaves=12,
)


def mostly(good: st.SearchStrategy[Any], junk: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One piece of junk in a request that is well formed elsewhere reaches the deepest checks."""
    return st.integers(0, 15).flatmap(lambda n: junk if n == 15 else good)


def mapping(
    keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[Any, Any]]:
    return st.dictionaries(keys, values, min_size=1, max_size=2)


def some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=1, max_size=3)


ROWS = st.lists(mostly(st.floats(-9, 9), SCALARS), min_size=HIDDEN, max_size=HIDDEN)
SCALED = st.fixed_dictionaries({"vector": ROWS}, optional={"scale": mostly(NUMBERS, JUNK)})
LAYERS = mostly(st.sampled_from([0, 1, 3, "0", "1-3", "all"]), SCALARS)
POINTS_GIVEN = mostly(st.sampled_from(["pre_attn", "pre_attn", "post_block", "post_attn"]), SCALARS)
BY_LAYER = mostly(mapping(LAYERS, mostly(st.one_of(ROWS, SCALED), JUNK)), JUNK)
STEERING = mostly(mapping(POINTS_GIVEN, BY_LAYER), JUNK)

BOUNDS = mostly(st.integers(-5, 9), SCALARS)
RANGES = st.fixed_dictionaries({}, optional={"start": BOUNDS, "stop": BOUNDS, "step": BOUNDS})
WHICH = st.fixed_dictionaries({}, optional={"which": mostly(st.just("last"), SCALARS)})
SEARCHES = st.one_of(
    st.fixed_dictionaries({"token_ids": mostly(some(st.integers(99, 105)), JUNK)}),
    st.fixed_dictionaries({"text": SCALARS}),
)
FOUND = st.tuples(SEARCHES, WHICH).map(lambda t: t[0] | t[1])
NAMES = st.sampled_from(NAMED_SELECTORS)
ENTRIES = mostly(st.one_of(st.integers(-3, 5), NAMES, RANGES, FOUND), JUNK)
HOOKS = mostly(mapping(POINTS_GIVEN, mostly(st.one_of(LAYERS, some(LAYERS)), JUNK)), JUNK)
ASKS = st.fixed_dictionaries(
    {"hooks": HOOKS}, optional={"positions": mostly(st.one_of(ENTRIES, some(ENTRIES)), JUNK)}
)
CAPTURE = mostly(st.fixed_dictionaries({"inline": mostly(ASKS, JUNK)}), JUNK)
GATES = st.fixed_dictionaries(
    {"probe": mostly(ROWS, JUNK), "threshold": mostly(NUMBERS, JUNK), "sharpness": NUMBERS},
    optional={
        "when": mostly(st.sampled_from(["row", "last_prompt"]), JUNK),
        "latch": mostly(st.booleans(), JUNK),
    },
)
OPERATION = st.fixed_dictionaries(
    {
        "op": mostly(st.sampled_from(STREAM_OPERATIONS), SCALARS),
        "point": POINTS_GIVEN,
        "layers": LAYERS,
    },
    optional={
        "positions": mostly(st.one_of(ENTRIES, some(ENTRIES)), JUNK),
        "gate": mostly(GATES, JUNK),
        "direction": mostly(ROWS, JUNK),
        "vector": mostly(ROWS, JUNK),
        "values": mostly(some(ROWS), JUNK),
        **{name: NUMBERS for name in ("scale", "strength", "lo", "hi", "value", "alpha")},
    },
)
# fmt: off
NEEDS = {
    "add": ["vector"], "norm_match": ["direction", "scale"], "ablate": ["direction"],
    "clamp": ["direction", "lo"], "pin": ["direction", "value"],
    "replace": ["values", "positions"],
}
# fmt: on


def tidied(entry: dict[str, Any]) -> dict[str, Any]:
    """Mostly with the keys its operation has: the deeper checks come after that one."""
    op = entry["op"]
    if not isinstance(op, str) or op not in STREAM_OPERATIONS:
        return entry
    has = {"op", "point", "layers", "positions", "gate", *NEEDS.get(op, ())}
    return {key: value for key, value in entry.items() if key in has}


OPERATIONS = mostly(some(mostly(OPERATION.map(tidied), JUNK)), JUNK)
NAMED = st.one_of(st.sampled_from(["m", "n", "none"]), st.tuples(st.just("m"), NUMBERS))
FIELDS = st.one_of(
    st.fixed_dictionaries({"steering_vectors": STEERING}),
    st.fixed_dictionaries({"capture": CAPTURE}),
    st.fixed_dictionaries(
        {"prefill_steering_vectors": STEERING},
        optional={"decode_steering_vectors": STEERING, "capture": CAPTURE},
    ),
    st.fixed_dictionaries({"steering": OPERATIONS}),
    st.fixed_dictionaries(
        {"steering_modules": mostly(some(mostly(NAMED, JUNK)), JUNK)},
        optional={"steering": OPERATIONS, "steering_inherit_global": mostly(st.booleans(), JUNK)},
    ),
)


def outcome(fields: dict[str, Any], prompt: int = 5, max_tokens: int = 4) -> Plan | str | None:
    """The plan, or the error's text. Any other exception, or a long wait, fails the test."""
    began = time.process_time()
    try:
        result: Plan | str | None = plan_of(
            config=CONFIG, prompt=prompt, max_tokens=max_tokens, modules=MODULES, **fields
        )
    except InterventionError as error:
        result = str(error)
        named = result.partition(":")[0]
        assert any(named.startswith(field) for field in fields)
        assert error.parameter is not None
        assert len(result) < 1000
    assert time.process_time() - began < SECONDS
    return result


def check_plan(plan: SteeringPlan, prompt: int) -> None:
    """It says something of every position, and brings all it refers to."""
    firsts = [segment.first for segment in plan.segments]
    assert firsts == sorted(set(firsts))
    assert {0, prompt} <= set(firsts)
    named = {segment.vector_sum for segment in plan.segments} - {UNSTEERED}
    assert named == {c.digest for c in plan.sums}
    shared = {one.digest for module in MODULES.values() for one in module.phases.values()}
    parts = {name for c in plan.sums for name, _ in c.sets}
    assert parts - shared == {p.digest for p in plan.sets} - shared
    programs = {segment.program for segment in plan.segments} - {UNSTEERED}
    assert programs == {p.digest for p in plan.programs}
    terms = {term for p in plan.programs for term in p.terms} - {UNSTEERED}
    assert terms == {t.digest for t in plan.terms}


@settings(max_examples=300)
@given(FIELDS, st.integers(1, 7), st.integers(1, 5))
def test_a_plan_or_a_named_error(fields: dict[str, Any], prompt: int, max_tokens: int) -> None:
    result = outcome(fields, prompt, max_tokens)
    asked = any(value is not None for value in fields.values())
    assert (result is None) == (not asked)
    if isinstance(result, Plan):
        # What is accepted can be sent, and says the same where it arrives.
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=Plan)
        assert sent == result
        if result.steering is not None:
            check_plan(result.steering, prompt)


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


DEEP = [nested(100_000, lambda v: [v]), nested(100_000, lambda v: {"inline": v})]


@pytest.mark.parametrize("deep", DEEP, ids=["lists", "mappings"])
@pytest.mark.parametrize(
    "place",
    [
        lambda v: {"steering_vectors": v},
        lambda v: {"steering_vectors": {"pre_attn": v}},
        lambda v: {"steering_vectors": {"pre_attn": {0: v}}},
        lambda v: {"steering_vectors": {"pre_attn": {0: [v] * HIDDEN}}},
        lambda v: {"capture": v},
        lambda v: {"capture": {"inline": v}},
        lambda v: {"capture": {"inline": {"hooks": v}}},
        lambda v: {"capture": {"inline": {"hooks": {"pre_attn": v}}}},
        lambda v: {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": v}}},
        lambda v: {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": [v]}}},
    ],
)
def test_depth_is_refused(place: Any, deep: Any) -> None:
    assert isinstance(outcome(place(deep)), str)


LONG = [100] * 10**6


@pytest.mark.parametrize(
    "fields",
    [
        {"steering_vectors": {"pre_attn": {0: [0.5] * 10**6}}},
        {"steering_vectors": {"x" * 10**6: {}}},
        {"steering_vectors": {"pre_attn": {"9" * 10**6: VECTOR}}},
        {"steering_vectors": {"pre_attn": {0: {str(i): 0 for i in range(10**5)}}}},
        {"capture": {"inline": {"hooks": {"pre_attn": ["0-3"] * 10**5}}}},
        {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": "x" * 10**6}}},
        {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": ["all"] * 10**6}}},
        {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": {"text": "x" * 10**6}}}},
        {
            "capture": {
                "inline": {"hooks": {"pre_attn": [0]}, "positions": {"token_ids": [1] * 10**6}}
            }
        },
        {"capture": {"inline": {str(i): 0 for i in range(10**5)}}},
        {"capture": {str(i): 0 for i in range(10**5)}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_length_is_refused(fields: dict[str, Any]) -> None:
    assert isinstance(outcome(fields), str)


WIDE = TapShape(
    hidden_size=1024, dtype="float32", layers=dict.fromkeys(range(40), LayerShape(STREAM_POINTS))
)
STEPS = [{"step": n} for n in (2, 3, 5, 7, 11, 13, 17, 19)]
ROW = np.ones(1024)


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        (
            {
                "steering_vectors": {
                    "pre_attn": {
                        f"{5 * i}-{5 * i + 4}": {"vector": ROW, "positions": step}
                        for i, step in enumerate(STEPS)
                    }
                }
            },
            "slots",
        ),
        (
            {
                "steering": [
                    {"op": "normalize", "point": point, "layers": "all", "positions": step}
                    for point in STREAM_POINTS
                    for step in STEPS
                ]
            },
            "rows for its ops",
        ),
    ],
    ids=["vectors", "ops"],
)
def test_a_small_request_cannot_ask_for_gigabytes(fields: dict[str, Any], needs: str) -> None:
    """Each combination of a few strides would be a sum, or a list of ops, of its own."""
    config = config_of(
        WIDE, steering_families=["add", "normalize"], max_steering_ops=8, max_steering_rows=32
    )
    began = time.process_time()
    with pytest.raises(InterventionError, match=rf"the request needs \d{{3,}} {needs}"):
        plan_of(config=config, prompt=9000, **fields)
    assert time.process_time() - began < SECONDS


def test_the_same_shapes_in_order_are_a_plan() -> None:
    fields = {
        "steering_vectors": {"pre_attn": {"0-3": {"vector": VECTOR, "scale": 2}}},
        "capture": {"inline": {"hooks": {"pre_attn": ["0-3"]}, "positions": ["all", -1]}},
    }
    assert isinstance(outcome(fields), Plan)
    assert outcome({}) is None
