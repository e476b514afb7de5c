# SPDX-License-Identifier: Apache-2.0
"""Segments say at every position what a loop over the positions says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HIDDEN, SHAPE, config_of, segment_at, steering_of, sum_at
from vllm.config.points import STREAM_POINTS
from vllm.config.steering import FAMILIES
from vllm.v1.interventions.plan import UNSTEERED, Plan, Site, SteeringPlan
from vllm.v1.interventions.scheduler.module_sets import ModuleSets
from vllm.v1.interventions.terms import Term, make_term
from vllm.v1.steering.modules import Module, parse_module
from vllm.v1.steering_formula import Scalars

pytestmark = pytest.mark.quick

CONFIG = config_of(max_steering_configs=64, max_steering_ops=8, steering_families=list(FAMILIES))
MAX_TOKENS = 6
TOLERANCE = 1e-6
"""Relative to the sum of the sizes of what was added: a float32 rounding of each vector set."""

SITES = st.sampled_from([(p, n) for n in (0, 1, 3) for p in STREAM_POINTS])
VECTORS = st.lists(st.floats(-100, 100, width=32), min_size=HIDDEN, max_size=HIDDEN)
SCALES = st.sampled_from([-2.0, 0.0, 0.3, 1.0, 7.0])
Given = list[tuple[Site, list[float], float]]
TIER = st.lists(st.tuples(SITES, VECTORS, SCALES), max_size=3, unique_by=lambda t: t[0])


def tier(entries: Given, positions: Any = None) -> dict[str, Any]:
    """As a field of `SamplingParams`."""
    value: dict[str, Any] = {}
    for (point, layer), vector, scale in entries:
        entry = {"vector": vector, "scale": scale}
        if positions is not None:
            entry["positions"] = positions
        value.setdefault(point, {})[layer] = entry
    return value


class Naive:
    """What acts at each position, one by one."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.end = prompt, prompt + MAX_TOKENS - 1
        self.sums: list[dict[Site, np.ndarray]] = [{} for _ in range(self.end)]
        self.sizes: list[dict[Site, np.ndarray]] = [{} for _ in range(self.end)]

    def acts(self, tier: str, position: int) -> bool:
        return tier == "base" or (tier == "prefill") == (position < self.prompt)

    def add(self, entries: Given, positions: list[int], scale: float = 1.0) -> None:
        for site, vector, own in entries:
            row = scale * own * np.array(vector, dtype=np.float64)
            for position in positions:
                for total, value in ((self.sums, row), (self.sizes, np.abs(row))):
                    at = total[position]
                    at[site] = at.get(site, np.zeros(HIDDEN)) + value

    def tier(self, tier: str, entries: Given, scale: float = 1.0) -> None:
        self.add(entries, [p for p in range(self.end) if self.acts(tier, p)], scale)

    def check(self, plan: SteeringPlan) -> None:
        for position in range(self.end):
            got, want = sum_at(plan, position), self.sums[position]
            assert got.keys() == want.keys()
            for site, row in want.items():
                slack = TOLERANCE * (1 + self.sizes[position][site])
                assert (np.abs(got[site] - row) <= slack).all(), (position, site)


FIELDS = {
    "base": "steering_vectors",
    "prefill": "prefill_steering_vectors",
    "decode": "decode_steering_vectors",
}


@given(st.data(), st.integers(1, 8))
def test_the_sum_at_every_position(data: st.DataObject, prompt: int) -> None:
    naive, ask = Naive(prompt), dict[str, Any]()
    for name, field in FIELDS.items():
        everywhere = data.draw(TIER, name)
        # Each site once in a field; here those with positions are others than those without.
        limited = [e for e in data.draw(TIER) if e[0] not in {s for s, _, _ in everywhere}]
        phase = [p for p in range(naive.end) if naive.acts(name, p)]
        positions = sorted(data.draw(st.sets(st.sampled_from(phase), min_size=1)))
        value = tier(everywhere)
        for point, layers in tier(limited, positions).items():
            value.setdefault(point, {}).update(layers)
        ask[field] = value
        naive.tier(name, everywhere)
        naive.add(limited, positions)
    modules: dict[str, Module] = {}
    named: list[Any] = []
    for i in range(data.draw(st.integers(0, 2))):
        tiers = {name: data.draw(TIER) for name in FIELDS}
        if not any(tiers.values()):
            continue
        given = {
            field.removeprefix("steering_").replace("_steering", ""): tier(tiers[name])
            for name, field in FIELDS.items()
        }
        modules[f"m{i}"] = parse_module(given, "module", SHAPE, CONFIG.steering_config)
        scale = data.draw(SCALES)
        named.append((f"m{i}", scale))
        for name in FIELDS:
            naive.tier(name, tiers[name], scale)
    adds = data.draw(st.lists(st.tuples(TIER, st.booleans()), max_size=2))
    ops: list[dict[str, Any]] = []
    for entries, everywhere_too in adds:
        where = list(range(naive.end)) if everywhere_too else [0, naive.end - 1]
        for (point, layer), vector, scale in entries:
            op = {"op": "add", "point": point, "layers": [layer], "vector": vector, "scale": scale}
            ops.append(op if everywhere_too else {**op, "positions": where})
        naive.add(entries, where)
    plan = steering_of(
        config=CONFIG,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        modules=modules,
        steering_modules=named,
        steering=ops,
        **ask,
    )
    naive.check(with_modules(plan, modules))
    assert not plan.programs, "plain additions need no ops"
    check_segments(plan, prompt)


def with_modules(plan: SteeringPlan, modules: dict[str, Module]) -> SteeringPlan:
    """As the engine core completes it."""
    filled = ModuleSets(modules.values()).fill(Plan(steering=plan))
    assert filled is not None
    assert filled.steering is not None
    return filled.steering


def check_segments(plan: SteeringPlan, prompt: int) -> None:
    firsts = [s.first for s in plan.segments]
    assert firsts == sorted(set(firsts))
    assert firsts[0] == 0
    assert prompt in firsts
    for one, other in zip(plan.segments, plan.segments[1:], strict=False):
        different = (one.vector_sum, one.program) != (other.vector_sum, other.program)
        assert different or other.first == prompt, "a needless segment"


def test_equal_sums_are_one_content_and_different_ones_are_not() -> None:
    v, half = [1.0, 2.0, 3.0, 4.0], [0.5, 1.0, 1.5, 2.0]
    site = ("pre_attn", 0)
    whole = steering_of(steering_vectors=tier([(site, v, 1.0)]))
    sets = steering_of(
        steering_vectors=tier([(site, half, 1.0)]),
        prefill_steering_vectors=tier([(site, half, 1.0)]),
    )
    assert whole.segments[0].vector_sum == sets.segments[0].vector_sum
    assert whole.segments[1].vector_sum != sets.segments[1].vector_sum
    moved = steering_of(steering_vectors=tier([(("pre_attn", 1), v, 1.0)]))
    assert moved.segments[0].vector_sum != whole.segments[0].vector_sum


def test_the_order_of_modules_is_no_difference_and_the_scale_is() -> None:
    modules = {
        name: parse_module(tier([(("pre_attn", 0), row, 1.0)]), name, SHAPE, CONFIG.steering_config)
        for name, row in (("a", [1.0, 0, 0, 0]), ("b", [0, 1.0, 0, 0]))
    }

    def vector_sum(*names: Any) -> str:
        return steering_of(steering_modules=list(names), modules=modules).segments[0].vector_sum

    assert vector_sum("a", ("b", 2)) == vector_sum(("b", 2.0), ("a", 1))
    assert vector_sum("a", ("b", 2)) != vector_sum("b", ("a", 2))
    assert vector_sum("a", "a") != vector_sum("a") != vector_sum(("a", 2))


# -- programs -----------------------------------------------------------------------------------


def unit(i: int) -> list[float]:
    return [float(i == j) for j in range(HIDDEN)]


def pinned(value: float, probe: int | None = None, frozen: bool = False) -> Term:
    """What an op of `_pin` becomes."""
    scalars: dict[str, float] = {"strength": 1.0, "lo": value, "hi": value}
    packed = b""
    if probe is not None:
        scalars |= {"threshold": 0.5, "sharpness": 2.0, "frozen": float(frozen)}
        packed = np.array(unit(probe), np.float32).tobytes()
    return make_term(Scalars(**scalars), np.array(unit(0), np.float32).tobytes(), packed)


OPS = st.fixed_dictionaries(
    {
        "value": st.integers(0, 3).map(float),
        "layers": st.sets(st.sampled_from([0, 1, 3]), min_size=1).map(sorted),
        "kind": st.sampled_from(["plain", "row", "last_prompt", "replace"]),
        "places": st.one_of(st.none(), st.sets(st.integers(0, 20), min_size=1)),
    }
)


@given(st.lists(OPS, min_size=1, max_size=4), st.integers(1, 8))
def test_the_program_at_every_position(asked: list[dict[str, Any]], prompt: int) -> None:
    end = prompt + MAX_TOKENS - 1
    ops: list[dict[str, Any]] = []
    acts: list[dict[int, Term]] = []
    frozen: list[bool] = []
    for ask in asked:
        kind, places = ask["kind"], ask["places"]
        least = prompt - 1 if kind == "last_prompt" else 0
        where = sorted({least + p % (end - least) for p in places}) if places else None
        op = {"op": "pin", "point": "pre_attn", "layers": ask["layers"], "direction": unit(0)}
        op["value"] = ask["value"]
        gate = {"probe": unit(1), "threshold": 0.5, "sharpness": 2.0, "when": kind}
        if kind == "replace":
            where = where or [0]
            # Given backwards: each row goes with its position, not with the place in the list.
            values = [[p + ask["value"]] * HIDDEN for p in reversed(where)]
            op = {"op": "replace", "point": "pre_attn", "layers": ask["layers"], "values": values}
            op["positions"] = where[::-1]
            row = {p: np.full(HIDDEN, p + ask["value"], np.float32).tobytes() for p in where}
            acts.append({p: make_term(Scalars(1.0, replace=1.0), row[p]) for p in where})
        else:
            if where is not None:
                op["positions"] = where
            if kind != "plain":
                op["gate"] = gate
            term = pinned(ask["value"], None if kind == "plain" else 1, kind == "last_prompt")
            acts.append(dict.fromkeys(where or range(least, end), term))
        frozen.append(kind == "last_prompt")
        ops.append(op)
    plan = steering_of(config=CONFIG, prompt=prompt, max_tokens=MAX_TOKENS, steering=ops)
    check_segments(plan, prompt)
    programs = {p.digest: p for p in plan.programs}
    terms = {t.digest: t for t in plan.terms}
    for position in range(end):
        deciding = any(frozen) and position == prompt - 1
        want: dict[Site, list[str]] = {}
        for op, at, decided in zip(ops, acts, frozen, strict=True):
            for layer in op["layers"]:
                # An op keeps its column wherever it acts, and has none where it never does.
                if position in at:
                    column = at[position].digest
                elif deciding and decided:
                    column = next(iter(at.values())).deciding().digest
                else:
                    column = UNSTEERED
                want.setdefault(("pre_attn", layer), []).append(column)
        digest = segment_at(plan, position).program
        if not any(any(columns) for columns in want.values()):
            assert digest == UNSTEERED
            continue
        program = programs[digest]
        assert {s: [program.terms[i] for i in ops] for s, ops in plan.op_sites} == want
        assert program.decides == deciding
        assert all(d in terms for columns in want.values() for d in columns if d)
    assert sum(p.decides for p in plan.programs) == any(frozen)


def test_a_gate_decided_once_has_a_decider_where_nothing_else_acts() -> None:
    gate = {"probe": unit(1), "threshold": 0.5, "sharpness": 2.0, "when": "last_prompt"}
    op = {"op": "pin", "point": "pre_attn", "layers": [0], "direction": unit(0), "value": 1.0}
    plan = steering_of(
        config=CONFIG, prompt=5, steering=[{**op, "gate": gate, "positions": "all_generated"}]
    )
    assert [s.first for s in plan.segments] == [0, 4, 5, 8]  # at 8 no row is left
    before, decider, after, past = (s.program for s in plan.segments)
    assert before == past == UNSTEERED
    programs = {p.digest: p for p in plan.programs}
    assert programs[decider].decides
    assert not programs[after].decides
    terms = {t.digest: t for t in plan.terms}
    [kept], [acting] = programs[decider].terms, programs[after].terms
    assert terms[kept].probe == terms[acting].probe
    assert not np.frombuffer(terms[kept].vector, np.float32).any()
    assert terms[kept].scalars.strength == 0
    assert terms[acting] == pinned(1.0, 1, True)


def test_programs_travel_once_and_not_for_each_site() -> None:
    """A client chooses how many there are: positions in 2^n combinations, at every site."""
    turns = [[p for p in range(64) if p >> bit & 1] for bit in range(6)]

    def encoded(points: list[str], layers: Any) -> tuple[int, SteeringPlan]:
        pin = {"op": "pin", "point": points, "layers": layers, "value": 1.0}
        asked = [
            {**pin, "direction": unit(i % HIDDEN), "positions": p} for i, p in enumerate(turns)
        ]
        config = config_of(
            steering_families=list(FAMILIES), max_steering_rows=80, max_steering_ops=6
        )
        plan = steering_of(config=config, prompt=64, steering=asked)
        return len(msgspec.msgpack.encode(plan)), plan

    (few_bytes, few), (many_bytes, many) = (
        encoded(["pre_attn"], [0]), encoded(list(STREAM_POINTS), "all"),
    )  # fmt: skip
    assert len(few.programs) == len(many.programs) == 63
    assert len(few.op_sites) == 1 < len(many.op_sites)
    assert {p.digest for p in few.programs}.isdisjoint(p.digest for p in many.programs)
    assert many_bytes < few_bytes + 100 * len(many.op_sites)
    assert few_bytes > 63 * 100, "programs are most of it"


def test_an_addition_after_another_op_keeps_its_place() -> None:
    pin = {"op": "pin", "point": "pre_attn", "layers": [0], "direction": unit(0), "value": 1.0}
    add = {"op": "add", "point": "pre_attn", "layers": [0], "vector": unit(2)}
    first = steering_of(config=CONFIG, steering=[add, pin])
    assert len(first.sums) == 1
    assert [len(p.terms) for p in first.programs] == [1]
    later = steering_of(config=CONFIG, steering=[pin, add])
    assert later.sums == []
    assert [len(p.terms) for p in later.programs] == [2]
    gated = {**add, "gate": {"probe": unit(1), "threshold": 0.0, "sharpness": 1.0}}
    assert steering_of(config=CONFIG, steering=[gated]).sums == []


@pytest.mark.parametrize("families", [["add"], list(FAMILIES)], ids=["sums", "rows"])
def test_an_addition_with_a_vector_for_each_position(families: list[str]) -> None:
    """Where there is a table of operations it takes rows of it, else a sum for each."""
    config = config_of(steering_families=families, max_steering_rows=3, max_steering_configs=3)
    rows = np.arange(12.0).reshape(3, HIDDEN) + 1
    op = {"op": "add", "point": "pre_attn", "layers": [0], "scale": 2.0}
    asked = [{**op, "values": rows, "positions": [6, 0, 3]}]
    plan = steering_of(config=config, steering=asked)
    terms = {term.digest: term for term in plan.terms}
    for position in range(8):
        found = sum_at(plan, position).get(("pre_attn", 0), np.zeros(HIDDEN))
        program = segment_at(plan, position).program
        if program != UNSTEERED:
            [made] = [p for p in plan.programs if p.digest == program]
            term = terms[made.terms[0]]
            found = found + term.scalars.constant * np.frombuffer(term.vector, np.float32)
        want = {6: 2 * rows[0], 0: 2 * rows[1], 3: 2 * rows[2]}.get(position, np.zeros(HIDDEN))
        assert found.tolist() == want.tolist()
    assert len(plan.sums) == (3 if families == ["add"] else 0)
    few = config_of(steering_families=families, max_steering_rows=2, max_steering_configs=2)
    with pytest.raises(ValueError, match=r"the request needs 3 (rows|slots)"):
        steering_of(config=few, steering=asked)


def test_rows_of_a_part_are_a_view_of_what_travels() -> None:
    plan = steering_of(steering_vectors=tier([(("pre_attn", 0), [1.0, 2.0, 3.0, 4.0], 2.0)]))
    [vector_set] = plan.sets
    [row] = vector_set.rows
    assert row.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert row.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1.0
