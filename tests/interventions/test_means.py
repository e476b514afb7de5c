# SPDX-License-Identifier: Apache-2.0
"""`reduce` without an engine: what a request may say, and sums on their way from steps of any
lengths, also where a request is preempted and begins anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.collecting import texts_of
from tests.support.plans import HIDDEN, SHAPE
from vllm.v1.capture.copies import CopyThreads
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.capture.results import merged
from vllm.v1.capture.transport.feed import Feed, request_info
from vllm.v1.capture.transport.mean import RunningMean
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.capture import parse_capture
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.results.collector import RowCollector
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.frontend.results.pieces import Run
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, Plan
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.scheduler.request import RequestInterventions
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.quick

PROMPT, GENERATED = 13, 4
IDS = list(range(50, 50 + PROMPT))
HOOKS = {"post_block": [0, 2], "pre_attn": [1]}
HERE = CopyThreads("test-means")


def parse(capture: Any, **specs: ConsumerSpec) -> CapturePlan:
    prompt = Prompt(IDS, GENERATED, None, Work(1 << 23))
    known = {"inline": ConsumerSpec("inline"), "files": ConsumerSpec("files")}
    plan = parse_capture(capture, "capture", SHAPE, prompt, known | specs)
    assert plan is not None
    return plan


def mean(positions: Any, **more: Any) -> dict[str, Any]:
    return {"hooks": HOOKS, "positions": positions, "reduce": "mean", **more}


def test_a_stream_for_each_set_of_positions() -> None:
    plan = parse(
        {
            "inline": [
                mean("all_prompt"),
                mean([0, 1]),
                mean([1, 0], hooks={"post_block": [3]}),
                {"hooks": HOOKS, "positions": "all_prompt"},
            ]
        }
    )
    assert [plan.consumers[n].streams for n in plan.consumers] == [(0,), (1,), (1,), (2,)]
    assert [s.making.adds_up for s in plan.streams] == [True, True, False]
    assert [s.dtype for s in plan.streams] == ["float32", "float32", SHAPE.dtype]
    assert plan.streams[1].sites[-1] == ("post_block", 3)
    info = request_info("id", plan, "inline[0]", IDS)
    assert (info.max_rows, info.width, info.dtype, info.reduce) == (
        1,
        HIDDEN,
        torch.float32,
        "mean",
    )
    assert request_info("id", plan, "inline[3]", IDS).reduce == ""


@pytest.mark.parametrize("positions", ["all", "predicting", "last_generated", [PROMPT]])
def test_generated_positions_are_refused(positions: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^capture\.inline\.reduce: takes positions of the prompt"
    ):
        parse({"inline": mean(positions)})
    parse({"inline": {**mean(positions), "reduce": None}})


Steps = list[tuple[int, int]]
"""The positions of each step: first, stop."""


class Way:
    """A request's way from its steps to its consumers: `inline` and `files`.

    Args:
        rows: [positions, sites of the plan, hidden], what the device has at each position.
    """

    def __init__(self, plan: CapturePlan, rows: torch.Tensor) -> None:
        self.plan, self.rows = plan, rows
        self.state = RequestInterventions(Plan(capture=plan), PROMPT, None)
        inline = [name for name in plan.consumers if name.startswith("inline")]
        self.collector = RowCollector(plan, IDS, inline, {}, HERE, KeptMemory(), texts_of)
        self.feed = Feed(plan, "files", IDS, HERE) if "files" in plan.consumers else None
        self.runs: dict[Any, Run] = {}

    def chunk(self, first: int, stop: int) -> CapturedChunk:
        """What a worker sends of a step."""
        at = Positions.from_flat(self.plan.runs).between(first, stop)
        values = []
        for stream in self.plan.streams:
            own = self.rows[:, [self.plan.sites.index(site) for site in stream.sites]]
            if stream.making.adds_up:
                inside = at[Positions.from_flat(stream.runs).mask(at)]
                values.append(own[torch.from_numpy(inside)].sum(0, dtype=torch.float32)[None])
            else:
                values.append(own[torch.from_numpy(at)])
        return CapturedChunk(at, values, 3, [("r", len(at))])

    def step(self, chunk: CapturedChunk, num_tokens: int) -> None:
        if not len(chunk.positions) or not (accepted := self.state.accept(chunk, num_tokens)):
            return
        if self.feed is not None:
            assert self.feed.deliver(accepted, list(range(GENERATED))) is None
        if relayed := self.state.relayed(accepted):
            key = tuple(relayed.owners)
            if key not in self.runs:
                self.runs = {key: Run(relayed.owners)}
                self.collector.add(self.runs[key], "r")
            self.runs[key].chunks.append(relayed)

    def move(self) -> None:
        self.runs = {}
        self.collector.move()


@st.composite
def ways(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """("step", first, stop), ("preempt", cached tokens if they may be as many, 0), ("move", 0, 0);
    the last step of a prompt is never there twice but behind a preemption."""
    what: list[tuple[str, int, int]] = []
    for _ in range(draw(st.integers(0, 3))):
        what.append(("some", draw(st.integers(1, PROMPT + 2)), draw(st.integers(1, 5))))
        what.append(
            (draw(st.sampled_from(["preempt", "move", "late"])), draw(st.integers(0, 12)), 0)
        )
    return [*what, ("some", 99, draw(st.integers(1, 5)))]


@given(ways(), st.integers(0, 99))
def test_means_of_steps_of_any_lengths(way: list[tuple[str, int, int]], seed: int) -> None:
    """The means are those of the rows, and the rows beside them come each once. "late" is a
    preemption while a step is in flight, whose rows come behind it."""
    rows = torch.randn(PROMPT + GENERATED, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))
    far = {"start": 2, "stop": 12, "step": 3}
    asked = [mean("all_prompt"), mean(far), {"hooks": HOOKS, "positions": [0, 5, -1]}, mean([12])]
    here = {**mean([1, 2, 3, 4]), "hooks": {"post_block": [2]}}
    running = Way(parse({"inline": asked, "files": here}), rows)
    done = 0
    for kind, count, length in way:
        if kind == "some":
            end = min(done + count, PROMPT + GENERATED - 1)
            while done < end:
                stop = min(done + length, end, PROMPT if done < PROMPT else done + 1)
                chunk = running.chunk(done, stop)
                running.step(chunk, PROMPT + GENERATED if stop >= PROMPT else PROMPT)
                done = stop
        elif kind == "move":
            running.move()
        else:
            stale = running.chunk(done, min(done + 3, PROMPT)) if done < PROMPT else None
            done = min(count, done, running.state.cache_hit_limit())
            if kind == "late" and stale is not None:
                running.step(stale, PROMPT)
    results = running.collector.results(
        list(range(GENERATED)), finished=True, aborted=False, only_new=False
    )
    sites = running.plan.sites
    for i, positions in enumerate([list(range(PROMPT)), [2, 5, 8, 11], None, [12]]):
        result = results[f"inline[{i}]"]
        assert result.status == "ok", result.error
        for site, got in result.payload.items():
            of_site = rows[:, sites.index(site)]
            if positions is None:
                assert got.positions.tolist() == [0, 5, 12]
                assert torch.equal(got.values, of_site[[0, 5, 12]])
                continue
            want = of_site[positions].mean(0)
            assert got.positions.tolist() == positions[-1:]
            assert got.token_ids.tolist() == [IDS[positions[-1]]]
            assert got.versions.tolist() == [3] and got.values.dtype == torch.float32
            torch.testing.assert_close(got.values, want[None], atol=1e-6, rtol=1e-5)
            assert not torch.allclose(got.values, of_site[:12].mean(0), atol=1e-4)
    assert running.feed is not None
    [batch], error = running.feed.end(PROMPT + GENERATED, aborted=False)
    assert error is None and batch.positions.tolist() == [4]
    want = rows[1:5, sites.index(("post_block", 2))].mean(0)
    torch.testing.assert_close(batch.values, want[None, None], atol=1e-6, rtol=1e-5)


def test_rows_that_were_cut_keep_their_sums_in_a_message() -> None:
    """A request that is computed again, with an engine core in another process."""
    asked = [mean("all_prompt"), {"hooks": HOOKS, "positions": "all_prompt"}]
    running = Way(parse({"inline": asked}), torch.randn(PROMPT, 3, HIDDEN))
    assert running.state.accept(running.chunk(0, 5), PROMPT) is not None
    again = running.chunk(0, 8)
    cut = running.state.accept(again, PROMPT)
    assert cut is not None and cut is not again
    output = EngineCoreOutput("", [], captured=[cut])
    sent = MsgpackDecoder(EngineCoreOutput).decode(MsgpackEncoder().encode(output))
    assert sent.captured is not None
    [chunk] = sent.captured
    assert chunk.positions.tolist() == [5, 6, 7] and chunk.owners == [("r", 3)]
    assert chunk.summed is not None and chunk.summed.tolist() == list(range(8))
    assert [len(values) for values in chunk.values] == [1, 3]
    assert torch.equal(chunk.values[0], again.values[0])


def test_sums_that_do_not_go_on_are_left_out() -> None:
    """Whatever comes, a mean is of each position once, or there is none."""
    [stream] = parse({"inline": mean([2, 3, 7, 8])}).streams
    one, total = torch.ones(3, HIDDEN), RunningMean(stream)
    for at in ([3, 7], [2, 3], [8], [2, 3], [3, 7]):
        total.add(np.array(at), one, 0)
        assert total.value() is None
    total.add(np.array([7, 8]), one, 1)
    total.add(np.array([2, 3]), one, 2)
    value = total.value()
    assert value is not None and torch.equal(value, one * 2 / 4)
    assert total.positions.tolist() == [2, 3, 7, 8] and total.version == 1


def test_before_its_end_a_mean_is_none() -> None:
    """No row before the completion ends, nor of one that was cut off before all positions."""
    running = Way(parse({"inline": mean("all_prompt")}), torch.randn(PROMPT, 3, HIDDEN))
    running.step(running.chunk(0, 7), PROMPT)
    for finished in (False, True):
        result = running.collector.results([], finished=finished, aborted=True, only_new=True)
        assert {len(rows) for rows in result["inline"].payload.values()} == {0}
    unread = running.collector.results([], finished=False, aborted=False, only_new=True)
    assert result["inline"].status == "partial_error"
    assert result["inline"].error is not None and "before 6 of 13 rows" in result["inline"].error
    running.step(running.chunk(7, PROMPT), PROMPT + 1)
    last = running.collector.results([9], finished=True, aborted=False, only_new=True)
    together = merged(unread, last)
    assert together is not None
    done = together["inline"]
    assert done.status == "ok" and len(done.payload["post_block", 0]) == 1
    assert done.payload["post_block", 0].values.isfinite().all()


def test_a_mean_at_one_site_of_a_stream_that_nobody_reads() -> None:
    """Nothing of it is made before it is read: what was made is not joined with what follows."""
    asked = {**mean("all_prompt"), "hooks": {"post_block": [0]}}
    running = Way(parse({"inline": asked}), torch.randn(PROMPT, 1, HIDDEN))
    running.step(running.chunk(0, PROMPT), PROMPT + 1)
    together = None
    for number in range(1, 4):
        ids, finished = list(range(number)), number == 3
        delta = running.collector.results(ids, finished=finished, aborted=False, only_new=True)
        together = merged(together, delta)
    assert together is not None
    assert len(together["inline"].payload["post_block", 0]) == 1
    assert running.collector.num_rows == {"inline": 1}
