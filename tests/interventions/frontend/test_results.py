# SPDX-License-Identifier: Apache-2.0
"""What a user gets back: rows and their arrays, of one completion or several, and merged."""

from __future__ import annotations

import ast
import inspect
import pickle
import weakref
from typing import Any, Self

import numpy as np
import pytest
import torch

from tests.support.collecting import PROMPT_IDS
from tests.support.plans import HIDDEN
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.capture import CapturedRows, CaptureResult, stack
from vllm.v1.capture.results import (
    OWN_BYTES,
    CaptureStatus,
    RowSource,
    SiteRows,
    merged,
    results_of_only_completion,
)
from vllm.v1.engine import output_processor
from vllm.v1.interventions.frontend.results.hold import OutputHold

pytestmark = pytest.mark.quick


def rows(positions: list[int], values: torch.Tensor | None = None) -> CapturedRows:
    if values is None:
        values = torch.tensor([[p + i / 10 for i in range(HIDDEN)] for p in positions])
    at = np.array(positions, dtype=np.int64)
    return CapturedRows(at, at + 100, values, at + 10)


def test_what_is_indexed_out_of_large_rows_keeps_nothing_else() -> None:
    """As programs do in loops; large parts stay views, and small rows are alone anyway."""
    step = torch.arange(OWN_BYTES, dtype=torch.float32).view(4, 4, -1)
    large = rows([0, 1, 2, 3], step[:, 1])

    def keeps(part: torch.Tensor) -> bool:
        return part.untyped_storage().data_ptr() == step.untyped_storage().data_ptr()

    assert keeps(large.values) and keeps(large.values[:])
    taken = [large.values[-1], large.values[1:3, :5], large.at(2), *large.values]
    wanted = [step[3, 1], step[1:3, 1, :5], step[2, 1], *step[:, 1]]
    for part, want in zip(taken, wanted, strict=True):
        assert torch.equal(part, want) and type(part) is torch.Tensor
        assert not keeps(part) and part.untyped_storage().nbytes() == want.nbytes
    large.values[0] += 1
    assert torch.equal(large.values[0], step[0, 1]), "what is written is written"
    small = torch.zeros(4, HIDDEN)
    part = rows([0, 1, 2, 3], small).values[1]
    assert part.untyped_storage().data_ptr() == small.untyped_storage().data_ptr()


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
    def of_layer(site: tuple[str, int]) -> CapturedRows:
        values = torch.arange(3 * HIDDEN, dtype=torch.float32).view(3, HIDDEN)
        return rows([2, 3, 4][:number], (values + offset + 1000 * site[1])[:number])

    payload = SiteRows([("post_block", layer) for layer in (0, 1, 2)], of_layer)
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
    for one in (2, (2,)):
        assert torch.equal(stack(both, "post_block", one), stack(both, "post_block", [2]))
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
    assert result.payload.get("post_block") == at_point and "post_block" in result.payload
    assert result.payload.get("post_attn") is None and "post_attn" not in result.payload
    for absent in ("pre_attn", ("post_block", 3), 1):
        with pytest.raises(KeyError, match=r"keys are \(point, layer\): .*'post_block', 2"):
            result.payload[absent]
    assert list(pickle.loads(pickle.dumps(result.payload))["post_block"]) == [0, 1, 2]


def test_a_payload_makes_rows_once_when_looked_up_and_lets_go_of_what_they_are_made_of() -> None:
    class Source:
        def __init__(self) -> None:
            self.made: list[int] = []

        def of_layer(self, site: tuple[str, int]) -> CapturedRows:
            self.made.append(site[1])
            return rows([2], torch.full((1, HIDDEN), float(site[1])))

    source = Source()
    alive = weakref.ref(source)
    payload = SiteRows([("post_block", 0), ("post_block", 1)], source.of_layer)
    made = source.made
    del source
    assert len(payload) == 2 and list(payload)[1] == ("post_block", 1) and made == []
    assert payload["post_block", 1] is payload["post_block", 1] and made == [1]
    assert alive() is not None
    copied = pickle.loads(pickle.dumps(payload))
    assert made == [1, 0] and alive() is None
    assert [float(rows.values[0, 0]) for rows in copied.values()] == [0.0, 1.0]


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


def test_merged_with_nothing() -> None:
    results = {"inline": CaptureResult("ok", None, {})}
    assert merged(None, results) is results
    assert merged(results, None) is results
    assert merged(None, None) is None


class Parts(RowSource):
    """Rows that are joined by number."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def by_site(self) -> SiteRows[CapturedRows]:
        return SiteRows([("pre_attn", 0)], lambda site: rows(self.numbers), self)

    def joined(self, later: Self) -> SiteRows[CapturedRows]:
        return Parts(self.numbers + later.numbers).by_site()


def test_request_outputs_merge_their_rows() -> None:
    parts: list[tuple[CaptureStatus, list[int]]] = [("ok", [1]), ("partial_error", [2, 3])]
    first, second = (
        output(completion(results={"inline": CaptureResult(status, None, Parts(part).by_site())}))
        for status, part in parts
    )
    first.add(second, aggregate=True)
    assert first.capture_results is not None
    result = first.capture_results["inline"]
    assert result.status == "partial_error"
    assert result.payload["pre_attn", 0].positions.tolist() == [1, 2, 3]


def test_a_result_is_told_by_its_consumer() -> None:
    payload = {("post_block", 0): rows([1])}
    outputs = [output(completion(results={"other": CaptureResult("ok", None, payload)}))]
    with pytest.raises(ValueError, match="no 'inline' capture"):
        stack(outputs, "post_block", [0])
    assert stack(outputs, "post_block", [0], consumer="other").shape == (1, 1, HIDDEN)


def test_a_queue_is_only_put_to() -> None:
    """An `OutputHold` stands where a request's queue would, in the one file that uses it."""
    tree = ast.parse(inspect.getsource(output_processor))
    queues = {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "queue"
        and node.ctx.__class__ is ast.Load
    }
    known = set[ast.AST]()
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=ast.Attribute() as queue, ops=[ast.IsNot() | ast.Is()]):
                known.add(queue)
            case ast.Call(func=ast.Attribute(value=ast.Attribute() as queue, attr=name)):
                assert queue not in queues or callable(getattr(OutputHold, name, None)), (
                    f"upstream calls {name} of a request's queue, which an OutputHold lacks"
                )
                known.add(queue)
    assert queues, "upstream keeps a request's queue elsewhere: put an OutputHold there"
    new = [ast.unparse(queue) for queue in queues - known]
    assert not new, f"upstream uses {new} otherwise than to put: can an OutputHold stand there?"
