# SPDX-License-Identifier: Apache-2.0
"""Preemption: too few KV blocks for the batch, so that requests are thrown out and recomputed.

What a request generated before comes back as prefill, and must be steered as what was generated;
rows that were delivered before must not be delivered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import READ_TOLERANCE, Reference
from tests.serving.test_async_scheduling import asynchronous, need_asynchronous
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import CAPTURE_POINTS
from vllm.v1.capture.attention import AttentionRows
from vllm.v1.capture.made_rows import MadeRows

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

GENERATED = 45
"""With a prompt of 20: three blocks each at the end, one at the start."""

BASE = {"steering_vectors": {"pre_attn": {0: vector(50)}}}
PREFILL = {"prefill_steering_vectors": {"post_attn": {1: vector(50)}}}
DECODE = {"decode_steering_vectors": {"post_block": {1: vector(50)}}}
BOTH = {
    "prefill_steering_vectors": {"post_block": {1: vector(51)}},
    "decode_steering_vectors": {"post_block": {1: vector(52)}},
}


@pytest.fixture(scope="module", params=["uncached", "cached", "cached, async"])
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Seven usable blocks of 32 (block 0 is upstream's null block)."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    ahead = "async" in request.param
    with asynchronous() if ahead else nullcontext():
        llm = make_llm(
            path,
            enable_steering=True,
            steering_families=["add", "focus"],
            capture_consumers=["inline"],
            capture_points=list(CAPTURE_POINTS),
            enable_prefix_caching="un" not in request.param,
            num_gpu_blocks_override=8,
            max_num_seqs=8,
        )
    if ahead:
        need_asynchronous(llm)
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def test_preempted_requests(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    limit = {"max_tokens": GENERATED}
    asks = [
        Ask(prompt_of(20, 50), {**limit, **DECODE, **capture("all")}),
        Ask(prompt_of(20, 51), {**limit, **BOTH, **capture("all")}),
        Ask(prompt_of(20, 52), {**limit, **BASE, **capture("predicting")}),
        Ask(prompt_of(20, 53), {**limit, **PREFILL, **capture([3, 25, 40, "last_prompt"])}),
        Ask(prompt_of(20, 54), {**limit, **capture("all")}),
        Ask(prompt_of(20, 55), {**limit, **DECODE, **capture(["last_prompt", "last_generated"])}),
        Ask(prompt_of(20, 56), limit),
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert steps.preempted, "nothing was preempted"
    assert {0, 1, 5} & set(steps.recomputed), "no decode-steered request was recomputed"
    for ask, output in zip(asks, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == GENERATED
        judge.check(ask, output)


def test_recomputed_tokens_keep_their_phase(pair: tuple[LLM, Judge]) -> None:
    """The twin: the reference with the generated tokens taken for prompt disagrees."""
    llm, judge = pair
    asks = [
        Ask(prompt_of(20, 60 + i), {"max_tokens": GENERATED, **DECODE, **capture("all")})
        for i in range(5)
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert steps.recomputed
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
        completion = output.outputs[0]
        forgotten = Ask([*ask.prompt, *completion.token_ids[:20]], DECODE)
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        right = judge.reference.run(sequence, serving.deltas_of(ask, len(sequence)))
        wrong = judge.reference.run(sequence, serving.deltas_of(forgotten, len(sequence)))
        late = slice(45, None)
        assert serving.relative(wrong.logits[late], right.logits[late]) >= 0.02


RULE = {"point": "post_block", "layer": models.LAYERS - 1, "probe": vector(57, 1.0)}
STOPS = 60
"""The position of the token that a rule ends an answer with: of the third block."""
FLAGS = [
    {**RULE, "name": "all", "threshold": 0.0, "over": "all", "need": 2, "of": 3},
    {**RULE, "name": "answer", "threshold": 0.0, "below": True, "need": 3},
]
STOP = [{**RULE, "name": "end", "threshold": -1e30, "over": [STOPS], "then": "stop"}, FLAGS[0]]
FOCUS = {"op": "focus", "layers": "all", "span": [4, 5, 30], "factor": 20.0}
SHARE = {"op": "focus", "layers": "all", "span": range(4, 9), "share": 0.5, "positions": [9, 50]}
WEIGHTS = {"heads": "all", "queries": "all", "give": ["weights"]}
PARTS = {
    "heads": {1: "all", 2: [0]},
    "queries": "all_generated",
    "keys": {"few": [3, 40], "rest": {"start": 8}},
    "give": ["mass", "peak", "top"],
    "top": 2,
}
SCORES = {"hooks": {"post_attn": "all"}, "positions": "all", "project": torch.stack([vector(58)])}
KINDS: dict[str, dict[str, Any]] = {
    "rules": {"rules": FLAGS, **DECODE},
    "a rule that stops": {"rules": STOP, **capture("all_generated")},
    "focus": {"steering": [FOCUS], **capture("all", ("z", "post_block"))},
    "a share, and weights": {"steering": [SHARE], "capture": {"inline": {"attention": WEIGHTS}}},
    "weights": {**DECODE, "capture": {"inline": [{"attention": WEIGHTS}, {"attention": PARTS}]}},
    "heads and scores": {
        "capture": {"inline": [capture("all", ("q", "k"))["capture"]["inline"], SCORES]}
    },
    "all at once": {
        "rules": FLAGS,
        "steering": [FOCUS],
        "capture": {"inline": {"attention": PARTS}},
    },
}


def said(completion: Any) -> dict[str, Any]:
    """All that a completion says but its numbers of a float."""
    results = completion.capture_results or {}
    return {
        "tokens": list(completion.token_ids),
        "end": (completion.finish_reason, completion.stop_reason),
        "rules": {n: (r.fired, r.fired_at, r.rows) for n, r in (completion.rules or {}).items()},
        "status": {name: result.status for name, result in results.items()},
        "rows": {
            (name, site): (rows.positions.tolist(), rows.token_ids.tolist())
            for name, result in results.items()
            for site, rows in result.payload.items()
        },
        "top": [
            rows.top_positions.tolist()
            for result in results.values()
            for rows in result.payload.values()
            if isinstance(rows, AttentionRows) and "top" in rows.give
        ],
    }


def numbers(completion: Any) -> torch.Tensor:
    """All numbers of a completion, float32, in the order of `said`."""
    parts = [serving.log_probs(completion)]
    for result in (completion.rules or {}).values():
        parts.append(torch.tensor([result.max, result.min, result.mean]))
    for result in (completion.capture_results or {}).values():
        for rows in result.payload.values():
            parts.append(rows._rows() if isinstance(rows, MadeRows) else rows.values)
    return torch.cat([part.flatten().float() for part in parts])


def apart(one: Any, other: Any) -> float:
    """How far the numbers of two completions of one length are apart, relative to the largest."""
    mine, theirs = numbers(one), numbers(other)
    return float((mine - theirs).abs().max() / theirs.abs().max())


@pytest.mark.v2("long")
def test_what_is_asked_is_as_if_nothing_was_preempted(pair: tuple[LLM, Judge]) -> None:
    """Of rules, focus, weights of attention, heads and scores, each computed anew at least once."""
    llm, _ = pair
    asks = [
        Ask(prompt_of(20, 70 + i), {"max_tokens": GENERATED, **fields})
        for i, fields in enumerate(KINDS.values())
    ]
    batches, recomputed = [], set[int]()
    for first in (0, len(asks) // 2 + 1, 1):  # so that each is one of the last to come
        order = [(first + i) % len(asks) for i in range(len(asks))]
        with serving.watching(llm) as steps:
            outputs = serve(llm, [asks[i] for i in order])
        recomputed |= {order[i] for i in steps.recomputed}
        batches.append(dict(zip(order, outputs, strict=True)))
    assert recomputed == set(range(len(asks)))
    for i, (kind, ask) in enumerate(zip(KINDS, asks, strict=True)):
        with serving.watching(llm) as steps:
            [alone] = serve(llm, [ask])
        assert not steps.preempted
        got = [batch[i].outputs[0] for batch in batches]
        assert all(said(one) == said(alone.outputs[0]) for one in got), kind
        assert all(apart(one, alone.outputs[0]) <= READ_TOLERANCE for one in got), kind
        fields = {name: value for name, value in ask.fields.items() if name != "steering"}
        if fields != ask.fields:  # the twin
            [other] = serve(llm, [Ask(ask.prompt, fields)])
            assert apart(got[0], other.outputs[0]) > 100 * READ_TOLERANCE, kind
