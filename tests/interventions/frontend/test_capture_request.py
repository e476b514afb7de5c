# SPDX-License-Identifier: Apache-2.0
"""From what a user writes about capture to the rows that leave the device."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import GAPS, HIDDEN, SHAPE, config_of, plan_of
from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.capture import parse_capture
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.plan import CapturePlan, Selection
from vllm.v1.interventions.positions import Positions

pytestmark = pytest.mark.quick

HOOKS = {"post_block": [1]}
PROMPT, MAX_TOKENS = 5, 4
ROWS = PROMPT + MAX_TOKENS - 1
"""The last generated token is not fed back: the rows are at 0-7."""

SPECS = {name: ConsumerSpec(name) for name in ("inline", "one", "two")}


def prompt_of(length: int = PROMPT, max_tokens: int = MAX_TOKENS) -> Prompt:
    return Prompt(list(range(length)), max_tokens, None, Work(1 << 23))


def parse(value: Any, prompt: Prompt) -> CapturePlan:
    plan = parse_capture(value, "capture", SHAPE, prompt, SPECS)
    assert plan is not None
    return plan


def select(positions: Any, prompt: int = PROMPT, max_tokens: int = MAX_TOKENS) -> Selection:
    value = {"inline": {"hooks": HOOKS, "positions": positions}}
    return parse(value, prompt_of(prompt, max_tokens)).consumers["inline"]


def chosen(positions: Any) -> list[int]:
    return Positions.from_flat(select(positions).runs).array().tolist()


SELECTORS: list[tuple[Any, list[int]]] = [
    ("last_prompt", [4]),
    ("all_prompt", [0, 1, 2, 3, 4]),
    ("all_generated", [5, 6, 7]),
    ("last_generated", [5, 6, 7]),  # which one is known at the end
    ("predicting", [4, 5, 6, 7]),
    ("all", [0, 1, 2, 3, 4, 5, 6, 7]),
    ([0, 3], [0, 3]),
    ([3, 0, 3], [0, 3]),
    ((0, 3), [0, 3]),
    (range(2, 5), [2, 3, 4]),
    ([-1], [4]),
    ([-5], [0]),
    ([-1, 7], [4, 7]),
    ({"start": 2}, [2, 3, 4, 5, 6, 7]),
    ({"stop": 2}, [0, 1]),
    ({"start": 1, "stop": 8, "step": 3}, [1, 4, 7]),
    ({"start": -2, "stop": -1}, [3]),
    ({"start": -2}, [3, 4, 5, 6, 7]),
    ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
    (["last_prompt", 0], [0, 4]),
    ([{"start": 0, "stop": 2}, "all_generated", -1], [0, 1, 4, 5, 6, 7]),
    (["last_prompt", "all_generated"], [4, 5, 6, 7]),
    ({"start": 0, "stop": 2, "of": "generated"}, [5, 6]),
    ({"start": 1, "of": "generated", "step": 2}, [6]),
    ({"of": "generated"}, [5, 6, 7]),
    ({"at": [2, 0], "of": "generated"}, [5, 7]),
    ({"at": [-1, 0]}, [0, 4]),
    (["all", {"except": [0, 7]}], [1, 2, 3, 4, 5, 6]),
    ([{"except": "all_prompt"}, "all", {"except": {"at": [1], "of": "generated"}}], [5, 7]),
    (["all_prompt", {"except": "all_generated"}], [0, 1, 2, 3, 4]),
]


@pytest.mark.parametrize(("positions", "expected"), SELECTORS, ids=[str(s) for s, _ in SELECTORS])
def test_selectors(positions: Any, expected: list[int]) -> None:
    assert chosen(positions) == expected


def test_no_two_selectors_mean_the_same() -> None:
    names = [s for s in SELECTORS if isinstance(s[0], str)]
    told_apart = {(tuple(rows), select(name).last_generated) for name, rows in names}
    assert len(told_apart) == len(names) == 6


def test_last_prompt_is_the_default() -> None:
    value = {"inline": {"hooks": HOOKS}}
    default = parse(value, prompt_of()).consumers["inline"]
    assert default == select("last_prompt")
    assert default != select("all_prompt")


INDEX = st.integers(-PROMPT, ROWS - 1)
SPAN = st.tuples(INDEX, st.integers(1, ROWS), st.integers(1, 4)).map(
    lambda t: (
        {"start": t[0], "stop": min(t[0] % PROMPT + t[1], ROWS), "step": t[2]}
        if t[0] < 0
        else {"start": t[0], "stop": min(t[0] + t[1], ROWS), "step": t[2]}
    )
)
NAME = st.sampled_from([s for s, _ in SELECTORS if isinstance(s, str)])


@given(st.lists(st.one_of(INDEX, SPAN, NAME), min_size=1, max_size=6))
def test_a_list_is_the_union_of_its_entries(entries: list[Any]) -> None:
    assert chosen(entries) == sorted({p for e in entries for p in chosen([e])})


@given(SPAN)
def test_ranges_are_pythons(span: dict[str, int]) -> None:
    start = span["start"] % PROMPT if span["start"] < 0 else span["start"]
    assert chosen(span) == list(range(start, span["stop"], span["step"]))


@pytest.mark.parametrize(
    ("positions", "only_last"),
    [
        ("last_generated", True),
        (["last_generated", "all_prompt"], True),
        (["last_generated", 2], True),
        (["last_generated", "all_generated"], False),
        (["last_generated", "predicting"], False),
        (["last_generated", 6], True),
        (["last_generated", {"start": 2}], True),
        ("all_generated", False),
    ],
)
def test_only_the_last_generated(positions: Any, only_last: bool) -> None:
    assert select(positions).last_generated is only_last


@pytest.mark.parametrize(
    ("positions", "named"),
    [
        ("all", []),
        ([6, "all_prompt"], [6]),
        ({"start": 3, "stop": 6}, [3, 4, 5]),
        ([-1, {"start": 6}], [4, 6, 7]),
        ({"at": [1], "of": "generated"}, [6]),
        (["all", 2, 6, {"except": [6]}], [2]),
    ],
)
def test_remembers_what_was_named_outright(positions: Any, named: list[int]) -> None:
    assert Positions.from_flat(select(positions).named).array().tolist() == named


def plan(capture: dict[str, Any], **changes: Any) -> CapturePlan:
    plan = plan_of(capture=capture, prompt=PROMPT, max_tokens=MAX_TOKENS, **changes)
    assert plan is not None
    assert plan.capture is not None
    return plan.capture


def test_sites_are_in_the_order_of_the_stream() -> None:
    hooks = {"post_block": [3, 0], "pre_attn": "all", "post_attn": "0-1"}
    sites = [
        ("pre_attn", 0),
        ("post_attn", 0),
        ("post_block", 0),
        ("pre_attn", 1),
        ("post_attn", 1),
        ("pre_attn", 2),
        ("pre_attn", 3),
        ("post_block", 3),
    ]
    assert plan({"inline": {"hooks": hooks}}).sites == sites


def test_rows_are_of_the_models_kind() -> None:
    captured = plan({"inline": {"hooks": HOOKS}})
    assert (captured.hidden_size, captured.dtype) == (HIDDEN, "float32")


def test_a_plan_unites_its_consumers() -> None:
    value = {
        "one": {"hooks": {"post_block": [0, 1]}, "positions": [1]},
        "two": {"hooks": {"post_block": [1], "pre_attn": [3]}, "positions": "all_generated"},
    }
    both = parse(value, prompt_of())
    assert both.sites == [("post_block", 0), ("post_block", 1), ("pre_attn", 3)]
    assert Positions.from_flat(both.runs).array().tolist() == [1, 5, 6, 7]
    assert both.consumers["one"].sites == [("post_block", 0), ("post_block", 1)]
    assert both.consumers["one"].runs == [1, 2]
    assert both.consumers["two"].runs == [5, 8]


def test_layers_without_taps() -> None:
    captured = plan({"inline": {"hooks": {"post_attn": "all"}}}, config=config_of(GAPS))
    assert captured.sites == [("post_attn", 0), ("post_attn", 2)]


def test_one_token_gives_no_generated_row() -> None:
    assert Positions.from_flat(select("predicting", max_tokens=1).runs).array().tolist() == [4]
    with pytest.raises(ValueError, match=r"capture\.inline\.positions: select nothing"):
        select("all_generated", max_tokens=1)


def test_inline_bytes_count_rows_sites_and_width() -> None:
    row = 4 * HIDDEN
    value = {"inline": {"hooks": {"post_block": [0, 1]}, "positions": "all"}}
    exact = config_of(capture_inline_max_bytes=2 * ROWS * row)
    assert plan(value, config=exact).runs == [0, ROWS]
    with pytest.raises(ValueError, match=f"capture.inline: up to {2 * ROWS} rows"):
        plan(value, config=config_of(capture_inline_max_bytes=2 * ROWS * row - 1))


def test_last_generated_is_one_row_inline() -> None:
    row = 4 * HIDDEN
    value = {"inline": {"hooks": {"post_block": [0]}, "positions": ["last_generated", 1]}}
    assert plan(value, config=config_of(capture_inline_max_bytes=2 * row)).runs == [1, 2, 5, 8]
    with pytest.raises(ValueError, match="up to 2 rows"):
        plan(value, config=config_of(capture_inline_max_bytes=2 * row - 1))


def test_a_position_must_fit_the_buffer() -> None:
    row = 4 * HIDDEN
    value = {"inline": {"hooks": {"post_block": [0, 1, 3]}}}
    assert plan(value, config=config_of(capture_buffer_bytes=3 * row)).runs == [4, 5]
    with pytest.raises(ValueError, match="capture: 1 position at once need 48 bytes"):
        plan(value, config=config_of(capture_buffer_bytes=3 * row - 1))


def test_a_prompt_that_sees_both_ways_must_fit_the_buffer() -> None:
    """All that a request may have to compute again at once, with what it generated."""
    row = 4 * HIDDEN
    value = {"inline": {"hooks": {"post_block": [0]}, "positions": "all"}}
    shape = msgspec.structs.replace(SHAPE, whole_prompts=True)
    exact = config_of(shape, capture_buffer_bytes=ROWS * row)
    assert plan(value, config=exact).runs == [0, ROWS]
    small = ROWS * row - 1
    with pytest.raises(ValueError, match=f"capture: {ROWS} positions at once need"):
        plan(value, config=config_of(shape, capture_buffer_bytes=small))
    assert plan(value, config=config_of(capture_buffer_bytes=small)).runs == [0, ROWS]


HUGE = (1 << 23) // Unit.ENTRY + 1
"""Entries, one more than the default of max_request_work allows."""


@pytest.mark.parametrize(
    "positions",
    [
        [0, "last_prompt"] * HUGE,
        range(10**30),
        {"start": 0, "step": 2},
        [{"start": n, "step": 2} for n in range(1000)],
        [*range(0, HUGE, 2), "last_prompt", {"start": 1, "step": 2}],
        {"at": range(HUGE)},
        ["all", {"except": {"step": 2}}],
    ],
    ids=["long list", "long range", "many runs", "of many runs", "mixed", "at", "except"],
)
def test_a_selection_of_too_many_parts_is_refused_soon(positions: Any) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="past max_request_work=8388608"):
        select(positions, prompt=3 * HUGE)
    assert time.process_time() - began < 5


def test_a_selection_of_many_parts_is_resolved_soon() -> None:
    began = time.process_time()
    positions = ["last_prompt", *range(0, 2 * (HUGE - 3), 2)]
    assert len(select(positions, prompt=3 * HUGE).runs) == 2 * len(positions)
    assert time.process_time() - began < 5


def test_what_each_chunk_of_a_stream_takes_is_charged() -> None:
    """By sites and completions, where generated rows leave in the chunks of an answer."""
    layers = {point: "all" for point in ("pre_attn", "post_block")}
    n = (1 << 23) // (Unit.WRITTEN * 2 * len(SHAPE.layers))

    def streamed(n: int, kind: RequestOutputKind, positions: str) -> None:
        value = {"inline": {"hooks": layers, "positions": positions}}
        plan_of(capture=value, n=n, output_kind=kind, max_tokens=3)

    streamed(n // 2, RequestOutputKind.DELTA, "all_generated")
    streamed(n + 1, RequestOutputKind.FINAL_ONLY, "all_generated")
    streamed(n + 1, RequestOutputKind.DELTA, "all_prompt")
    with pytest.raises(ValueError, match=r"capture\.inline: takes the request past max_request"):
        streamed(n + 1, RequestOutputKind.DELTA, "all_generated")
