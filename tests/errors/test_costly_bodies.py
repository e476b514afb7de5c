# SPDX-License-Identifier: Apache-2.0
"""Small bodies that ask for much work: refused before it is done.

Work is counted, not timed: calls of functions, and the most memory that was held meanwhile. Each
costly request has a twin of the same size that is legal, so that the bounds are of no use against
everybody.
"""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.plans import HIDDEN, VECTOR, config_of, plan_of, with_layers
from vllm.config.points import STREAM_POINTS
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.request.steering import MAX_MODULES
from vllm.v1.interventions.plan import INHERIT, PLAN_FIELDS, VECTOR_FIELDS, Plan
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.steering.modules import Module, parse_module

pytestmark = pytest.mark.quick

LONG = 32_768
"""Tokens of the prompt."""
SHAPE = TapShape(
    hidden_size=HIDDEN, dtype="float32", layers=dict.fromkeys(range(40), LayerShape(STREAM_POINTS))
)
CONFIG = config_of(
    SHAPE,
    steering_families=["add", "ablate", "replace"],
    max_steering_rows=4096,
    max_steering_ops=8,
)
WITH_HEADS = with_layers(SHAPE, SHAPE.layers, heads={"q": (32, 8), "z": (32, 8)})
HEADED = config_of(WITH_HEADS, capture_points=["q", "z"])
EIGHT_B = config_of(
    TapShape(
        hidden_size=4096,
        dtype="bfloat16",
        layers=dict.fromkeys(range(32), LayerShape(STREAM_POINTS)),
        lenses={"logit": [("post_block", layer) for layer in range(32)]},
        vocab_size=128_256,
        lens_rows=128,
    )
)
SMALL = config_of(
    SHAPE,
    steering_families=["add", "ablate", "replace"],
    max_steering_rows=4096,
    max_steering_ops=8,
    max_steering_configs=64,
    max_request_work=1 << 18,
)
"""About 26 ms a request."""
SMALLEST = config_of(
    SHAPE,
    steering_families=["add", "ablate"],
    max_steering_rows=4096,
    max_steering_ops=8,
    max_request_work=1 << 12,
)
PROMPT = 4096


class Cost:
    """Counts while it is entered: calls of functions, then bytes (both at once would add up)."""

    def __init__(self, fields: dict[str, Any], **settings: Any) -> None:
        self.calls = self.peak = 0
        self.settings = {"config": CONFIG, "prompt": LONG, **settings}
        self.plan: Plan | None = None
        self.error = ""
        sys.setprofile(self._called)
        self._ask(fields)
        sys.setprofile(None)
        tracemalloc.start()
        self._ask(fields)
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    def _ask(self, fields: dict[str, Any]) -> None:
        try:
            self.plan = plan_of(**self.settings, **fields)
        except InterventionError as error:
            self.error = str(error)


def replace(positions: list[Any], rows: int) -> dict[str, Any]:
    values = np.arange(rows * HIDDEN, dtype=np.float32).reshape(rows, HIDDEN)
    op = {"op": "replace", "point": "pre_attn", "layers": [0], "positions": positions}
    return {"steering": [{**op, "values": values}]}


def test_positions_of_replace_end_at_the_first_repeat() -> None:
    hostile = Cost(replace([{}] * 2000, 1))
    assert "steering[0].positions: names position 0 twice" in hostile.error
    legal = Cost(replace(list(range(2000)), 2000))
    assert legal.plan is not None
    # One entry is expanded, and no more: 32k positions, where 2,000 entries would be 65 million.
    assert hostile.peak < 16 << 20
    assert hostile.calls < 5 * legal.calls + 5 * LONG


def test_layers_end_at_the_first_repeat() -> None:
    def of(layers: list[Any]) -> dict[str, Any]:
        return {"capture": {"inline": {"hooks": {"pre_attn": layers}}}}

    hostile = Cost(of(["all"] * 400_000))
    assert "hooks.pre_attn: names layer 0 twice" in hostile.error
    legal = Cost(of([str(n) for n in range(40)]))
    assert legal.plan is not None
    assert hostile.calls < 2 * legal.calls
    assert hostile.peak < 4 << 20


def test_n_multiplies_what_is_sent_and_what_comes_back() -> None:
    """The same vectors, or rows, are legal for as many completions as they are few; `n` of one
    prompt, or the prompts of one body."""
    values, rows = replace(list(range(2000)), 2000), capture("all_prompt")
    most = (64 << 20) // (LONG * 4 * HIDDEN)
    assert Cost({**values, "n": 100}).plan is not None
    assert "steering: takes the request past max_request_work" in Cost({**values, "n": 400}).error
    for times in ("n", "num_prompts"):
        assert Cost({**rows, times: most}).plan is not None
        assert "capture_inline_max_bytes" in Cost({**rows, times: most + 1}).error
    one = {"steering_vectors": {"pre_attn": {0: VECTOR}}}
    assert Cost({**one, "num_prompts": 1000}).plan is not None
    assert "steering_vectors: takes the request past" in Cost({**one, "num_prompts": 20_000}).error


def weights(heads: Any, ranges: int = 1, **asked: Any) -> dict[str, Any]:
    keys = {str(n): {"start": n} for n in range(ranges)}
    asked = {"heads": heads, "queries": "all_prompt", "keys": keys, "give": ["mass"], **asked}
    return {"capture": {"inline": {"attention": asked}}}


def test_attention_weights_are_counted_before_any_is_made() -> None:
    """All queries of a long prompt for some heads are legal, and so are all heads of one query, or
    many ranges of one head; two of these together are not."""
    every: dict[str, Any] = {"config": HEADED, "prompt": PROMPT}
    peaks: dict[str, Any] = {"ranges": 64, "give": ["peak"]}
    legal = (
        Cost(weights({"0-39": "0-11"}), **every),
        Cost(weights("all", queries="last_prompt", **peaks), config=HEADED),
        Cost(weights({0: 0}, **peaks), **every),
    )
    assert all(cost.plan is not None for cost in legal), [cost.error for cost in legal]
    costly = (
        Cost(weights("all"), **every),
        Cost(weights({"0-39": 0}), config=HEADED),
        Cost(weights({"0-11": 0}, **peaks), **every),
    )
    for cost in costly:
        assert cost.error.startswith("capture.inline.attention: takes the request past"), cost.error


def test_attention_is_counted_of_all_positions_that_are_captured() -> None:
    """It is read of each of them: with rows of all of a long prompt, so are all its weights."""
    rows = {"hooks": {"q": {0: [0]}}, "positions": "all_prompt"}
    asked = {"heads": "all", "queries": "last_prompt", "give": ["weights"]}
    every: dict[str, Any] = {"config": HEADED, "prompt": PROMPT}
    for legal in (
        [rows],
        [{"attention": asked}],
        [rows, {"attention": {**asked, "heads": {0: 0}}}],
    ):
        assert Cost({"capture": {"inline": legal}}, **every).plan is not None
    costly = Cost({"capture": {"inline": [rows, {"attention": asked}]}}, **every)
    assert costly.error.startswith("capture.inline[1].attention: takes the request past")


@pytest.mark.parametrize("fuses", [False, True])
def test_focus_is_counted_before_any_is_made(fuses: bool) -> None:
    """By queries, keys and heads; kernels make many more in the same time, of fewer runs."""
    shape = msgspec.structs.replace(WITH_HEADS, fuses_focus=fuses)
    config = config_of(shape, capture_points=["q", "z"], steering_families=["focus"])

    def of(heads: Any, runs: int, **more: Any) -> dict[str, Any]:
        op = {"op": "focus", "heads": heads, "span": [*range(0, 2 * runs, 2)], "factor": 2.0}
        return {"steering": [{**op, **more}]}

    prompt = LONG if fuses else PROMPT
    legal = (
        of("all" if fuses else {"0-5": "all"}, 1),
        of("all", 64, positions="last_prompt"),
        of({"0-3": "all"}, 64),
    )
    for fields in legal:
        cost = Cost(fields, config=config, prompt=prompt)
        assert cost.plan is not None and cost.plan.steering is not None, cost.error
        assert cost.plan.steering.key_weights > 0
    for fields in (of("all", 64), {**of({"0-3": "all"}, 64), "n": 100}):
        refused = Cost(fields, config=config, prompt=prompt)
        assert refused.error.startswith("steering: takes the request past"), refused.error


def test_a_step_is_told_what_its_queries_cost() -> None:
    def key_weights(**asked: Any) -> int:
        plan = Cost(weights({0: [0, 1, 2], 1: 0}, **asked), config=HEADED, prompt=64).plan
        assert plan is not None and plan.capture is not None
        return plan.capture.key_weights

    assert key_weights(ranges=0, give=["weights"]) == 4
    assert key_weights(ranges=64) == 8
    assert key_weights(ranges=64, give=["peak", "top"], top=3) == 4 * 66


def test_exceptions_are_charged_and_taken_away_at_once() -> None:
    """Twice as many cost twice as much: no union grows with each of them."""

    def of(count: int) -> dict[str, Any]:
        return capture(["all", *({"except": [2 * p + 1]} for p in range(count))])

    half, whole = Cost(of(1000)), Cost(of(2000))
    assert half.plan is not None and whole.plan is not None
    assert whole.calls < 2.5 * half.calls
    odd = {"except": {"start": 1, "step": 2}}
    assert Cost(capture(["all", *[odd] * 8])).plan is not None
    refused = Cost(capture(["all", *[odd] * 64])).error
    assert ".except: takes the request past max_request_work" in refused


def under_lens(positions: Any, **lens: Any) -> dict[str, Any]:
    asked = {"hooks": {"post_block": "all"}, "positions": positions}
    return {"capture": {"inline": {**asked, "lens": {"name": "logit", "top_k": 1, **lens}}}}


def test_rows_under_lenses_are_counted_before_any_is_made() -> None:
    """All layers of a long prompt, or of one for many completions, or with many tokens to rank, are
    too much; those of some of its positions, or of one completion, or with few tokens are not."""
    every: dict[str, Any] = {"config": EIGHT_B, "prompt": 4 * PROMPT}
    legal = (
        Cost(under_lens("last_prompt", tokens=[1] * 32), **every),
        Cost(under_lens({"start": 0, "stop": PROMPT}), **every),
        Cost(under_lens({"start": 0, "stop": PROMPT}), **every, max_tokens=9000),
    )
    assert all(cost.plan is not None for cost in legal), [cost.error for cost in legal]
    costly = (
        Cost(under_lens("all_prompt"), **every),
        Cost(under_lens({"start": 0, "stop": PROMPT}), **every, n=4),
        Cost(under_lens({"start": 0, "stop": PROMPT}, tokens=[1] * 32), **every, n=2),
    )
    for cost in costly:
        assert cost.error.startswith("capture.inline.lens: takes the request past"), cost.error


def capture(positions: Any) -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": positions}}}


def ablations(kinds: int) -> list[dict[str, Any]]:
    """Operations at all sites whose positions differ: 2 ** kinds programs, of 960 entries each."""
    op = {"op": "ablate", "point": "all", "layers": "all"}
    bits = [[p for p in range(2048) if p >> kind & 1] for kind in range(kinds)]
    return [
        {**op, "direction": [1.0, 2.0, 3.0, 4.0 + i], "positions": bits[i % kinds]}
        for i in range(8)
    ]


def test_many_programs_of_many_operations_are_charged_before_they_are_made() -> None:
    """Eight vectors make 256 programs: a plan of 0.2 MB, which each of `n` completions is sent."""
    allowed = Cost({"steering": ablations(8)}, prompt=PROMPT)
    assert allowed.plan is not None
    assert Cost({"steering": ablations(3), "n": 100}, prompt=PROMPT).plan is not None
    often = Cost({"steering": ablations(8), "n": 2000}, prompt=PROMPT)
    tight = Cost({"steering": ablations(8)}, prompt=PROMPT, config=SMALL)
    for refused in (often, tight):
        assert "steering: takes the request past max_request_work" in refused.error
    assert tight.peak + 200_000 < allowed.peak


def test_operations_on_heads_are_charged_as_they_are_read() -> None:
    """They may be any number, as they come to one factor a head; thousands are too much to read."""
    config = config_of(WITH_HEADS, steering_families=["scale"], steering_points=["z"])
    entry = {"op": "scale", "point": "z", "layers": "all", "factor": 0.5}

    def of(count: int) -> Cost:
        return Cost({"steering": [entry] * count}, config=config, prompt=PROMPT)

    assert of(100).plan is not None
    costly, twice = of(20_000), of(40_000)
    assert "steering[" in costly.error and "takes the request past" in costly.error
    assert twice.calls < 1.1 * costly.calls


def modules(scale: float) -> dict[str, Any]:
    """Names whose sums have to be looked at if the scale is large: they might overflow."""
    return {"steering_modules": [("m", scale), ("m", -scale)] * (MAX_MODULES // 2)}


def module(largest: float = 1.0) -> Module:
    return parse_module(
        {point: {"0-39": [largest] * HIDDEN} for point in STREAM_POINTS},
        "m",
        SHAPE,
        CONFIG.steering_config,
    )


def test_sums_of_modules_that_may_overflow_are_charged_before_they_are_made() -> None:
    registered = {"modules": {"m": module(1e7)}}
    assert Cost(modules(1.0), **registered).plan is not None
    assert Cost(modules(1e30), **registered).plan is not None  # looked at: 0.1 MB
    tight = config_of(SHAPE, max_request_work=1 << 12)
    assert Cost(modules(1.0), config=tight, **registered).plan is not None
    refused = Cost(modules(1e30), config=tight, **registered).error
    assert "steering_modules: takes the request past max_request_work" in refused


COSTLY: dict[str, dict[str, Any]] = {
    **{
        field: {field: {"pre_attn": {0: {"vector": VECTOR, "positions": [at] * 20_000}}}}
        for field, at in zip(VECTOR_FIELDS, (0, 0, PROMPT), strict=True)
    },
    "steering_modules": modules(1e30),
    "steering": {"steering": ablations(8)},
    INHERIT: {INHERIT: False, "n": 16_000, "num_prompts": 1000},
    "capture": capture([0] * 20_000),
    "rules": {
        "rules": [
            {
                "name": "r",
                "point": "pre_attn",
                "layer": 0,
                "probe": VECTOR,
                "threshold": 0,
                "over": [0] * 20_000,
            }
        ]
    },
}
"""A body for each field of a request that makes the server work."""


@pytest.mark.parametrize("field", PLAN_FIELDS)
def test_each_field_charges_the_budget(field: str) -> None:
    """A new field has to be in `COSTLY`. Whatever it puts into a plan is charged in any case."""
    tight = {"config": SMALLEST, "prompt": PROMPT, "modules": {"m": module(1e7)}}
    refused = Cost(COSTLY[field], **tight).error
    assert "takes the request past max_request_work=" in refused
    assert refused.startswith(field)
    ample = {**tight, "config": CONFIG}
    assert (Cost(COSTLY[field], **ample).plan is not None) == (field != INHERIT)


class Letters:
    """A tokenizer of single letters."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


ALPHABET = "".join(chr(97 + n) for n in range(26))


@pytest.mark.parametrize(
    ("legal", "hostile", "found"),
    [
        ({"text": ALPHABET * 70}, {"text": ALPHABET * 40_000}, "is not in the prompt"),
        (
            {"token_ids": [*range(100, 2000)]},
            {"token_ids": [*range(100, 2000)] * 600},
            "has 1140000 tokens, the prompt has 2000",
        ),
    ],
)
def test_what_is_longer_than_the_prompt_is_not_looked_for(
    legal: dict[str, Any], hostile: dict[str, Any], found: str
) -> None:
    settings = {"prompt": 2000, "tokenizer": Letters()}
    allowed = Cost(capture(legal), **settings)
    refused = Cost(capture(hostile), **settings)
    assert allowed.plan is not None
    assert found in refused.error, refused.error
    assert refused.calls < 2 * allowed.calls
    assert refused.peak < 2 * allowed.peak


def costly(chance: random.Random) -> dict[str, Any]:
    """Fields that make much of few bytes."""
    times = chance.choice([1, 3, 30, 300])
    start, step = chance.randrange(40), chance.choice([1, 2, 2, 3, 7])
    entry: Any = chance.choice(
        [
            {},
            "all",
            start,
            {"start": start, "step": step},
            {"token_ids": [100 + start]},
            {"token_ids": [100 + start, 101 + start], "which": "last"},
            {"text": "ab" * chance.choice([1, 3, 3000])},
        ]
    )
    positions = chance.choice([entry, [entry] * times, list(range(times)), range(10**9)])
    layers = chance.choice(["all", [0], ["all"] * times, list(range(min(times, 40)))])
    vector = {"vector": [1.0] * HIDDEN, "positions": positions}
    match chance.randrange(4):
        case 0:
            hooks = {point: layers for point in STREAM_POINTS[: chance.randint(1, 3)]}
            asked = {"hooks": hooks, "positions": positions}
            by_layer = {"pre_attn": {key: [[1.0] * HIDDEN] for key in ("0-39", *layers)}}
            several = [asked, {**asked, "project": by_layer}] * min(times, 8)
            return {"capture": {"inline": chance.choice([asked, asked, several])}}
        case 1:
            tiers = ["steering_vectors", "prefill_steering_vectors", "decode_steering_vectors"]
            return {
                tier: {"pre_attn": dict.fromkeys(range(min(times, 40)), vector)} for tier in tiers
            }
        case 2:
            op = {"op": "add", "point": "pre_attn", "layers": layers, **vector}
            return {"steering": [op] * min(times, 8), "n": chance.choice([1, 100, 16_000])}
        case _:
            return replace(positions, times) | {"n": chance.choice([1, 16_000])}


def size_of(fields: dict[str, Any]) -> int:
    """Bytes of a body with these fields; an array's as they are, a range as it is written."""
    return len(json.dumps(fields, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v)))


def test_no_body_costs_much_more_than_its_bytes_and_the_limit() -> None:
    chance = random.Random(0)
    answers = {"legal": 0, "too much": 0, "wrong": 0}
    for _ in range(150):
        fields = costly(chance)
        cost = Cost(fields, config=SMALL, prompt=PROMPT, tokenizer=Letters())
        size = size_of(fields) + 4 * PROMPT  # the prompt is a part of it
        assert cost.calls < 100_000 + 40 * size, (cost.calls, size, str(fields)[:300])
        assert cost.peak < (16 << 20) + 100 * size, (cost.peak, size, str(fields)[:300])
        kind = "legal" if cost.plan else "too much" if "max_request_work" in cost.error else "wrong"
        answers[kind] += 1
    assert min(answers.values()) > 15, answers


def test_without_the_limit_they_would_cost_more() -> None:
    """The twin: the same body, in an engine that allows it."""
    steps = [{"start": n, "step": 2} for n in range(40)]
    fields = {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": steps}}}
    refused = Cost(fields, config=SMALL, prompt=PROMPT)
    assert "capture.inline.positions[7]: takes the request past" in refused.error
    allowed = Cost(fields, prompt=PROMPT)
    assert allowed.plan is not None
    assert allowed.calls > 3 * refused.calls
