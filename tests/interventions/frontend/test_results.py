# SPDX-License-Identifier: Apache-2.0
"""What a user gets back: rows, their status, and the pieces of a stream put together."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HIDDEN, SHAPE
from tests.support.rows import give
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.capture import CapturedRows, CaptureResult, stack
from vllm.v1.capture.copies import CopyThreads
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.capture.results import CaptureStatus, SiteRows, merged, results_of_only_completion
from vllm.v1.interventions.frontend.capture_request import parse_capture
from vllm.v1.interventions.frontend.row_collector import RowCollector
from vllm.v1.interventions.frontend.selectors import Prompt
from vllm.v1.interventions.frontend.work import Work
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, TapShape
from vllm.v1.interventions.positions import Positions

pytestmark = pytest.mark.quick

PROMPT_IDS = [100, 101, 102, 103, 104]
PROMPT = len(PROMPT_IDS)
MAX_TOKENS = 4
VERSION = 7
SITES = [("pre_attn", 1), ("post_block", 0)]
HOOKS = {"pre_attn": [1], "post_block": [0]}


def rows(positions: list[int], values: torch.Tensor | None = None) -> CapturedRows:
    if values is None:
        values = torch.tensor([[p + i / 10 for i in range(HIDDEN)] for p in positions])
    at = np.array(positions, dtype=np.int64)
    return CapturedRows(at, at + 100, values, at + 10)


def test_at_is_by_position_not_by_index() -> None:
    captured = rows([3, 7])
    assert len(captured) == 2
    assert torch.equal(captured.at(7), captured.values[1])
    assert not torch.equal(captured.at(7), captured.at(3))
    for absent in (0, 1, -1, 4):
        with pytest.raises(KeyError, match=f"position {absent} was not captured"):
            captured.at(absent)


def test_every_bfloat16_is_exact_in_numpy() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[torch.isfinite(every)].view(-1, HIDDEN)
    numpy = rows(list(range(len(every))), every).numpy()
    assert numpy.dtype == np.float32
    assert torch.equal(torch.from_numpy(numpy).to(torch.bfloat16), every)
    # bfloat16 is the upper half of a float32: nothing was made up below it.
    assert not (numpy.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    values = torch.randn(3, HIDDEN, dtype=torch.float64).to(dtype)
    numpy = rows([0, 1, 2], values).numpy()
    assert torch.from_numpy(numpy).dtype == dtype
    assert torch.equal(torch.from_numpy(numpy), values)


def completion(index: int = 0, results: dict[str, CaptureResult] | None = None) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text="",
        token_ids=[1],
        cumulative_logprob=None,
        logprobs=None,
        capture_results=results,
    )


def output(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput("id", None, PROMPT_IDS, None, list(completions), finished=True)


def captured(
    offset: float, status: Any = "ok", error: str | None = None, number: int = 3
) -> RequestOutput:
    payload: SiteRows[CapturedRows] = SiteRows()
    for layer in (0, 1, 2):
        values = torch.arange(3 * HIDDEN, dtype=torch.float32).view(3, HIDDEN)
        values = (values + offset + 1000 * layer)[:number]
        payload["post_block", layer] = rows([2, 3, 4][:number], values)
    return output(completion(results={"inline": CaptureResult(status, error, payload)}))


def test_stack_is_outputs_by_layers_by_hidden() -> None:
    outputs = [captured(0), captured(0.25)]
    stacked = stack(outputs, "post_block", [2, 0])
    assert stacked.shape == (2, 2, HIDDEN)
    for i, out in enumerate(outputs):
        for j, layer in enumerate((2, 0)):
            site = out.capture_results["inline"].payload["post_block", layer]  # type: ignore[index]
            assert torch.equal(stacked[i, j], site.at(4))
    assert torch.equal(stacked, stack(outputs, "post_block", [2, 0], position=4))
    assert torch.equal(stack(outputs, "post_block", [0], position=2)[0, 0], torch.arange(4.0))
    for other in (
        stack(outputs, "post_block", [0, 2]),
        stack(outputs[::-1], "post_block", [2, 0]),
        stack(outputs, "post_block", [2, 0], position=-2),
        stack(outputs, "post_block", [2, 0], position=3),
    ):
        assert not torch.equal(stacked, other)


def test_stack_of_all_layers_all_positions_and_one_output() -> None:
    both = [captured(0), captured(0.25)]
    assert torch.equal(stack(both, "post_block"), stack(both, "post_block", [0, 1, 2]))
    assert torch.equal(stack(both[1], "post_block"), stack(both[1:], "post_block", "all"))
    assert not torch.equal(stack(both[0], "post_block"), stack(both[1], "post_block"))
    whole = stack(both, "post_block", [2, 0], position=None)
    assert whole.shape == (2, 2, 3, HIDDEN)
    for i, position in enumerate((2, 3, 4)):
        assert torch.equal(whole[:, :, i], stack(both, "post_block", [2, 0], position))
        other = stack(both, "post_block", [2, 0], 2 if i else 4)
        assert not torch.equal(whole[:, :, i], other)


def test_a_payload_answers_a_point_or_says_its_keys() -> None:
    (result,) = (captured(0).capture_results or {}).values()
    at_point = result.payload["post_block"]
    assert list(at_point) == [0, 1, 2]
    assert at_point[1] is result.payload["post_block", 1]
    assert "post_block" not in result.payload and result.payload.get("post_block") is None
    for absent in ("pre_attn", ("post_block", 3), 1):
        with pytest.raises(KeyError, match=r"keys are \(point, layer\): .*'post_block', 2"):
            result.payload[absent]
    assert list(pickle.loads(pickle.dumps(result.payload))["post_block"]) == [0, 1, 2]


def test_stack_takes_completions_and_partial_rows() -> None:
    partial = captured(0, "partial_error", "stopped early")
    assert stack(partial.outputs, "post_block", [0]).shape == (1, 1, HIDDEN)


@pytest.mark.parametrize(
    ("outputs", "layers", "position", "message"),
    [
        ([], [0], -1, "stack: no outputs"),
        ([captured(0)], [], -1, "stack: no layers; output 0 has .*post_block"),
        ([captured(0)], [], None, "stack: no layers"),
        ([captured(0), output(completion())], [0], -1, "output 1 has no rows: no 'inline'"),
        ([captured(0, "error", "lost")], [0], -1, "output 0 has no rows: lost"),
        ([captured(0)], [3], -1, "output 0 captured no post_block at layer 3"),
        ([captured(0)], [0], -4, "output 0 has 3 rows, asked for -4"),
        ([captured(0)], [0], 1, r"output 0 did not capture position 1, but \[2, 3, 4\]"),
        ([captured(0), captured(0, number=2)], [0], None, "output 1 has 2 rows, output 0 3: name"),
    ],
)
def test_stack_says_what_is_missing(
    outputs: list[RequestOutput], layers: Any, position: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stack(outputs, "post_block", layers, position=position)


# -- one or several completions -----------------------------------------------------------------


def test_results_of_a_single_completion_are_the_requests() -> None:
    single = captured(0)
    assert single.capture_results is single.outputs[0].capture_results
    assert output(completion()).capture_results is None
    assert results_of_only_completion([]) is None


def test_results_of_several_completions_are_their_own() -> None:
    several = output(completion(0), completion(1))
    with pytest.raises(ValueError, match=r"has 2 completions: use \.outputs\[i\]"):
        _ = several.capture_results


# -- the collector ------------------------------------------------------------------------------


def specs_of(*names: str) -> dict[str, ConsumerSpec]:
    return {name: ConsumerSpec(name) for name in names}


def plan_for(positions: Any, shape: TapShape = SHAPE, **more: Any) -> CapturePlan:
    consumers = {"inline": {"hooks": HOOKS, "positions": positions}}
    consumers |= {name: {"hooks": HOOKS, "positions": p} for name, p in more.items()}
    plan = parse_capture(
        consumers,
        "capture",
        shape,
        Prompt([0] * PROMPT, MAX_TOKENS, None, Work(1 << 23)),
        specs_of(*consumers),
    )
    assert plan is not None
    return plan


def collector_for(plan: CapturePlan) -> RowCollector:
    return RowCollector(plan, PROMPT_IDS, plan.consumers, {})


def chunk(
    positions: list[int], dtype: torch.dtype = torch.float32, version: int = VERSION
) -> CapturedChunk:
    """Rows that say where they are from: site index, position, column."""
    at = np.array(positions, dtype=np.int64)
    values = torch.zeros(len(positions), len(SITES), HIDDEN, dtype=dtype)
    for i in range(len(SITES)):
        values[:, i] = 100 * i + torch.from_numpy(at)[:, None] + torch.arange(HIDDEN) / 8
    return CapturedChunk(at, [values], version, [("r", len(at))])


def results_of(
    collector: RowCollector, num_output: int, *, end: str | None = "stop", only_new: bool = False
) -> dict[str, CaptureResult]:
    return collector.results(
        list(range(200, 200 + num_output)),
        finished=end is not None,
        aborted=end == "abort",
        only_new=only_new,
    )


def collect(
    collector: RowCollector, num_output: int, *, end: str | None = "stop", only_new: bool = False
) -> CaptureResult:
    return results_of(collector, num_output, end=end, only_new=only_new)["inline"]


def positions_of(result: CaptureResult) -> list[int]:
    found = {tuple(site.positions.tolist()) for site in result.payload.values()}
    assert len(found) == 1
    return list(found.pop())


def check_rows(result: CaptureResult, num_output: int) -> None:
    """Every row is the one of its site and position, with the token it has read."""
    token_ids = [*PROMPT_IDS, *range(200, 200 + num_output)]
    expected_sites = [("post_block", 0), ("pre_attn", 1)]
    assert sorted(result.payload) == expected_sites
    for i, site in enumerate(expected_sites):
        got = result.payload[site]
        assert got.positions.dtype == got.token_ids.dtype == np.int64
        assert got.token_ids.tolist() == [token_ids[p] for p in got.positions]
        assert torch.equal(got.values, chunk(got.positions.tolist()).values[0][:, i])


def test_rows_of_a_finished_request() -> None:
    collector = collector_for(plan_for("all"))
    give(collector, chunk([0, 1, 2]), chunk([3, 4]))
    give(collector, chunk([5]))
    give(collector, chunk([6]))
    result = collect(collector, 3)
    assert (result.status, result.error) == ("ok", None)
    assert positions_of(result) == list(range(PROMPT + 2))
    check_rows(result, 3)


def test_rows_report_the_version_they_ran_under() -> None:
    collector = collector_for(plan_for("all"))
    give(collector, chunk([0, 1, 2], version=0), chunk([3, 4], version=2))
    give(collector, chunk([5], version=3))
    (one, *others) = collect(collector, 2).payload.values()
    assert one.versions.dtype == np.int64
    assert one.versions.tolist() == [0, 0, 0, 2, 2, 3]
    assert all(other.versions.tolist() == one.versions.tolist() for other in others)


def test_rows_past_a_stop_string_are_trimmed() -> None:
    collector = collector_for(plan_for("all_generated"))
    give(collector, chunk([5, 6, 7]))
    result = collect(collector, 2)
    assert result.status == "ok"
    assert positions_of(result) == [5]
    assert positions_of(collect(collector, 4)) == [5, 6, 7]


def test_consumers_get_their_own_rows() -> None:
    collector = collector_for(plan_for("last_prompt", other="all_generated"))
    give(collector, chunk([4]), chunk([5]))
    results = results_of(collector, 2)
    assert positions_of(results["inline"]) == [4]
    assert positions_of(results["other"]) == [5]


@pytest.mark.parametrize("num_output", [1, 2, 4])
def test_last_generated(num_output: int) -> None:
    collector = collector_for(plan_for("last_generated"))
    give(collector, chunk([5, 6, 7]))
    assert positions_of(collect(collector, num_output, end=None)) == []
    result = collect(collector, num_output)
    assert result.status == "ok"
    # After one token there is no generated row: it was never fed back.
    assert positions_of(result) == ([] if num_output == 1 else [PROMPT + num_output - 2])


def test_a_named_position_the_request_did_not_reach() -> None:
    collector = collector_for(plan_for([2, 6]))
    give(collector, chunk([2]))
    result = collect(collector, 2)
    assert result.status == "partial_error"
    assert result.error == "the request ended with 6 rows, before position 6"
    assert positions_of(result) == [2]
    give(collector, chunk([6]))
    assert collect(collector, 3).status == "ok"


def test_a_lost_row_is_an_error() -> None:
    collector = collector_for(plan_for("all"))
    give(collector, chunk([0, 1, 3, 4]))
    result = collect(collector, 1)
    assert result.status == "error"
    assert result.error is not None
    assert "1 of 5 rows, first at position 2" in result.error
    assert positions_of(result) == [0, 1, 3, 4]


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("num_output", [0, 1])
def test_an_abort_says_which_rows_are_missing(num_output: int, only_new: bool) -> None:
    collector = collector_for(plan_for("all_prompt"))
    give(collector, chunk([0, 1]))
    result = collect(collector, num_output, end="abort", only_new=only_new)
    assert result.status == "partial_error"
    assert result.error is not None
    assert "aborted before 3 of 5 rows, first at position 2" in result.error
    assert positions_of(result) == [0, 1]


def test_an_abort_before_the_first_row() -> None:
    result = collect(collector_for(plan_for("last_prompt")), 0, end="abort")
    assert result.status == "partial_error"
    assert positions_of(result) == []


def test_an_abort_that_misses_nothing_is_ok() -> None:
    collector = collector_for(plan_for("last_prompt"))
    give(collector, chunk([4]))
    assert collect(collector, 1, end="abort").status == "ok"


def test_no_rows_have_the_models_width_and_dtype() -> None:
    shape = TapShape(HIDDEN, "bfloat16", SHAPE.points)
    collector = collector_for(plan_for("all_generated", shape))
    site = collect(collector, 1).payload["pre_attn", 1]
    assert site.values.shape == (0, HIDDEN)
    assert site.values.dtype == torch.bfloat16
    assert site.numpy().shape == (0, HIDDEN)


THREADS = CopyThreads("test")

# -- streams ------------------------------------------------------------------------------------


def stream(
    positions: Any,
    cuts: list[int],
    total: int,
    end: str = "stop",
    moves: frozenset[int] = frozenset(),
) -> tuple[list[CaptureResult], CaptureResult]:
    """Deltas after each of `cuts` output tokens, and what one final output would have said.

    Rows arrive as the engine sends them: those wanted of the prompt, then of each token fed back.
    """
    plan = plan_for(positions)
    wanted = Positions.from_flat(plan.runs)
    every, collector = collector_for(plan), collector_for(plan)
    deltas, seen = [], 0
    for cut in [*cuts, total]:
        for step in range(seen, cut):
            parts = [[0, 1], [2, 3, 4]] if step == 0 else [[PROMPT + step - 1]]
            new = [chunk(at) for part in parts if (at := [p for p in part if p in wanted])]
            give(collector, *new)
            give(every, *new)
            if step in moves:
                collector.move(THREADS)
        seen = cut
        deltas.append(collect(collector, cut, end=None, only_new=True))
    deltas.append(collect(collector, total, end=end, only_new=True))
    return deltas, collect(every, total, end=end)


POSITIONS = st.sampled_from(
    [
        "all",
        "all_prompt",
        "all_generated",
        "last_generated",
        "predicting",
        [1, 6],
        [-1, "last_generated"],
    ]
)


@given(
    POSITIONS,
    st.integers(1, MAX_TOKENS),
    st.sets(st.integers(1, MAX_TOKENS)),
    st.frozensets(st.integers(0, MAX_TOKENS - 1)),
)
def test_deltas_add_up(positions: Any, total: int, cuts: set[int], moves: frozenset[int]) -> None:
    """Whichever rows were moved to memory of their own on the way."""
    parts = sorted(c for c in cuts if c < total)
    deltas, final = stream(positions, parts, total, moves=moves)
    together: dict[str, CaptureResult] | None = None
    for delta in deltas:
        together = merged(together, {"inline": delta})
    assert together is not None
    result = together["inline"]
    assert (result.status, result.error) == (final.status, final.error)
    assert positions_of(result) == positions_of(final)
    check_rows(result, total)
    assert [d.status for d in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_a_delta_has_only_what_is_new() -> None:
    deltas, _ = stream("all", [1, 2], 4)
    assert [positions_of(d) for d in deltas] == [[0, 1, 2, 3, 4], [5], [6, 7], []]


def test_the_last_generated_row_comes_with_an_end_that_brings_no_token() -> None:
    deltas, _ = stream("last_generated", [1, 2], 3, end="abort")
    assert [positions_of(d) for d in deltas] == [[], [], [], [6]]


def test_a_stream_does_not_keep_what_it_delivered() -> None:
    collector = collector_for(plan_for("all"))
    chunks = [chunk([0, 1, 2, 3, 4]), chunk([5]), chunk([6])]
    kept = [weakref.ref(one.values[0]) for one in chunks]
    give(collector, chunks.pop(0))
    collect(collector, 1, end=None, only_new=True)
    gc.collect()
    assert kept[0]() is not None, "its last row may be wanted once more"
    give(collector, *chunks)
    chunks.clear()
    collect(collector, 3, end=None, only_new=True)
    gc.collect()
    assert [values() is not None for values in kept] == [False, False, True]


def test_merged_in_the_models_dtype() -> None:
    shape = TapShape(HIDDEN, "bfloat16", SHAPE.points)
    collector = collector_for(plan_for("all_generated", shape))
    empty = collect(collector, 1, end=None, only_new=True)
    give(collector, chunk([5], torch.bfloat16))
    together = merged({"inline": empty}, {"inline": collect(collector, 2, only_new=True)})
    assert together is not None
    values = together["inline"].payload["pre_attn", 1].values
    assert values.dtype == torch.bfloat16
    assert values.shape == (1, HIDDEN)


def test_merged_with_nothing() -> None:
    results = {"inline": CaptureResult("ok", None, {})}
    assert merged(None, results) is results
    assert merged(results, None) is results
    assert merged(None, None) is None


def test_request_outputs_merge_their_rows() -> None:
    parts: list[tuple[CaptureStatus, CapturedRows]]
    parts = [("ok", rows([1])), ("partial_error", rows([2, 3]))]
    first, second = (
        output(completion(results={"inline": CaptureResult(status, None, {("pre_attn", 0): part})}))
        for status, part in parts
    )
    first.add(second, aggregate=True)
    assert first.capture_results is not None
    result = first.capture_results["inline"]
    assert result.status == "partial_error"
    assert result.payload["pre_attn", 0].positions.tolist() == [1, 2, 3]
    assert result.payload["pre_attn", 0].token_ids.tolist() == [101, 102, 103]
    assert torch.equal(result.payload["pre_attn", 0].values, rows([1, 2, 3]).values)


def test_a_result_is_told_by_its_consumer() -> None:
    payload = {("post_block", 0): rows([1])}
    outputs = [output(completion(results={"other": CaptureResult("ok", None, payload)}))]
    with pytest.raises(ValueError, match="no 'inline' capture"):
        stack(outputs, "post_block", [0])
    assert stack(outputs, "post_block", [0], consumer="other").shape == (1, 1, HIDDEN)
