# SPDX-License-Identifier: Apache-2.0
"""From what a user writes about steering to the vectors that are added."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.plans import (
    GAPS,
    HIDDEN,
    SHAPE,
    VECTOR,
    array,
    config_of,
    plan_of,
    segment_at,
    steering_of,
    sum_at,
)
from vllm.config.points import STREAM_POINTS
from vllm.v1.interventions.plan import UNSTEERED, VectorSet
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_layers
from vllm.v1.interventions.vectors import (
    Vectors,
    add_up,
    pack_unit,
    parse_vectors,
    unit,
    vector_set_of,
)
from vllm.v1.steering.modules import no_positions

pytestmark = pytest.mark.quick

NUMBERS = st.floats(-1e3, 1e3)
ROW = hnp.arrays(np.float64, HIDDEN, elements=NUMBERS)
SITES = st.sampled_from([(p, n) for n, layer in SHAPE.layers.items() for p in layer.points])
TIER = st.dictionaries(SITES, ROW, max_size=4)


def layers(value: Any, point: str = "post_block", shape: TapShape = SHAPE) -> list[int]:
    return need_layers(value, point, "path", shape)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, [1]),
        ("1", [1]),
        ("1-3", [1, 2, 3]),
        ("2-2", [2]),
        ("all", [0, 1, 2, 3]),
        ([3, "0-1"], [3, 0, 1]),
        ((0, "2"), [0, 2]),
    ],
)
def test_forms_of_layers(value: Any, expected: list[int]) -> None:
    assert layers(value) == expected


def test_all_means_the_layers_that_have_the_point() -> None:
    assert layers("all", "post_attn") == [0, 1, 3]
    assert layers("all", "pre_attn") == [0, 1, 2, 3]


def test_layers_without_taps_are_left_out_of_all_and_refused_in_ranges() -> None:
    assert layers("all", "pre_attn", GAPS) == [0, 2, 5]
    assert layers([0, 2], "pre_attn", GAPS) == [0, 2]
    with pytest.raises(ValueError, match="layer 1 is out of range"):
        layers("0-2", "pre_attn", GAPS)


def everywhere(value: Any) -> Vectors:
    """What is parsed, all of it without positions."""
    [(vectors, positions)] = parse_vectors(value, "steering_vectors", SHAPE, no_positions)
    assert positions is None
    return vectors


@pytest.mark.parametrize(
    "value",
    [
        VECTOR,
        np.array(VECTOR),
        np.array(VECTOR, dtype=np.float32),
        np.array(VECTOR, dtype=np.float16),
        torch.tensor(VECTOR),
        torch.tensor(VECTOR, dtype=torch.bfloat16),
        torch.tensor(VECTOR, dtype=torch.float64, requires_grad=True),
        torch.tensor([*VECTOR, *VECTOR])[:HIDDEN],
        {"vector": VECTOR},
        {"vector": [x / 2 for x in VECTOR], "scale": 2},
        {"vector": torch.tensor(VECTOR), "scale": 1.0},
    ],
)
def test_forms_of_a_vector_say_the_same(value: Any) -> None:
    parsed = everywhere({"post_block": {1: value}})
    assert list(parsed) == [("post_block", 1)]
    assert parsed["post_block", 1].dtype == np.float64
    assert parsed["post_block", 1].tolist() == VECTOR


def test_scale_is_applied() -> None:
    entry = {"vector": VECTOR, "scale": -2.5}
    parsed = everywhere({"pre_attn": {"0-1": entry}})
    assert sorted(parsed) == [("pre_attn", 0), ("pre_attn", 1)]
    assert parsed["pre_attn", 1].tolist() == [-2.5 * x for x in VECTOR]


def test_the_users_objects_are_left_alone() -> None:
    vector, tensor = np.array(VECTOR), torch.tensor(VECTOR)
    fields = {"post_block": {0: {"vector": vector, "scale": 3.0}, 1: tensor}}
    plan = plan_of(steering_vectors=fields, decode_steering_vectors=fields)
    assert plan is not None
    assert vector.tolist() == VECTOR
    assert tensor.tolist() == VECTOR
    assert fields["post_block"][0]["scale"] == 3.0  # type: ignore[index]


def test_vectors_with_positions_are_apart() -> None:
    asked: list[tuple[Any, str]] = []

    def select(value: Any, path: str) -> Positions:
        asked.append((value, path))
        return Positions.of(value)

    some = {"vector": VECTOR, "positions": [1, 3]}
    value = {"pre_attn": {0: VECTOR, "1-2": some}, "post_block": {0: {**some, "scale": 2.0}}}
    plain, first, second = parse_vectors(value, "steering_vectors", SHAPE, select)
    assert asked == [
        ([1, 3], "steering_vectors.pre_attn.1-2.positions"),
        ([1, 3], "steering_vectors.post_block.0.positions"),
    ]
    assert (list(plain[0]), plain[1]) == ([("pre_attn", 0)], None)
    assert (list(first[0]), first[1]) == (
        [("pre_attn", 1), ("pre_attn", 2)],
        Positions.of([1, 3]),
    )
    assert second[0]["post_block", 0].tolist() == [2 * x for x in VECTOR]


@given(st.lists(TIER, min_size=1, max_size=4).filter(any))
def test_a_part_is_the_sum_rounded_once(tiers: list[Vectors]) -> None:
    vector_set = vector_set_of(add_up(tiers))
    total: Vectors = {}
    for tier in tiers:
        for site, row in tier.items():
            total[site] = total.get(site, np.zeros(HIDDEN)) + row
    # In the order of the stream, so that equal sums have equal bytes.
    assert vector_set.sites == sorted(
        total, key=lambda site: (site[1], STREAM_POINTS.index(site[0]))
    )
    rows = np.stack(vector_set.rows)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, np.stack([total[s] for s in vector_set.sites]).astype(np.float32))


def test_summed_before_it_is_rounded() -> None:
    site = ("pre_attn", 0)
    small = {site: array(2.0**-25, 0, 0, 0)}
    vector_set = vector_set_of(add_up([{site: array(1.0, 0, 0, 0)}, *[small] * 4]))
    # float32 has 24 bits: each small term alone would be lost, together they are one step.
    assert vector_set.rows[0][0] == 1.0 + 2.0**-23
    assert np.float32(1.0) + np.float32(2.0**-25) == 1.0


def _part(vector: list[float], site: str = "pre_attn") -> VectorSet:
    return vector_set_of({(site, 0): np.array(vector)})


@pytest.mark.parametrize("size", [1e-300, 1e-12, 1.0, 1e12, 1e300])
def test_a_direction_of_any_size(size: float) -> None:
    """Squares of these overflow or underflow in float64, too."""
    made = unit(np.array([3.0, 0.0, -4.0]) * size)
    assert np.allclose(made, [0.6, 0.0, -0.8], rtol=1e-12, atol=0)
    assert np.frombuffer(pack_unit(made * size, "path"), np.float32).tolist() == [
        np.float32(0.6), 0.0, np.float32(-0.8),
    ]  # fmt: skip


def test_digest_is_of_everything_that_matters_and_nothing_else() -> None:
    digest = _part(VECTOR).digest
    assert digest == _part(list(VECTOR)).digest
    others = {
        _part([*VECTOR[:-1], VECTOR[-1] + 1e-6]).digest,
        _part(VECTOR, site="post_attn").digest,
        _part([*VECTOR, 0.0]).digest,
        _part([-x for x in VECTOR]).digest,
        UNSTEERED,
    }
    assert len(others) == 5
    assert digest not in others


def test_tiers_by_phase() -> None:
    plan = steering_of(
        steering_vectors={"pre_attn": {0: VECTOR}},
        prefill_steering_vectors={"pre_attn": {0: VECTOR, 1: VECTOR}},
        decode_steering_vectors={"pre_attn": {0: {"vector": VECTOR, "scale": -1.0}}},
    )
    for position in (0, 4):
        prefill = sum_at(plan, position)
        assert prefill.keys() == {("pre_attn", 0), ("pre_attn", 1)}
        assert prefill["pre_attn", 0].tolist() == [2 * x for x in VECTOR]
        assert prefill["pre_attn", 1].tolist() == VECTOR
    decode = sum_at(plan, 5)
    # v and -v: zeros through a real slot, not no steering.
    assert decode.keys() == {("pre_attn", 0)}
    assert decode["pre_attn", 0].tolist() == [0.0] * HIDDEN
    assert segment_at(plan, 5).vector_sum != UNSTEERED


def digests(**fields: Any) -> tuple[str, str, int]:
    """(sum of the prompt, of generated positions, slots needed)."""
    plan = steering_of(**fields)
    prefill, decode = plan.segments
    assert (prefill.first, decode.first) == (0, 5)
    assert (prefill.program, decode.program) == (UNSTEERED, UNSTEERED)
    return prefill.vector_sum, decode.vector_sum, len(plan.sums)


def test_slots_a_request_needs() -> None:
    vectors = {"pre_attn": {0: VECTOR}}
    other = {"pre_attn": {1: VECTOR}}
    prefill, decode, needed = digests(steering_vectors=vectors)
    assert needed == 1
    assert prefill == decode != UNSTEERED
    prefill, decode, needed = digests(
        prefill_steering_vectors=vectors, decode_steering_vectors=vectors
    )
    assert needed == 1
    assert prefill == decode
    prefill, decode, needed = digests(
        prefill_steering_vectors=vectors, decode_steering_vectors=other
    )
    assert needed == 2
    assert prefill != decode
    prefill, decode, needed = digests(decode_steering_vectors=vectors)
    assert (needed, prefill) == (1, UNSTEERED)
    assert decode != UNSTEERED
    prefill, decode, needed = digests(prefill_steering_vectors=vectors)
    assert (needed, decode) == (1, UNSTEERED)
    assert prefill != UNSTEERED
    assert digests(steering_vectors={}) == (UNSTEERED, UNSTEERED, 0)


def test_inheriting_is_the_default() -> None:
    vectors = {"pre_attn": {0: VECTOR}}
    assert steering_of(steering_vectors=vectors).inherit
    alone = steering_of(steering_vectors=vectors, steering_inherit_global=False)
    assert not alone.inherit
    assert steering_of(steering_vectors=vectors, steering_inherit_global=True).inherit
    # A request may ask for nothing but to be left out.
    assert steering_of(steering_inherit_global=False).sums == []
    assert not steering_of(steering_inherit_global=False).inherit


def test_steering_points_limit_steering_but_not_capture() -> None:
    config = config_of(steering_points=["post_block"])
    capture = {"inline": {"hooks": {"pre_attn": [0]}}}
    assert plan_of(config=config, capture=capture) is not None
    assert plan_of(config=config, steering_vectors={"post_block": {0: VECTOR}}) is not None
    with pytest.raises(ValueError, match=r"steering_vectors\.pre_attn: .*steering_points"):
        plan_of(config=config, steering_vectors={"pre_attn": {0: VECTOR}})


def test_nothing_asked_is_no_plan() -> None:
    assert plan_of() is None
    assert plan_of(steering_vectors={"pre_attn": {0: VECTOR}}) is not None
