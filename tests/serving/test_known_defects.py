# SPDX-License-Identifier: Apache-2.0
"""Defects that another steering fork had or feared, and the test that shows each is not here.

`DEFECTS` names tests of other files; the first test of this file fails if one of them is gone. What
no other file shows is tested below, without an engine.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from tests import ROOT
from tests.support.plans import (
    HIDDEN,
    SHAPE,
    VECTOR,
    config_of,
    plan_of,
    segment_at,
    steering_of,
    sum_at,
    vector_set,
)
from vllm import SamplingParams
from vllm.v1.interventions.frontend.request.resolve import without_plan_fields
from vllm.v1.interventions.plan import Plan
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.vectors import vector_set_of
from vllm.v1.request import Request
from vllm.v1.steering.modules import Module, parse_module

pytestmark = pytest.mark.quick

TESTS = ROOT / "tests"

DEFECTS: dict[str, list[str]] = {
    # What a point is.
    "a vector at pre_attn is not seen by the block's attention, only by what follows": [
        "conformance/test_conformance.py::test_write",
        "conformance/test_conformance_harness.py::test_wrong_writes_are_caught",
    ],
    "a vector at post_attn skips the block's MLP, so that it is one at post_block": [
        "conformance/test_conformance.py::test_write",
        "conformance/test_conformance_harness.py::test_wrong_writes_are_caught",
    ],
    "rows of post_attn lack the attention, or are of the branch and not of the stream": [
        "conformance/test_conformance.py::test_read",
        "conformance/test_conformance_harness.py::test_wrong_reads_are_caught",
    ],
    "a point is read or steered twice, or its result is used by nobody": [
        "conformance/test_conformance.py::test_read_while_writing",
        "taps/test_taps_proof.py",
    ],
    "an op on an input nobody reads is removed by the compiler: rows of zeros": [
        "serving/test_compiled.py::test_taps_are_in_the_code_of_one_form",
        "serving/test_compiled.py::test_read_and_write",
    ],
    "a point the model or the layer does not have is accepted and does nothing": [
        "conformance/test_conformance.py::test_point_the_model_lacks_is_refused",
        "errors/test_errors.py::test_error",
    ],
    "sequence-parallel rows are taken for whole ones": ["config/test_refusals.py::test_refused"],
    # What acts where.
    "a chunk of prompt and generated tokens, computed again, gets one phase": [
        "serving/test_preemption.py::test_recomputed_tokens_keep_their_phase",
        "interventions/worker/test_token_map.py::test_every_token_and_no_padding",
    ],
    "decode-only steering, or one tier alone, is taken for no steering": [
        "serving/test_steering_serving.py::test_phases",
        "serving/test_known_defects.py::test_each_field_alone_is_steering",
    ],
    "a plain request does not get the global tiers": [
        "serving/test_global_steering.py::test_one_tier",
        "interventions/scheduler/test_allocation.py::test_ten_thousand_requests",
    ],
    "padding of a graph keeps the rows of an earlier step": [
        "interventions/worker/test_token_map.py::test_padding_is_cleared_when_the_batch_shrinks_or_is_plain",
    ],
    # The way of a request.
    "packed vectors pass the check that steering is enabled and do nothing": [
        "errors/test_errors.py::test_error",
        "interventions/scheduler/test_request_state.py::test_raw_fields_never_reach_the_engine_core",
        "serving/test_known_defects.py::test_a_request_cannot_bring_a_plan",
    ],
    "of a module and inline vectors in one request the inline ones are dropped": [
        "interventions/frontend/test_segments.py::test_the_sum_at_every_position",
        "serving/test_modules_serving.py::test_all_adds_up",
        "serving/test_known_defects.py::test_modules_and_inline_vectors_add_up",
    ],
    "a scale applies to some tiers of a module only": [
        "serving/test_modules_serving.py::test_scale_and_tiers",
        "interventions/frontend/test_segments.py::test_the_sum_at_every_position",
    ],
    "unknown or missing keys of a client are a server error": [
        "errors/test_errors_fuzz.py::test_a_plan_or_a_named_error",
    ],
    "layers as JSON strings are not found": ["interventions/test_vectors.py::test_forms_of_layers"],
    "a vector of the wrong width reaches the worker and ends the engine": [
        "errors/test_errors_fuzz.py::test_a_plan_or_a_named_error",
        "steering/test_broken_files.py::test_errors_name_the_file_and_the_tensor",
        "serving/test_global_steering.py::test_refused_changes_change_nothing",
    ],
    "a message that cannot be decoded ends the engine's input thread": [
        "serving/test_processes.py::test_errors_reach_the_caller_and_nobody_else",
        "serving/test_known_defects.py::test_every_field_of_a_plan_survives_the_wire",
    ],
    "the user's objects are changed or copied deeply on the way": [
        "serving/test_steering_serving.py::test_params_are_reusable",
        "interventions/test_vectors.py::test_the_users_objects_are_left_alone",
    ],
    # Capacity.
    "without a free slot a request runs unsteered": [
        "serving/test_slot_waiting.py::test_more_contents_than_slots",
        "interventions/scheduler/test_allocation.py::test_ten_thousand_requests",
    ],
    "the worker runs out of rows that the scheduler counts as free, and ends": [
        "interventions/scheduler/test_allocation.py::test_ten_thousand_requests",
        "interventions/scheduler/test_changes.py::test_any_number_of_modules_takes_no_slot",
    ],
    "requests that wait for rows starve": [
        "interventions/scheduler/test_admission.py::test_nobody_starves"
    ],
    "a slot off by one is somebody else's": [
        "interventions/scheduler/test_allocation.py::test_ten_thousand_requests",
        "interventions/worker/test_steering_table.py::test_rows_of_slots",
    ],
    # Identity.
    "a module registered anew keeps its old identity: old KV is found, old vectors stay": [
        "serving/test_modules_serving.py::test_a_name_keeps_its_meaning",
        "serving/test_known_defects.py::test_a_module_registered_anew_is_another_content",
    ],
    "hashes without framing: different requests have one identity": [
        "serving/test_known_defects.py::test_what_is_cut_elsewhere_is_another_identity",
        "interventions/test_vectors.py::test_digest_is_of_everything_that_matters_and_nothing_else",
    ],
    "blocks under one state of the global tiers are found under another": [
        "serving/test_global_steering.py::test_hashed_before_the_change",
        "serving/test_global_steering.py::test_requests_in_flight",
        "interventions/scheduler/test_global_identity.py::test_equal_keys_exactly_where_the_history_is_equal",
    ],
    "a change of the global tiers resets the cache or preempts everybody": [
        "serving/test_global_steering.py::test_sharing",
        "serving/test_global_steering.py::test_blocks_of_a_request_across_a_change",
    ],
    "blocks of a patched run are served to others": [
        "serving/test_steering_ops.py::test_prefix_cache",
        "serving/test_steering_ops.py::test_decided_gates_are_not_shared_by_the_cache",
    ],
    "decode-only steering, or steering with the same vectors, splits the cache of prompts": [
        "serving/test_cache.py::test_sharing",
        "interventions/scheduler/test_request_state.py::test_decode_only_leaves_the_prompts_blocks_alone",
    ],
    "state of an ended request reaches the next one that has its row or its hash": [
        "interventions/scheduler/test_allocation.py::test_ten_thousand_requests",
        "interventions/worker/test_token_map.py::test_the_batch_is_not_stale",
        "serving/test_known_defects.py::test_an_id_used_again_brings_nothing_along",
    ],
    # Threads and streams.
    "global vectors are written by another thread than the steps'": [
        "serving/test_global_steering.py::test_a_change_acts_from_the_next_step_on",
        "interventions/scheduler/test_changes.py::test_what_is_prepared_acts_only_when_it_is_committed",
    ],
    "some engines make a change and others do not": [
        "interventions/scheduler/test_changes.py::test_one_change_at_a_time",
        "interventions/scheduler/test_changes.py::test_a_change_whose_frontend_died_gives_way",
    ],
    # Capture.
    "rows computed again after a preemption come twice": [
        "interventions/scheduler/test_request_state.py::test_rows_computed_again_are_not_taken_again",
        "serving/test_preemption.py::test_preempted_requests",
    ],
    "rows of rejected drafts are returned": [
        "interventions/scheduler/test_request_state.py::test_rows_of_rejected_drafts_are_dropped",
        "serving/test_speculation.py::test_speculation",
    ],
    "rows do not say of which position they are": [
        "interventions/frontend/test_results.py::test_at_is_by_position_not_by_index",
        "serving/test_capture_serving.py::test_selectors",
    ],
    "a capture that failed is an empty result": [
        "interventions/frontend/test_row_collector.py::test_a_lost_row_is_an_error",
        "interventions/frontend/test_row_collector.py::test_an_abort_says_which_rows_are_missing",
    ],
    "cached positions have no rows": ["serving/test_cache.py::test_capture_caps_the_hit"],
    # The two model runners.
    "the two model runners drift apart": [
        "conformance/test_conformance.py::test_runner_is_the_one_asked_for",
        "serving/test_known_defects.py::test_both_model_runners_are_tested",
    ],
}


@cache
def names_in(file: str) -> dict[str, str]:
    """Name of each test of a file -> its source."""
    source = (TESTS / file).read_text()
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def gone(named: list[str]) -> list[str]:
    missing = []
    for name in named:
        file, _, test = name.partition("::")
        if not (TESTS / file).is_file() or (test and test not in names_in(file)):
            missing.append(name)
    return missing


@pytest.mark.parametrize("defect", DEFECTS)
def test_it_has_a_test(defect: str) -> None:
    assert DEFECTS[defect]
    assert gone(DEFECTS[defect]) == []


def test_a_test_that_is_gone_is_missed() -> None:
    named = [
        "test_no_such_file.py",
        "interventions/scheduler/test_slots.py::test_no_such_test",
        "interventions/scheduler/test_slots.py",
    ]
    assert gone(named) == named[:2]


FIELDS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_alone_is_steering(field: str) -> None:
    plan = steering_of(**{field: {"pre_attn": {0: VECTOR}}})
    ours = SchedulerInterventions(config_of(), hash_block_size=4)
    request = Request(
        "r", list(range(5)), SamplingParams(max_tokens=4), None, plan=Plan(steering=plan)
    )
    ours.admit(request)
    step = ours.message({"r": 5})
    assert step is not None
    acts = [bool(row) for row in step.admitted["r"].table_rows]
    assert acts == [field != FIELDS[2], field != FIELDS[1]]


def test_a_request_cannot_bring_a_plan() -> None:
    """Nothing a client can put into its parameters passes for a checked plan."""
    asked = SamplingParams(max_tokens=4, steering_vectors={"pre_attn": {0: VECTOR}})
    stripped = without_plan_fields(asked)
    assert asked.steering_vectors is not None
    assert stripped.steering_vectors is None
    assert "plan" not in SamplingParams.__struct_fields__
    off = config_of(steering=False)
    for value in ({}, {"pre_attn": {0: VECTOR}}):
        with pytest.raises(ValueError, match="steering is not enabled"):
            plan_of(config=off, steering_vectors=value)


def module(value: dict[str, Any]) -> Module:
    return parse_module(value, "source", SHAPE, config_of().steering_config)


def test_modules_and_inline_vectors_add_up() -> None:
    site = ("pre_attn", 0)
    named = module({"vectors": {"pre_attn": {0: [1.0] * HIDDEN}}})
    plan = plan_of(
        modules={"m": named},
        steering_modules=[("m", 3.0)],
        steering_vectors={"pre_attn": {0: [10.0] * HIDDEN}},
        decode_steering_vectors={"pre_attn": {0: [100.0] * HIDDEN}},
    )
    ours = SchedulerInterventions(config_of(), hash_block_size=4)
    ours.modules.replace(None, named)
    filled = ours.modules.fill(plan)
    assert filled is not None
    assert filled.steering is not None
    assert sum_at(filled.steering, 0)[site].tolist() == [13.0] * HIDDEN
    assert sum_at(filled.steering, 5)[site].tolist() == [113.0] * HIDDEN


def test_every_field_of_a_plan_survives_the_wire() -> None:
    families = ["add", "pin", "replace", "gate"]
    gate = {"probe": VECTOR, "threshold": 0.5, "sharpness": 2.0, "when": "last_prompt"}
    pin = {"op": "pin", "point": "pre_attn", "layers": "all", "direction": VECTOR, "value": 1.0}
    plan = plan_of(
        config=config_of(steering_families=families),
        steering_vectors={"pre_attn": {0: {"vector": VECTOR, "positions": [1, -1]}}},
        steering=[
            {**pin, "gate": gate},
            {
                "op": "replace",
                "point": "post_block",
                "layers": [1],
                "positions": [2, 0],
                "values": [VECTOR, VECTOR],
            },
        ],
        steering_inherit_global=False,
        capture={"inline": {"hooks": {"pre_attn": [0]}, "positions": ["last_generated", 1]}},
    )
    assert plan is not None
    assert plan.steering is not None
    assert plan.steering.programs
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    assert sent == plan
    other = msgspec.structs.replace(plan.steering, inherit=True)
    assert sent != msgspec.structs.replace(plan, steering=other)


def test_a_module_registered_anew_is_another_content() -> None:
    def keys(value: float) -> list[tuple[str, str]]:
        named = module({"pre_attn": {0: [value] * HIDDEN}})
        plan = plan_of(modules={"m": named}, steering_modules=["m"])
        request = Request("r", list(range(5)), SamplingParams(max_tokens=4), None, plan=plan)
        return request.interventions.blocks.keys(0, 4)

    assert keys(1.0) == keys(1.0)
    assert keys(1.0) != keys(2.0)


def test_what_is_cut_elsewhere_is_another_identity() -> None:
    """The same bytes, told apart by where one thing ends and the next begins."""
    one = vector_set_of({("pre_attn", 1): np.ones(2), ("pre_attn", 11): np.ones(2)})
    other = vector_set_of({("pre_attn", 1): np.ones(4)})
    assert one.data == other.data
    assert one.digest != other.digest
    moved = vector_set_of({("pre_attn", 11): np.ones(2), ("post_attn", 1): np.ones(2)})
    assert moved.digest != one.digest
    sums = {
        segment_at(
            steering_of(modules={"m": named, "n": named}, steering_modules=names), 0
        ).vector_sum
        for named in [module({"pre_attn": {0: VECTOR}})]
        for names in (["m"], [("m", 2.0)], ["m", "n"], [("m", 2.0), "n"])
    }
    assert len(sums) == 4
    assert vector_set("x").digest not in sums


def test_an_id_used_again_brings_nothing_along() -> None:
    ours = SchedulerInterventions(config_of(max_steering_configs=1), hash_block_size=4)

    def request(**fields: Any) -> Request:
        plan = plan_of(**fields)
        return Request("r", list(range(5)), SamplingParams(max_tokens=4), None, plan=plan)

    first = request(steering_vectors={"pre_attn": {0: VECTOR}})
    ours.admit(first)
    ours.finish(first)
    again = request(steering_vectors={"pre_attn": {1: VECTOR}})
    assert ours.can_admit(again)
    ours.admit(again)
    step = ours.message({"r": 5})
    assert step is not None
    assert again.interventions.plan.steering is not None
    assert [c for _, (c, _) in step.placed["sums"]] == again.interventions.plan.steering.sums
    ours.finish(again)
    plain = request()
    ours.admit(plain)
    assert ours.message({"r": 5}) is None


V2 = (
    "serving/test_async_scheduling.py",
    "serving/test_cache.py",
    "serving/test_capture_serving.py",
    "serving/test_chunked_prefill.py",
    "conformance/test_conformance.py",
    "serving/test_global_steering.py",
    "serving/test_preemption.py",
    "serving/test_slot_waiting.py",
    "serving/test_steering_ops.py",
    "serving/test_steering_serving.py",
)
"""Files that run engines under both."""


def test_both_model_runners_are_tested() -> None:
    unmarked = [name for name in V2 if "mark.v2" not in (TESTS / name).read_text()]
    assert unmarked == []
    assert "mark.v2" not in (TESTS / "interventions/scheduler/test_slots.py").read_text()
