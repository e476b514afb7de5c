# SPDX-License-Identifier: Apache-2.0
"""A watch, fed with rows and tokens as steps of any size bring them, decides what one pass over the
whole answer does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import VECTOR, plan_of
from tests.support.probes import numbers_of, pooled
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.interventions.frontend.results.watch import RuleWatches
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan
from vllm.v1.probes.files import made_probe
from vllm.v1.probes.pools import Mean, MultiMax

pytestmark = pytest.mark.quick

PROMPT = 5
MOST = 12
RULE = {"name": "r", "point": "post_block", "layer": 1, "probe": VECTOR, "threshold": 0.0}


def plan_for(*rules: dict[str, Any], **fields: Any) -> CapturePlan:
    given = [{**RULE, "name": f"r{i}", **rule} for i, rule in enumerate(rules)]
    plan = plan_of(rules=given, max_tokens=MOST, **fields)
    assert plan is not None and plan.capture is not None
    return plan.capture


def chunk(plan: CapturePlan, owners: dict[str, list[int]], scores: np.ndarray) -> CapturedChunk:
    """Rows of several requests at given positions; `scores` by rule and position, the same for all
    but "x", whose are the negative ones."""
    positions = np.array([p for at in owners.values() for p in at], dtype=np.int64)
    negative = [name == "x" for name, at in owners.items() for _ in at]
    values = [torch.zeros(len(positions), len(s.sites), s.width) for s in plan.streams]
    for i, rule in enumerate(plan.rules):
        site = plan.streams[rule.stream].sites.index(rule.sites[0])
        made = np.where(negative, -1, 1) * scores[i][positions]
        values[rule.stream][:, site, rule.column] = torch.from_numpy(made).float()
    return CapturedChunk(positions, values, 0, [(name, len(at)) for name, at in owners.items()])


STEPS: Any = (
    st.lists(st.integers(1, 4), min_size=1, max_size=MOST),
    st.lists(st.integers(-2, 2), min_size=2 * (PROMPT + MOST), max_size=2 * (PROMPT + MOST)),
    st.tuples(st.integers(1, 3), st.integers(0, 3)),
    st.booleans(),
    st.sampled_from(["generated", "prompt", "all", [3, 4, 6, 7, 9]]),
    st.sampled_from([None, 1, 3, 6]),
)


@given(*STEPS)
def test_steps_of_any_size(
    steps: list[int], numbers: list[int], window: tuple[int, int], below: bool, over: Any,
    stop_string: int | None,
) -> None:  # fmt: skip
    """Two rules, one of which stops. A stop string, where there is one, is completed by the token
    of that index."""
    need, more = window
    scores = np.array(numbers, dtype=np.float64).reshape(2, -1)
    rules = [
        {"need": need, "of": need + more, "over": over, "then": "stop"},
        {"below": below, "over": "all", "layer": 0},
    ]
    plan = plan_for(*rules)
    watches = RuleWatches()
    watch = watches.open("a", plan, PROMPT, MOST)
    assert watch is not None
    other = watches.open("b", plan, PROMPT, MOST)

    # As the definition says, on all rows at once.
    counts = {
        "generated": range(PROMPT, 99), "prompt": range(PROMPT), "all": range(99)
    }.get(str(over), over)  # fmt: skip
    rows = [p for p in range(PROMPT + MOST - 1) if p in counts]
    crosses = [scores[0][p] > 0 for p in rows]
    fires = [
        p
        for i, p in enumerate(rows)
        if crosses[i] and sum(crosses[max(0, i - need - more + 1) : i + 1]) >= need
    ]
    length = min(sum(steps), MOST)
    end = next((p for p in fires if p < PROMPT + length - 1), None)
    expected = length if end is None else max(end + 1 - PROMPT, 0)
    by_string = stop_string is not None and stop_string < expected
    expected = stop_string + 1 if by_string and stop_string is not None else expected

    tokens: list[int] = []
    reason, why, first = None, None, 0
    for step in steps:
        new = list(range(len(tokens), min(len(tokens) + step, MOST)))
        stop = PROMPT + len(tokens) + len(new) - 1
        at = list(range(first, stop))
        first = stop
        if at:
            watches.add([chunk(plan, {"x": at, "a": at, "b": at[:1]}, scores)])
        output = EngineCoreOutput("a", new)
        kept, reason = watch.judge(output, FinishReason.LENGTH)
        assert (len(kept) == len(new)) == (reason is not None)
        found = stop_string if stop_string in kept else None
        why = watch.stop_reason("text" if found is not None else None)
        tokens += kept if found is None else [t for t in kept if t <= found]
        if why is not None or len(tokens) == MOST:
            break
    assert len(tokens) == expected
    assert why == ("text" if by_string else None if end is None else "rule:r0")
    seen = PROMPT + len(tokens) - 1 if by_string or end is None else end + 1
    results: dict[str, Any] = watch.results(PROMPT + len(tokens))
    fired = [p for p in fires if p < seen]
    assert (results["r0"].fired_at, results["r0"].fired) == (next(iter(fired), None), len(fired))
    mine = scores[1][:seen]
    crossed = np.flatnonzero(mine < 0 if below else mine > 0).tolist()
    assert results["r1"].rows == seen
    assert (results["r1"].fired_at, results["r1"].fired) == (
        next(iter(crossed), None), len(crossed)
    )  # fmt: skip
    assert results["r1"].max == pytest.approx(mine.max())
    of_other = None if other is None else other.results(99)["r1"]
    assert of_other is not None and of_other.rows <= len(steps)


def test_a_window_reaches_over_steps() -> None:
    """Rows that cross, each in a step of its own."""
    by_hand = test_steps_of_any_size.hypothesis.inner_test
    for window in (2, 0), (3, 0), (2, 2):
        by_hand([1] * 8, [1, -1] * (PROMPT + MOST), window, False, "all", None)
        by_hand([1] * 8, [1] * 2 * (PROMPT + MOST), window, False, "generated", None)


def test_of_several_layers_the_largest_dose_counts() -> None:
    """At each row by itself, and in rows that come together; what is no number is left out."""
    doses = [[0.1, 0.6], [0.6, 0.1], [np.nan, 0.7], [0.1, 0.4], [0.4, 0.1]]
    rule = {"name": "r", "point": "post_block", "layer": "0-1", "dose": True, "threshold": 0.5}
    plan = plan_of(rules=[{**rule, "over": "all"}], max_tokens=MOST)
    assert plan is not None and plan.capture is not None
    for steps in ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]]):
        watches = RuleWatches()
        watch = watches.open("a", plan.capture, PROMPT, MOST)
        assert watch is not None
        for at in steps:
            values = torch.tensor([doses[i] for i in at])[..., None]
            watches.add([CapturedChunk(np.array(at), [values], 0, [("a", len(at))])])
        result = watch.results(PROMPT + 1)["r"]
        assert result is not None and (result.fired_at, result.fired, result.rows) == (0, 3, 5)
        assert (result.max, result.min) == pytest.approx((0.7, 0.4))


def test_probes_of_several_layers() -> None:
    """Three rules that share a stream and one of another, fed in two steps, beside the definitions;
    a row that is no number has no score, and silences no row after it."""
    rng = np.random.default_rng(5)
    sites = [("pre_attn", 0), ("post_block", 1)]

    def weight(units: int) -> np.ndarray:
        return rng.normal(size=(units, 2, 4)).astype(np.float32)

    last: dict[str, Any] = {
        "output_weight": rng.normal(size=(2, 2)),
        "output_bias": rng.normal(size=2),
    }
    probes = [
        made_probe(sites, weight(1), np.array([0.5])),
        made_probe(
            sites, weight(2), rng.normal(size=2), activation="relu", pool=MultiMax(), **last
        ),
        made_probe(sites, weight(1), np.array([-1.0]), pool=Mean()),
    ]
    given = [{"probe": one, "over": "all", "point": None, "layer": None} for one in probes]
    rules: list[dict[str, Any]] = [
        {k: v for k, v in {**RULE, "name": f"r{i}", **one}.items() if v is not None}
        for i, one in enumerate(given)
    ]
    plan = plan_of(rules=[*rules, {**RULE, "name": "r3", "over": "all"}], max_tokens=MOST)
    assert plan is not None and plan.capture is not None
    assert [(r.stream, r.column) for r in plan.capture.rules] == [(0, 0), (0, 1), (0, 3), (1, 0)]
    rows = rng.normal(size=(PROMPT, 2, 4)).astype(np.float32)
    rows[2] = np.inf
    made = []
    for stream in plan.capture.streams:
        making: Any = stream.making
        matrices = [np.frombuffer(plan.capture.projections[d], np.float32) for d in making.digests]
        of_sites = [
            rows[:, sites.index(s)] @ m.reshape(-1, 4).T
            for s, m in zip(stream.sites, matrices, strict=True)
        ]
        made.append(torch.from_numpy(np.stack(of_sites, 1)))
    finite = np.delete(rows, 2, axis=0)
    for parts in ([1, 4], [1] * PROMPT):
        watches, first = RuleWatches(), 0
        watch, other = (watches.open(name, plan.capture, PROMPT, MOST) for name in "ab")
        assert watch is not None and other is not None
        for size in parts:
            # Another completion has the rows in the other order.
            at = np.arange(first, first + size)
            back = PROMPT - 1 - at
            values = [torch.cat([m[at], m[back]]) for m in made]
            owners = [("a", size), ("b", size)]
            watches.add([CapturedChunk(np.concatenate([at, at]), values, 0, owners)])
            first += size
        for of, seen in ((watch, finite), (other, finite[::-1])):
            results: dict[str, Any] = of.results(PROMPT + 1)
            for i, probe in enumerate(probes):
                scores = pooled(probe.pool, numbers_of(probe, seen))
                result = results[f"r{i}"]
                fires = sum(score > 0 for score in scores)
                assert (result.rows, result.fired) == (PROMPT, fires)
                of_scores = (max(scores), min(scores))
                assert (result.max, result.min) == pytest.approx(of_scores, abs=1e-5)
                assert result.last == pytest.approx(scores[-1], abs=1e-5)
    largest = float((finite[:, 1] @ np.array(VECTOR)).max())
    assert results["r3"].max == pytest.approx(largest, abs=1e-5)


def test_scores_that_are_no_numbers_never_fire() -> None:
    """An infinity may, and is left out of what is said of the scores."""
    plan = plan_for({"over": "all"}, {"over": "all", "below": True})
    watches = RuleWatches()
    watch = watches.open("a", plan, PROMPT, MOST)
    assert watch is not None
    scores = np.array([[np.nan, np.inf, 1.0, -1.0], [np.nan, np.nan, np.nan, np.nan]])
    watches.add([chunk(plan, {"a": [0, 1, 2, 3]}, scores)])
    seen: Any = watch.results(PROMPT)
    first, second = seen.values()
    assert (first.fired_at, first.fired, first.rows) == (1, 2, 4)
    assert (first.max, first.min, first.mean) == (1.0, -1.0, 0.0)
    assert (second.fired_at, second.fired, second.rows) == (None, 0, 4)
    assert (second.max, second.min, second.mean) == (None, None, None)


def test_rules_at_one_place_over_the_same_positions_share_a_stream() -> None:
    rules: list[dict[str, Any]] = [{}, {"threshold": 1}, {"probe": [1.0, 0.0, 0.0, 0.0]}]
    rules += [{"layer": 0}, {"over": "all"}]
    plan = plan_for(*rules)
    assert [(r.stream, r.column) for r in plan.rules][:3] == [(0, 0), (0, 1), (0, 2)]
    # The last two have the same matrix.
    assert len({r.stream for r in plan.rules}) == 2 == len(plan.streams)
    assert plan.consumers == {} and not plan.cuts
    assert plan_for({"then": "stop"}).cuts


def test_the_watch_of_a_request_that_is_gone_gets_nothing() -> None:
    watches = RuleWatches()
    plan = plan_for({})
    watch = watches.open("a", plan, PROMPT, MOST)
    rows = chunk(plan, {"a": [5, 6]}, np.ones((1, 20)))
    watches.add([rows])
    seen = None if watch is None else watch.results(99)["r0"]
    assert seen is not None and seen.rows == 2
    assert watches.stats.fired == {("", "flag"): 1} and not watches.stats.scores
    del watch
    watches.add([rows])
    asked = plan_of(capture={"inline": {"hooks": {"post_block": [1]}}})
    assert asked is not None and asked.capture is not None
    assert watches.open("b", asked.capture, PROMPT, MOST) is None
