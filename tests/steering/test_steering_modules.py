# SPDX-License-Identifier: Apache-2.0
"""Modules given inline: their tiers, their operations, what a scale does, and their names."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors.test_errors_fuzz import JUNK, STEERING
from tests.support.plans import HIDDEN, SHAPE, VECTOR
from vllm.config.steering import FAMILIES, SteeringConfig
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.plan import VectorSet
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.vectors import vectors_of
from vllm.v1.steering.modules import (
    Module,
    ModuleOp,
    need_module_name,
    parse_module,
)
from vllm.v1.steering.startup_files import parse_module_args

pytestmark = pytest.mark.quick

CONFIG = SteeringConfig(enable_steering=True, steering_families=list(FAMILIES))
HALF = TapShape(hidden_size=HIDDEN, dtype="float16", layers=SHAPE.layers)
UNIT = [1.0, 0.0, 0.0, 0.0]


def parse(value: Any, config: SteeringConfig = CONFIG) -> Module:
    return parse_module(value, "source", SHAPE, config)


def op(name: str, **more: Any) -> dict[str, Any]:
    return {"op": name, "point": "pre_attn", "layers": [0, 1], **more}


def values(vector_set: VectorSet | None) -> dict[tuple[str, int], list[float]]:
    assert vector_set is not None
    return {site: vector.tolist() for site, vector in vectors_of(vector_set).items()}


TIERS = {
    "vectors": {"post_block": {1: VECTOR, 3: {"vector": VECTOR, "scale": 2}}},
    "prefill_vectors": {"post_block": {"1": [0.1] * HIDDEN}},
    "decode_vectors": {"pre_attn": {"0-1": VECTOR}},
}


def test_tiers() -> None:
    module = parse(TIERS)
    doubled = [2 * x for x in VECTOR]
    base = {("post_block", 1): VECTOR, ("post_block", 3): doubled}
    assert values(module.tiers["base"]) == base
    assert [*module.tiers] == ["base", "prefill", "decode"]
    summed = np.float32(np.float64(np.float32(0.1)) + np.array(VECTOR)).tolist()
    assert values(module.phases["prefill"]) == {
        ("post_block", 1): summed,
        ("post_block", 3): doubled,
    }
    decode = {("pre_attn", 0): VECTOR, ("post_block", 1): VECTOR, ("pre_attn", 1): VECTOR}
    assert values(module.phases["decode"]) == {**decode, ("post_block", 3): doubled}
    assert module.ops == []


def test_sites_are_of_vectors_and_operations() -> None:
    value = {"decode_vectors": {"post_block": {3: VECTOR}}, "ops": [op("normalize")]}
    assert parse(value).sites == [("pre_attn", 0), ("pre_attn", 1), ("post_block", 3)]


def test_a_mapping_of_points_is_the_base_tier() -> None:
    module = parse(TIERS["vectors"])
    assert module == parse({"vectors": TIERS["vectors"]})
    assert module.phases == dict.fromkeys(("prefill", "decode"), module.tiers["base"])
    other = parse({"prefill_vectors": TIERS["vectors"]})
    assert other.digest != module.digest
    assert other.phases == {"prefill": module.phases["prefill"]}


def test_identity_is_content() -> None:
    given = {**TIERS, "ops": [op("ablate", direction=VECTOR)]}
    again = {"ops": [op("ablate", direction=np.array(VECTOR))], **TIERS, "vectors": {}}
    again["vectors"] = {
        "post_block": {"3": {"vector": np.array(VECTOR) * 2}, "1": np.array(VECTOR, np.float32)}
    }
    digests = {parse(given).digest, parse(again).digest}
    assert len(digests) == 1
    changes: list[dict[str, Any]] = [
        {"vectors": {"post_block": {1: VECTOR}}},
        {"decode_vectors": TIERS["prefill_vectors"], "prefill_vectors": TIERS["decode_vectors"]},
        {"ops": [op("ablate", direction=VECTOR, strength=0.5)]},
        {"ops": [{**op("ablate", direction=VECTOR), "layers": [0]}]},
        {"ops": [op("ablate", direction=VECTOR)] * 2},
        {"ops": []},
    ]
    digests |= {parse({**given, **change}).digest for change in changes}
    assert len(digests) == 1 + len(changes)


def test_a_module_travels() -> None:
    gate = {"probe": VECTOR, "threshold": 0, "sharpness": 1, "when": "last_prompt"}
    module = parse({**TIERS, "ops": [op("clamp", direction=VECTOR, lo=0, gate=gate)]})
    assert module.phases  # kept, and not sent
    sent = msgspec.msgpack.encode(module)
    again = msgspec.msgpack.decode(sent, type=Module)
    assert again == module
    assert again.phases == module.phases
    assert len(sent) < 2000


SCALED = [
    (op("add", vector=VECTOR, scale=3), "constant", 3.0),
    (op("norm_match", direction=VECTOR, scale=0.25), "norm", 0.25),
    (op("ablate", direction=VECTOR), "strength", 1.0),
    (op("low_rank", A=[VECTOR, VECTOR], B=[[1.0, 2.0]] * HIDDEN, strength=0.5), "strength", 0.5),
]


def only_op(value: dict[str, Any]) -> ModuleOp:
    (made,) = parse({"ops": [value]}).ops
    return made


@pytest.mark.parametrize(("value", "field", "given"), SCALED)
def test_what_a_scale_multiplies(value: dict[str, Any], field: str, given: float) -> None:
    made = only_op(value)
    plain = made.for_request(1.0, "steering_modules[0]", 5, SHAPE)
    scaled = made.for_request(-2.0, "steering_modules[0]", 5, SHAPE)
    assert (plain.name, plain.sites) == (value["op"], [("pre_attn", 0), ("pre_attn", 1)])
    assert plain.terms == made.terms
    assert plain.positions is None
    for one, other in zip(plain.terms, scaled.terms, strict=True):
        before, after = one.scalars._asdict(), other.scalars._asdict()
        assert before[field] == given
        assert {name for name in before if before[name] != after[name]} == {field}
        assert after[field] == -2 * given
        assert one.digest != other.digest
        assert (one.vector, one.encoder) == (other.vector, other.encoder)


@pytest.mark.parametrize(
    "value",
    [op("clamp", direction=VECTOR, lo=0), op("pin", direction=VECTOR, value=1), op("normalize")],
    ids=lambda value: str(value["op"]),
)
def test_what_has_no_scale(value: dict[str, Any]) -> None:
    made = only_op(value)
    assert made.for_request(1, "steering_modules[2]", 5, SHAPE).terms == made.terms
    with pytest.raises(InterventionError, match=rf"^steering_modules\[2\].*{value['op']} has no s"):
        made.for_request(2, "steering_modules[2]", 5, SHAPE)


def test_a_scale_may_be_too_large() -> None:
    made = only_op(op("add", vector=[1e3] * HIDDEN))
    assert made.for_request(60.0, "steering_modules[0]", 5, HALF)
    with pytest.raises(InterventionError, match=r"steering_modules\[0\]: overflows float16"):
        made.for_request(70.0, "steering_modules[0]", 5, HALF)
    assert made.for_request(70.0, "steering_modules[0]", 5, SHAPE)
    strong = only_op(op("ablate", direction=VECTOR, strength=1e20))
    with pytest.raises(InterventionError, match="must be finite and at most"):
        strong.for_request(1e20, "steering_modules[0]", 5, SHAPE)


def test_a_gate_that_is_decided_once_acts_from_the_last_prompt_token_on() -> None:
    gate = {"probe": VECTOR, "threshold": 0, "sharpness": 1}
    frozen = only_op(op("ablate", direction=VECTOR, gate={**gate, "when": "last_prompt"}))
    made = frozen.for_request(1.0, "steering_modules[0]", 5, SHAPE)
    assert made.frozen
    assert isinstance(made.positions, Positions)
    assert [p in made.positions for p in (0, 3, 4, 5, 10**6)] == [False, False, True, True, True]
    row = only_op(op("ablate", direction=VECTOR, gate=gate))
    made = row.for_request(1.0, "steering_modules[0]", 5, SHAPE)
    assert not made.frozen
    assert made.positions is None


ERRORS: list[tuple[Any, str]] = [
    (3, "source: must be a mapping, got 3"),
    ({}, "source: has neither vectors nor operations"),
    ({"vectors": {}, "ops": []}, "source: has neither vectors nor operations"),
    ({"vectors": {}, "tier": 1}, "source: unknown keys ['tier'], allowed are vectors, prefill_v"),
    ({"vectors": {"mlp": {}}}, "source.vectors.mlp: unknown point"),
    ({"mlp": {1: VECTOR}}, "source.vectors.mlp: unknown point 'mlp'"),
    ({"decode_vectors": {"pre_attn": {9: VECTOR}}}, "source.decode_vectors.pre_attn.9: layer 9 is"),
    ({"post_block": {1: VECTOR[:3]}}, "source.vectors.post_block.1: has 3 values"),
    (
        {"post_block": {1: {"vector": VECTOR, "positions": [0]}}},
        "source.vectors.post_block.1.positions: positions belong to a request",
    ),
    ({"ops": {}}, "source.ops: must be a list of operations"),
    ({"ops": [{"op": "mul"}]}, "source.ops[0].op: unknown operation 'mul'"),
    (
        {"ops": [op("normalize"), op("normalize", positions="all")]},
        "source.ops[1]: positions belong to a request",
    ),
    ({"ops": [op("replace", values=[])]}, "source.ops[0]: positions belong to a request"),
    ({"ops": [op("ablate", direction=[0.0] * HIDDEN)]}, "source.ops[0].direction: is zero"),
    ({"ops": [op("normalize")] * 5}, "source.ops[4]: comes to 5 ops at"),
    ({"post_block": {1: [1e39] * HIDDEN}}, "source: overflows float32"),
    (
        {"vectors": {"pre_attn": {0: [2e38] * 4}}, "decode_vectors": {"pre_attn": {0: [2e38] * 4}}},
        "source: overflows float32",
    ),
]


@pytest.mark.parametrize(("value", "message"), ERRORS)
def test_errors(value: Any, message: str) -> None:
    with pytest.raises(InterventionError) as caught:
        parse(value)
    assert str(caught.value).startswith(message)


FIELD_NAMES = st.sampled_from(["vectors", "prefill_vectors", "decode_vectors"])
OPS = st.lists(
    st.dictionaries(
        st.sampled_from(["op", "point", "layers", "direction", "lo", "gate", "positions"]),
        st.one_of(st.sampled_from(["clamp", "pre_attn", 1, VECTOR]), JUNK),
        max_size=5,
    )
)
MODULES = st.one_of(
    JUNK,
    st.dictionaries(FIELD_NAMES, STEERING, min_size=1),
    st.fixed_dictionaries({"ops": st.one_of(JUNK, OPS)}, optional={"vectors": STEERING}),
)


@given(MODULES)
def test_whatever_is_given_a_module_or_a_named_error(value: Any) -> None:
    try:
        module = parse(value)
    except InterventionError as error:
        assert str(error).startswith("source")
        assert len(str(error)) < 1000
    else:
        assert module.tiers or module.ops


def test_a_family_that_the_engine_does_not_have() -> None:
    value = {"ops": [op("normalize")]}
    assert parse(value).ops
    with pytest.raises(InterventionError, match=r"source\.ops\[0\]\.op: the engine was started"):
        parse(value, SteeringConfig(enable_steering=True))


@pytest.mark.parametrize("name", ["calm", "a", "7", "Calm-1.5_b", "x" * 128])
def test_names(name: str) -> None:
    assert need_module_name(name, "name") == name
    assert parse_module_args([f"{name}=/a/b=c.npz"]) == {name: "/a/b=c.npz"}


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "a/b", "a b", "a\n", "é", "x" * 129, "../a", None, 3, ["a"]]
)
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(InterventionError, match=r"name: .* is not a name: up to 128 letters"):
        need_module_name(name, "name")


def test_module_args() -> None:
    assert parse_module_args([]) == {}
    args = ["calm=a.gguf", '{"name": "warm", "path": "b c.npz"}', ' {"path": "=", "name": "x"}']
    assert parse_module_args(args) == {"calm": "a.gguf", "warm": "b c.npz", "x": "="}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["calm"], "steering_modules[0]: has no path: give name=path, got 'calm'"),
        (["calm="], "steering_modules[0]: has no path"),
        (["=x"], "steering_modules[0]: '' is not a name"),
        (["a=x", "a/b=x"], "steering_modules[1]: 'a/b' is not a name"),
        (["a=x", '{"name": "a", "path": "y"}'], "steering_modules[1]: names a twice"),
        (["{}"], "steering_modules[0]: must be name=path or {"),
        (["{"], "steering_modules[0]: must be name=path or {"),
        (['{"name": "a"}'], "steering_modules[0]: must be name=path or {"),
        (['{"name": "a", "path": 3}'], "steering_modules[0].path: must be a string, got 3"),
        (['{"name": 1, "path": "x"}'], "steering_modules[0]: 1 is not a name"),
        (['{"name": "a", "path": ""}'], "steering_modules[0]: has no path"),
    ],
)
def test_module_args_that_are_none(args: list[str], message: str) -> None:
    with pytest.raises(InterventionError) as caught:
        parse_module_args(args)
    assert str(caught.value).startswith(message)
