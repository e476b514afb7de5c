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

from tests.plans import BF16, GAPS, HIDDEN, POINTS, SHAPE, VECTOR, array, config_of, plan_of
from vllm.v1.interventions import UNSTEERED, Content, Plan, TapShape
from vllm.v1.sites import need_layers
from vllm.v1.steering.plan import compose, rows_of
from vllm.v1.steering.spec import parse_vectors

NUMBERS = st.floats(-1e3, 1e3)
ROW = hnp.arrays(np.float64, HIDDEN, elements=NUMBERS)
SITES = st.sampled_from([(p, n) for n in sorted(SHAPE.points) for p in SHAPE.points[n]])
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
    parsed = parse_vectors({"post_block": {1: value}}, "steering_vectors", SHAPE)
    assert list(parsed) == [("post_block", 1)]
    assert parsed["post_block", 1].dtype == np.float64
    assert parsed["post_block", 1].tolist() == VECTOR


def test_scale_is_applied() -> None:
    entry = {"vector": VECTOR, "scale": -2.5}
    parsed = parse_vectors({"pre_attn": {"0-1": entry}}, "steering_vectors", SHAPE)
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


@given(st.lists(TIER, max_size=4))
def test_composition_is_the_sum_in_the_models_dtype(tiers: list[dict[Any, np.ndarray]]) -> None:
    composed = compose(tiers, "path", BF16)
    total: dict[Any, np.ndarray] = {}
    for tier in tiers:
        for site, row in tier.items():
            total[site] = total.get(site, np.zeros(HIDDEN)) + row
    if not total:
        assert composed is None
        return
    assert composed is not None
    # In the order of the stream, so that equal sums have equal bytes.
    assert composed.sites == sorted(total, key=lambda site: (site[1], POINTS.index(site[0])))
    rows = rows_of(composed, BF16)
    assert rows.dtype == torch.bfloat16
    expected = torch.from_numpy(np.stack([total[s] for s in composed.sites])).to(torch.bfloat16)
    assert torch.equal(rows, expected)


def test_summed_before_it_is_rounded() -> None:
    site = ("pre_attn", 0)
    tiers = [{site: array(1.0, 0, 0, 0)}, {site: array(2.0**-9, 0, 0, 0)}]
    composed = compose([*tiers, tiers[1], tiers[1], tiers[1]], "path", BF16)
    assert composed is not None
    # bfloat16 has 8 bits: each small term alone would be lost, together they are one step.
    assert rows_of(composed, BF16)[0, 0].item() == 1.0 + 2.0**-7


def _content(vector: list[float], shape: TapShape = SHAPE, site: str = "pre_attn") -> Content:
    composed = compose([{(site, 0): np.array(vector)}], "path", shape)
    assert composed is not None
    return composed


def test_digest_is_of_everything_that_matters_and_nothing_else() -> None:
    digest = _content(VECTOR).digest
    assert digest == _content(list(VECTOR)).digest
    others = {
        _content([*VECTOR[:-1], VECTOR[-1] + 1e-6]).digest,
        _content(VECTOR, site="post_attn").digest,
        _content(VECTOR, BF16).digest,
        _content([-x for x in VECTOR]).digest,
        UNSTEERED,
    }
    assert len(others) == 5
    assert digest not in others


def test_tiers_by_phase() -> None:
    plan = plan_of(
        steering_vectors={"pre_attn": {0: VECTOR}},
        prefill_steering_vectors={"pre_attn": {0: VECTOR, 1: VECTOR}},
        decode_steering_vectors={"pre_attn": {0: {"vector": VECTOR, "scale": -1.0}}},
    )
    assert plan is not None
    contents = {c.digest: c for c in plan.contents}
    prefill, decode = contents[plan.prefill], contents[plan.decode]
    assert prefill.sites == [("pre_attn", 0), ("pre_attn", 1)]
    assert rows_of(prefill, SHAPE).tolist() == [[2 * x for x in VECTOR], VECTOR]
    # v and -v: zeros through a real slot, not no steering.
    assert decode.sites == [("pre_attn", 0)]
    assert rows_of(decode, SHAPE).tolist() == [[0.0] * HIDDEN]
    assert decode.digest != UNSTEERED


def digests(**fields: Any) -> tuple[Plan, int]:
    plan = plan_of(**fields)
    assert plan is not None
    return plan, len(plan.contents)


def test_slots_a_request_needs() -> None:
    vectors = {"pre_attn": {0: VECTOR}}
    other = {"pre_attn": {1: VECTOR}}
    plan, needed = digests(steering_vectors=vectors)
    assert needed == 1
    assert plan.prefill == plan.decode != UNSTEERED
    plan, needed = digests(prefill_steering_vectors=vectors, decode_steering_vectors=vectors)
    assert needed == 1
    assert plan.prefill == plan.decode
    plan, needed = digests(prefill_steering_vectors=vectors, decode_steering_vectors=other)
    assert needed == 2
    assert plan.prefill != plan.decode
    plan, needed = digests(decode_steering_vectors=vectors)
    assert (needed, plan.prefill) == (1, UNSTEERED)
    assert plan.decode != UNSTEERED
    plan, needed = digests(prefill_steering_vectors=vectors)
    assert (needed, plan.decode) == (1, UNSTEERED)
    plan, needed = digests(steering_vectors={})
    assert (needed, plan.prefill, plan.decode) == (0, UNSTEERED, UNSTEERED)


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
