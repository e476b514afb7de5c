# SPDX-License-Identifier: Apache-2.0
"""Rules that force tokens: an answer that was cut goes on as one pass over its text says, in
engines that chunk, preempt, draft and run ahead.

The oracle is the answer itself, sent as a prompt: each token that was not forced has the largest
log-probability there, and the rows are those that the answer's capture has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.serving.test_rules import (
    DRAFTS,
    GENERATED,
    LIMIT,
    NEVER,
    PROMPTS,
    SITE,
    llm,
    plain,
    rule,
)
from tests.support import serving
from tests.support.serving import Ask, capture, serve, vector, worst_row
from vllm import LLM
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.full

__all__ = ["DRAFTS", "llm"]

FORCED = [11, 45, 7]
CLOSE = 1e-2
"""Distance of a row, as a share of its length, that chunks and TF32 on a GPU make."""
STEERED = {"steering_vectors": {"post_attn": {0: vector(70)}}}


def forcing(threshold: float, seed: int = 5, ids: list[int] | None = None, **more: Any) -> Any:
    return rule(seed=seed, threshold=threshold, then={"force": ids or FORCED}, **more)


def replay(llm: LLM, prompt: list[int], answer: list[int], fields: dict[str, Any]) -> Any:
    """Rows of prompt and answer in one pass, and the rank of each token of the answer."""
    asked = {"max_tokens": 1, "prompt_logprobs": 1, **capture("all_prompt", [SITE[0]], [SITE[1]])}
    [output] = serve(llm, [Ask(prompt + answer, {**asked, **fields})], log_probs=False)
    rows = serving.row_tensors(output.outputs[0])[SITE]
    logs = output.prompt_logprobs[len(prompt) :]
    ranks = [step[token].rank for step, token in zip(logs, answer, strict=True)]
    return rows, ranks


def check(llm: LLM, ask: Ask, output: Any, one: dict[str, Any], replayed: dict[str, Any]) -> int:
    """The answer is cut where its own rows say, and goes on; returns the position of the cut."""
    [done] = output.outputs
    answer = list(done.token_ids)
    rows, ranks = replay(llm, ask.prompt, answer, replayed)
    scores = (rows.double() @ one["probe"].double()).numpy()
    first = len(ask.prompt)
    at = first + int(np.argmax(scores[first:] > one["threshold"]))
    assert scores[at] > one["threshold"]
    start = at + 1 - first
    ids = one["then"]["force"]
    assert answer[start : start + len(ids)] == ids
    assert len(answer) == GENERATED and done.finish_reason == "length"
    free = [r for i, r in enumerate(ranks) if not start <= i < start + len(ids)]
    assert free == [1] * len(free), "a token that was not forced is another than the model's"
    assert ranks[start : start + len(ids)] != [1] * len(ids), "what was forced is what would come"
    result = done.rules[one["name"]]
    assert (result.fired_at, result.forced_at) == (at, at + 1)
    assert result.rows == len(answer) - 1
    assert result.max == pytest.approx(scores[first:-1].max(), rel=1e-3)
    if "capture" in ask.fields:
        got = output.capture_results["inline"]
        assert got.status == "ok", got.error
        captured = got.payload[SITE]
        assert captured.positions.tolist() == list(range(first + len(answer) - 1))
        assert worst_row(captured.values, rows[:-1]) <= CLOSE < worst_row(captured.values, rows[1:])
    return at


@pytest.mark.parametrize("steered", [{}, STEERED], ids=["plain", "steered"])
def test_answers_go_on_after_what_was_forced(llm: LLM, steered: dict[str, Any]) -> None:
    """Each prompt of a batch with a threshold of its own; a request beside them is not touched."""
    wants = plain(llm, **steered)
    fields = {**LIMIT, **steered, **capture("all", [SITE[0]], [SITE[1]])}
    asks, rules = [], []
    for i, want in enumerate(wants):
        one = forcing(0.0, seed=i)
        one["threshold"] = want.between({**one, "then": "flag"}, 0.2 + 0.15 * i)
        rules.append(one)
        asks.append(Ask(want.prompt, {**fields, "rules": [one]}))
    beside = Ask(PROMPTS[2][:-3], LIMIT)
    *outputs, bystander = serve(llm, [*asks, beside], log_probs=False)
    ends = [
        check(llm, ask, output, one, steered)
        for ask, output, one in zip(asks, outputs, rules, strict=True)
    ]
    assert len({end - len(want.prompt) for end, want in zip(ends, wants, strict=True)}) > 1
    [alone] = serve(llm, [beside], log_probs=False)
    assert bystander.outputs[0].token_ids == alone.outputs[0].token_ids
    for want, output in zip(wants, outputs, strict=True):
        assert list(output.outputs[0].token_ids) != want.tokens
    scheduler = serving.scheduler_of(llm)
    assert not scheduler.running and not scheduler.requests
    assert scheduler.interventions.tables.matrices.in_use == 0
    assert not llm.llm_engine.output_processor.external_req_ids


def test_a_rule_that_fires_in_the_prompt_puts_the_answers_first_tokens(llm: LLM) -> None:
    [want] = plain(llm, PROMPTS[1:2])
    one = forcing(0.0, over="prompt")
    one["threshold"] = want.between({**one, "then": "flag"}, 0.5)
    [output] = serve(llm, [Ask(want.prompt, {**LIMIT, "rules": [one]})], log_probs=False)
    answer = list(output.outputs[0].token_ids)
    assert answer[: len(FORCED)] == FORCED and len(answer) == GENERATED
    _, ranks = replay(llm, want.prompt, answer, {})
    assert ranks[len(FORCED) :] == [1] * (GENERATED - len(FORCED))
    result = output.outputs[0].rules["r"]
    assert (result.fired_at, result.forced_at) == (want.fires(one)[0], len(want.prompt))


def test_two_rules_force_in_their_turn_and_a_third_stops(llm: LLM) -> None:
    """Each once; where two fire at a row the first one goes, and a rule that stops goes before."""
    [want] = plain(llm, PROMPTS[:1])
    low = want.between(rule(), 0.9)
    first = forcing(low, name="first", ids=[3])
    second = forcing(low, name="second", ids=[4])
    fields = {**LIMIT, "rules": [first, second]}
    [output] = serve(llm, [Ask(want.prompt, fields)], log_probs=False)
    [done] = output.outputs
    at = [done.rules[name].forced_at for name in ("first", "second")]
    answer = list(done.token_ids)
    assert at[0] < at[1] and [answer[p - len(want.prompt)] for p in at] == [3, 4]
    _, ranks = replay(llm, want.prompt, answer, {})
    assert [i for i, r in enumerate(ranks) if r > 1] == [p - len(want.prompt) for p in at]

    stop = rule("stop", threshold=low, then="stop")
    fields = {**LIMIT, "rules": [first, second, stop]}
    [output] = serve(llm, [Ask(want.prompt, fields)], log_probs=False)
    assert output.outputs[0].stop_reason == "rule:stop"
    assert output.outputs[0].rules["first"].forced_at is None


def test_without_room_it_ends_the_answer(llm: LLM) -> None:
    """One token more, and the answer goes on."""
    [want] = plain(llm, PROMPTS[:1])
    one = forcing(want.between(rule(), 0.5))
    kept = want.fires({**one, "then": "flag"})[0] + 1 - len(want.prompt)
    for more, ends in ((0, True), (1, False)):
        limit = {"max_tokens": kept + len(FORCED) + more}
        [output] = serve(llm, [Ask(want.prompt, {**limit, "rules": [one]})], log_probs=False)
        [done] = output.outputs
        expected = want.tokens[:kept] if ends else [*want.tokens[:kept], *FORCED]
        assert list(done.token_ids)[: len(expected)] == expected
        assert len(done.token_ids) == (kept if ends else kept + len(FORCED) + 1)
        assert done.stop_reason == ("rule:r" if ends else None)
        assert done.finish_reason == ("stop" if ends else "length")


def test_completions_that_are_sampled(llm: LLM) -> None:
    """Each of several is cut by itself; with a seed the whole is the same twice."""
    threshold = plain(llm, PROMPTS[:1])[0].between(rule(), 0.3)
    config = llm.llm_engine.vllm_config
    chunks = config.scheduler_config.long_prefill_token_threshold
    # Upstream's CPU runner samples with no seed in chunks, and with drafts not twice the same.
    seed = None if chunks or config.speculative_config is not None else 3

    def completions(threshold: float) -> list[Any]:
        fields = {"rules": [forcing(threshold)], "n": 3, "temperature": 1.0, "seed": seed}
        [output] = serve(llm, [Ask(PROMPTS[0], {**LIMIT, **fields})], log_probs=False)
        return sorted(output.outputs, key=lambda completion: completion.index)

    once, again, never = completions(threshold), completions(threshold), completions(NEVER)
    for done in once:
        assert len(done.token_ids) == GENERATED
        if (at := done.rules["r"].forced_at) is not None:
            start = at - len(PROMPTS[0])
            assert list(done.token_ids)[start : start + len(FORCED)] == FORCED
    forced = [done.rules["r"].forced_at is not None for done in once]
    assert any(forced)
    if seed is not None:
        assert [c.token_ids for c in once] == [c.token_ids for c in again]
        same = [a.token_ids == b.token_ids for a, b in zip(once, never, strict=True)]
        assert same == [not was for was in forced]


def test_deltas_are_parts_of_the_whole(llm: LLM) -> None:
    threshold = plain(llm, PROMPTS[:1])[0].between(rule(), 0.3)
    ask = Ask(
        PROMPTS[0],
        {**LIMIT, "rules": [forcing(threshold)], **capture("all", [SITE[0]], [SITE[1]])},
    )
    [whole] = serve(llm, [ask], log_probs=False)
    params = ask.params(False)
    params.output_kind = RequestOutputKind.DELTA
    llm.llm_engine.add_request("deltas", {"prompt_token_ids": ask.prompt}, params)
    tokens: list[int] = []
    parts: list[torch.Tensor] = []
    positions: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            assert isinstance(output, RequestOutput)
            [new] = output.outputs
            tokens += new.token_ids
            assert new.capture_results is not None
            rows = new.capture_results["inline"].payload[SITE]
            positions += rows.positions.tolist()
            parts.append(rows.values)
    assert tokens == list(whole.outputs[0].token_ids)
    rows = whole.capture_results["inline"].payload[SITE]
    assert positions == rows.positions.tolist()
    assert worst_row(torch.cat(parts), rows.values) <= CLOSE


def test_an_answer_that_goes_on_can_be_aborted(llm: LLM) -> None:
    engine = llm.llm_engine
    threshold = plain(llm, PROMPTS[:1])[0].between(rule(), 0.9)
    ask = Ask(PROMPTS[0], {**LIMIT, "rules": [forcing(threshold)]})
    engine.add_request("gone", {"prompt_token_ids": ask.prompt}, ask.params(False))
    for _ in range(200):
        engine.step()
        if any("~" in name for name in engine.output_processor.request_states):
            break
    else:
        pytest.fail("nothing was forced")
    engine.abort_request(["gone"])
    serve(llm, [Ask(PROMPTS[1], LIMIT)], log_probs=False)
    assert not serving.scheduler_of(llm).requests
    assert not engine.output_processor.request_states
