# SPDX-License-Identifier: Apache-2.0
"""Heads that are steered, from a request to the rows a tap hands on, without an engine: each worker
of two has half of the heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import HEADS, config_of, segment_at, steering_of
from vllm.config.points import STEERING_POINTS
from vllm.config.steering import FAMILIES
from vllm.model_executor.layers.attention_taps import HeadSteering, HeadTaps, UnboundHeadTaps
from vllm.v1.interventions.messages import (
    FIRST_SLOT,
    GlobalTiers,
    StepInterventions,
    num_table_rows,
    table_row,
)
from vllm.v1.interventions.plan import Site, SteeringPlan, VectorSum
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.vectors import vector_set_of
from vllm.v1.interventions.worker.tables.sums import SteeringTable

pytestmark = pytest.mark.quick

CONFIG = config_of(HEADS, steering_points=list(STEERING_POINTS), steering_families=list(FAMILIES))
SITES: list[Site] = [("pre_attn", 1), ("z", 1), ("z", 3), ("post_block", 1)]
SIZES = {1: (4, 3), 3: (4, 4)}
"""Layer -> heads and their width."""


def tables(plan: SteeringPlan, tiers: GlobalTiers | None = None) -> list[SteeringTable]:
    """Those of two workers, after the request's sum at position 0 was placed in the first slot."""
    digest = segment_at(plan, 0).vector_sum
    [placed] = [c for c in plan.sums if c.digest == digest] or [VectorSum("", [])]
    made = []
    for rank in range(2):
        table = SteeringTable(
            SITES, num_table_rows(2), HEADS, torch.device("cpu"), True, rank, ranks=2
        )
        table.take(StepInterventions(1, new_sets=plan.sets, tiers=tiers))
        table.write([(FIRST_SLOT, (placed, True))])
        made.append(table)
    return made


def steered(made: list[SteeringTable], site: Site, rows: torch.Tensor) -> torch.Tensor:
    """`rows` [2, heads * width] as both workers' taps hand them on; only the second is steered."""
    slots = torch.tensor([0, table_row(FIRST_SLOT, generated=False)], dtype=torch.int32)
    parts = [
        HeadTaps(None, None, None, None, HeadSteering(t.at[site], t.factors[site], slots)).leave(h)
        for t, h in zip(made, rows.chunk(2, dim=1), strict=True)
    ]
    return torch.cat(parts, dim=1)


NUMBER = st.integers(-3, 3).map(float)


@st.composite
def operations(draw: st.DrawFn) -> list[dict[str, Any]]:
    ops = []
    for _ in range(draw(st.integers(1, 5))):
        layer = draw(st.sampled_from(list(SIZES)))
        count, width = SIZES[layer]
        whole = draw(st.booleans())
        heads = draw(st.sets(st.integers(0, count - 1), min_size=1))
        op: dict[str, Any] = {"op": "scale", "point": "z", "factor": draw(NUMBER)}
        if draw(st.booleans()):
            length = count * width if whole else width
            vector = draw(st.lists(NUMBER, min_size=length, max_size=length))
            op = {"op": "add", "point": "z", "vector": vector, "scale": draw(NUMBER)}
        ops.append(op | ({"layers": layer} if whole else {"heads": {layer: sorted(heads)}}))
    return ops


@settings(max_examples=60, deadline=None)
@given(operations(), st.booleans(), st.booleans())
def test_operations_in_their_order(
    ops: list[dict[str, Any]], vectors: bool, globals_: bool
) -> None:
    """After all vectors, those of the global tiers too; a token of nobody keeps its bits."""
    added = {n: np.arange(float(h * w)) for n, (h, w) in SIZES.items()} if vectors else {}
    asked = {"steering_vectors": {"z": added, "pre_attn": {1: [1.0] * 4}}} if vectors else {}
    plan = steering_of(config=CONFIG, steering=ops, **asked)
    base = {("z", 1): np.full(12, 2.0), ("post_block", 1): np.full(4, 5.0)} if globals_ else {}
    tiers = GlobalTiers(1, {"base": vector_set_of(base)}) if base else None
    made = tables(plan, tiers)
    for layer, (count, width) in SIZES.items():
        rows = torch.arange(2.0 * count * width).reshape(2, -1) - 7
        want = rows[1].double().numpy() + added.get(layer, 0.0) + base.get(("z", layer), 0.0)
        want = want.reshape(count, width)
        for op in ops:
            heads = op.get("heads", {op.get("layers"): list(range(count))}).get(layer)
            if heads is None:
                continue
            if op["op"] == "scale":
                want[heads] *= op["factor"]
            else:
                want[heads] += op["scale"] * np.reshape(op["vector"], (-1, width))
        got = steered(made, ("z", layer), rows)
        assert torch.equal(got[0], rows[0])
        np.testing.assert_allclose(got[1].double(), want.flatten(), rtol=1e-6)
    for table in made:
        row = table.at["pre_attn", 1][table_row(FIRST_SLOT, generated=True)]
        assert row.tolist() == [float(vectors)] * 4
        table.forget()
        assert torch.equal(table.factors["z", 3], torch.ones(num_table_rows(2), 8))


def test_a_slot_that_is_used_again() -> None:
    """Factors of the one that had it are gone."""
    plan = steering_of(
        config=CONFIG, steering=[{"op": "scale", "point": "z", "layers": 1, "factor": 0.0}]
    )
    [table, _] = tables(plan)
    row = table_row(FIRST_SLOT, generated=False)
    assert not table.factors["z", 1][row].any()
    table.write([(FIRST_SLOT, (VectorSum("", []), True))])
    assert table.factors["z", 1][row].all()


def test_a_head_left_out_may_be_infinite() -> None:
    slots = torch.tensor([0, 1], dtype=torch.int32)
    table, factors = torch.zeros(2, 4, dtype=torch.bfloat16), torch.ones(2, 4)
    factors[1, :2] = 0.0
    rows = torch.full((2, 2, 2), torch.inf, dtype=torch.bfloat16)
    out = HeadSteering(table, factors, slots).steer(rows)
    assert out.dtype == rows.dtype and torch.equal(out[0], rows[0])
    assert out[1].tolist() == [[0.0, 0.0], [torch.inf, torch.inf]]


def test_without_factors() -> None:
    slots = torch.tensor([0, 1], dtype=torch.int32)
    table = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    rows = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    assert HeadSteering(table, None, slots).steer(rows).tolist() == [[3.0, 4.0], [4.0, 2.0]]
    assert UnboundHeadTaps().leave(rows) is rows


def test_tables_without_heads_are_as_before() -> None:
    wide = TapShape(4, "float32", {1: LayerShape(("pre_attn",), {"z": (4, 3)})})
    table = SteeringTable([("pre_attn", 1)], 4, wide, torch.device("cpu"), scales=True)
    assert table.at["pre_attn", 1].shape == (4, 4) and table.at["pre_attn", 1].is_contiguous()
    assert not table.factors
