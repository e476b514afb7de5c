# SPDX-License-Identifier: Apache-2.0
"""Rules: what they say of an answer, and where they end it, is what a replay of the rows that the
same engine captures without them says, in engines that chunk, preempt, draft and run ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.serving import test_speculation
from tests.serving.test_async_scheduling import asynchronous
from tests.support import serving
from tests.support.selected import expected_positions
from tests.support.serving import Ask, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.sampling_params import BeamSearchParams
from vllm.v1.capture.rules import RuleResult

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

GENERATED = 30
PATTERN = prompt_of(4, 100)
PROMPTS = [PATTERN * 5, prompt_of(20, 90), prompt_of(20, 91), PATTERN * 6, prompt_of(9, 93)]
"""Some repeat, so that a drafter has something to propose."""
SITE = ("post_block", models.LAYERS - 1)
LIMIT = {"max_tokens": GENERATED}
NEVER = 1e30

CHUNKED: dict[str, Any] = {
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 8,
    "long_prefill_token_threshold": 7,
    "capture_buffer_bytes": 5 * models.LAYERS * models.HIDDEN * 4,
}
DRAFTS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("chunked", marks=pytest.mark.v2),
        pytest.param("async", marks=pytest.mark.v2),
        "drafts",  # upstream's ngram drafter does not run under the Triton interpreter
    ],
)
def llm(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LLM]:
    """The engine has a rule for all from its start on, which fires where nobody is."""
    file = tmp_path_factory.mktemp("rules") / "rules.json"
    file.write_text(json.dumps({"rules": FOR_ALL}))
    options: dict[str, Any] = {"enable_steering": True, "capture_consumers": ["inline"]}
    options["rules"] = str(file)
    path = tiny_models.path("llama")
    if request.param == "async":
        with asynchronous():
            engine = make_llm(path, **options, max_num_seqs=8)
    else:
        if request.param == "drafts":
            test_speculation.keep_engines_startable()
        engine = make_llm(path, **options, **(CHUNKED if request.param == "chunked" else DRAFTS))
    [known] = engine.steering.rules()
    assert (known["name"], known["threshold"], known["then"]) == ("start", NEVER, "stop")
    assert known["probe_norm"] == pytest.approx(1.0) and "probe" not in known
    yield engine
    shut_down(engine)


def rule(name: str = "r", seed: int = 5, **fields: Any) -> dict[str, Any]:
    point, layer = SITE
    return {"name": name, "point": point, "layer": layer, "probe": vector(seed, 1.0), **fields}


FOR_ALL: list[dict[str, Any]] = [
    {
        **rule("start", threshold=NEVER, then="stop"),
        "over": ["prompt", "generated"],
        "probe": vector(5, 1.0).tolist(),
    }
]


@dataclass(frozen=True)
class Plain:
    """An answer without rules, and the rows of all its tokens but the last."""

    prompt: list[int]
    tokens: list[int]
    rows: torch.Tensor

    def scores(self, rule: dict[str, Any]) -> dict[int, float]:
        """Position -> score, where the rule looks."""
        over = rule.get("over", "generated")
        over = {"generated": "all_generated", "prompt": "all_prompt"}.get(str(over), over)
        positions = expected_positions(over, len(self.prompt), len(self.tokens))
        made = (self.rows.double() @ rule["probe"].double()).tolist()
        return {p: made[p] for p in positions}

    def fires(self, rule: dict[str, Any]) -> list[int]:
        """The positions at which a rule fires, from the definition."""
        scores = self.scores(rule)
        crosses = [
            s < rule["threshold"] if rule.get("below") else s > rule["threshold"]
            for s in scores.values()
        ]
        need = rule.get("need", 1)
        of = rule.get("of", need)
        return [
            position
            for i, position in enumerate(scores)
            if crosses[i] and sum(crosses[max(0, i - of + 1) : i + 1]) >= need
        ]

    def between(self, rule: dict[str, Any], share: float) -> float:
        """A threshold that about `share` of the scores are above, not near to any."""
        scores = np.sort(list(self.scores(rule).values()))
        middle = round((1 - share) * (len(scores) - 1))
        near = range(max(middle - 2, 0), min(middle + 3, len(scores) - 1))
        at = max(near, key=lambda i: scores[i + 1] - scores[i])
        return float(scores[at] + scores[at + 1]) / 2


def plain(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, **more: Any) -> list[Plain]:
    fields = {**LIMIT, **capture("all", [SITE[0]], [SITE[1]]), **more}
    outputs = serve(llm, [Ask(p, fields) for p in prompts], log_probs=False)
    return [
        Plain(p, list(o.outputs[0].token_ids), serving.row_tensors(o.outputs[0])[SITE])
        for p, o in zip(prompts, outputs, strict=True)
    ]


def check(completion: Any, want: Plain, rules: Sequence[dict[str, Any]]) -> int | None:
    """The answer ends where the replay says, and the rules saw what it says; returns where."""
    stops = [
        (fires[0], one["name"])
        for one in rules
        if one.get("then") == "stop" and (fires := want.fires(one))
    ]
    end, name = min(stops, key=lambda s: s[0], default=(None, None))
    last = len(want.prompt) + len(want.tokens) - 1
    kept = want.tokens if end is None else want.tokens[: max(end + 1 - len(want.prompt), 0)]
    assert list(completion.token_ids) == kept
    assert completion.finish_reason == ("length" if end is None else "stop")
    assert completion.stop_reason == (None if end is None else f"rule:{name}")
    seen = last if end is None else end + 1
    assert completion.rules.keys() == {one["name"] for one in rules}
    for one in rules:
        result = completion.rules[one["name"]]
        scores = [s for p, s in want.scores(one).items() if p < seen]
        fires = [p for p in want.fires(one) if p < seen]
        assert isinstance(result, RuleResult)
        assert (result.fired, result.rows) == (len(fires), len(scores))
        assert result.fired_at == (fires[0] if fires else None)
        if scores:
            made = [max(scores), min(scores), sum(scores) / len(scores)]
            assert [result.max, result.min, result.mean] == pytest.approx(made, abs=1e-3)
    return end


def test_answers_end_with_the_token_whose_row_fired(llm: LLM) -> None:
    """Each prompt of a batch with another rule; where another threshold would end it elsewhere."""
    wants = plain(llm)
    for share in (0.6, 0.1):
        chosen = []
        for i, want in enumerate(wants):
            one = rule(seed=i, then="stop", below=i % 2 == 1)
            one["threshold"] = want.between(one, 1 - share if one["below"] else share)
            chosen.append(one)
        asks = [
            Ask(w.prompt, {**LIMIT, "rules": [one]}) for w, one in zip(wants, chosen, strict=True)
        ]
        beside = Ask(prompt_of(15, 99), LIMIT)
        *outputs, bystander = serve(llm, [*asks, beside], log_probs=False)
        found = [
            check(output.outputs[0], want, [one])
            for output, want, one in zip(outputs, wants, chosen, strict=True)
        ]
        ends = [end for end in found if end is not None]
        assert len(ends) == len(found)
        assert bystander.outputs[0].rules is None
        [alone] = serve(llm, [beside], log_probs=False)
        assert bystander.outputs[0].token_ids == alone.outputs[0].token_ids
        if share == 0.6:
            early = ends
    assert all(a <= b for a, b in zip(early, ends, strict=True))
    assert sum(a < b for a, b in zip(early, ends, strict=True)) >= 3, "thresholds changed nothing"
    scheduler = serving.scheduler_of(llm)
    assert not scheduler.running
    assert scheduler.interventions.tables.matrices.in_use == 0, (
        "answers that ended early hold probes"
    )


def test_a_rule_ends_an_answer_below_min_tokens(llm: LLM) -> None:
    """As docs/capture.md says; the same answer is whole where the rule does not fire."""
    fields = {**LIMIT, "min_tokens": GENERATED}
    [want] = plain(llm, PROMPTS[:1], min_tokens=GENERATED)
    one = rule(then="stop")
    one["threshold"] = want.between(one, 0.6)
    rules = (one, {**one, "threshold": NEVER})
    asks = [Ask(want.prompt, {**fields, "rules": [each]}) for each in rules]
    ended, whole = serve(llm, asks, log_probs=False)
    assert check(ended.outputs[0], want, [one]) is not None
    assert len(ended.outputs[0].token_ids) < GENERATED == len(whole.outputs[0].token_ids)


def test_several_rules_beside_captures_and_steering(llm: LLM) -> None:
    """Flags and stops over several positions and windows; one that never fires changes nothing."""
    steered = {"steering_vectors": {"post_attn": {0: vector(70)}}}
    [want] = plain(llm, PROMPTS[:1], **steered)
    rules = [
        rule("often", 1, need=2, of=3),
        rule("prompt", 1, over="prompt"),
        rule("all", 2, over="all", below=True),
        rule("some", 3, over=[3, 4, {"start": 22, "stop": 40, "step": 3}]),
        rule("never", 1, threshold=NEVER, then="stop"),
    ]
    for one in rules[:4]:
        one["threshold"] = want.between(one, 0.5)
    fields = {**LIMIT, **steered, **capture("all_generated", [SITE[0]], "all")}
    [output] = serve(llm, [Ask(want.prompt, {**fields, "rules": rules})], log_probs=False)
    assert check(output.outputs[0], want, rules) is None
    assert output.outputs[0].rules["often"].fired != output.outputs[0].rules["prompt"].fired
    rows = output.capture_results["inline"].payload[SITE]
    assert rows.values.shape[0] == GENERATED - 1

    stop = rule("stop", 1, need=2, of=4, then="stop", threshold=rules[0]["threshold"])
    [output] = serve(llm, [Ask(want.prompt, {**fields, "rules": [*rules, stop]})], log_probs=False)
    end = check(output.outputs[0], want, [*rules, stop])
    assert end is not None
    # What is captured is what a text of that length has: its last token has no row.
    rows = output.capture_results["inline"].payload[SITE]
    assert rows.positions.tolist() == list(range(len(want.prompt), end))
    assert output.capture_results["inline"].status == "ok"


def test_a_rule_that_never_fires_changes_no_bit(llm: LLM) -> None:
    """Of rows and log-probabilities, its own or a bystander's; steering does."""
    never = {"rules": [rule("never", 1, threshold=NEVER, then="stop", over="all")]}
    fields = {**LIMIT, **capture("all", [SITE[0]], "all"), "logprobs": 5}
    steered = {"steering_vectors": {"post_attn": {0: vector(70)}}}

    def bits(*more: dict[str, Any]) -> list[Any]:
        asks = [Ask(p, {**fields, **m}) for p, m in zip(PROMPTS[:2], more, strict=True)]
        outputs = serve(llm, asks, log_probs=False)
        return [
            (
                {site: rows.numpy().tobytes() for site, rows in serving.row_tensors(done).items()},
                [{t: one.logprob for t, one in step.items()} for step in done.logprobs],
            )
            for done in (output.outputs[0] for output in outputs)
        ]

    plain = bits({}, {})
    assert bits(never, {}) == plain == bits(never, never)
    moved = bits({**never, **steered}, {})
    assert moved[0] != plain[0] and moved[1] == plain[1]


def test_an_abort_frees_what_rules_hold(llm: LLM) -> None:
    engine = llm.llm_engine
    held = serving.scheduler_of(llm).interventions.tables.matrices
    before = held.in_use
    asked = Ask(PROMPTS[0], {**LIMIT, "rules": [rule("stop", 33, threshold=NEVER, then="stop")]})
    engine.add_request("gone", {"prompt_token_ids": asked.prompt}, asked.params(False))
    for _ in range(3):
        engine.step()
    assert held.in_use > before
    engine.abort_request(["gone"])
    serve(llm, [Ask(PROMPTS[1], LIMIT)], log_probs=False)
    assert held.in_use == before and not serving.scheduler_of(llm).running
    [want] = plain(llm, PROMPTS[:1])
    [again] = serve(llm, [asked], log_probs=False)
    assert list(again.outputs[0].token_ids) == want.tokens


def test_a_rule_of_the_operator_limits_doses(llm: LLM) -> None:
    """An answer ends where a vector at any layer is long beside its row, and goes on below the
    limit; where the dose is looked at in the prompt, nothing is written."""
    limit = {"name": "limit", "dose": True, "point": "post_block", "layer": "all", "then": "stop"}
    late = [len(PROMPTS[0]) + 3]
    strong = {"post_block": {1: {"vector": vector(70), "positions": late}}}
    read = {"hooks": {"post_block": "all"}, "positions": "all", "dose": True}
    fields = {**LIMIT, "capture": {"inline": read}}
    steered = Ask(PROMPTS[0], {**fields, "steering_vectors": strong})
    [whole] = serve(llm, [steered], log_probs=False)
    doses = whole.capture_results["inline"].payload
    assert [site for site, of in doses.items() if of.values.any()] == [("post_block", 1)]
    found = float(doses["post_block", 1].values[late])
    before = llm.steering.rules()
    try:
        for factor, ends in ((0.99, True), (1.01, False)):
            llm.steering.set_rules([{**limit, "threshold": factor * found}])
            [told] = llm.steering.rules()
            assert told["dose"] is True and told["layer"] == list(range(models.LAYERS))
            [output] = serve(llm, [steered], log_probs=False)
            [answer] = output.outputs
            kept = whole.outputs[0].token_ids[: 4 if ends else None]
            assert list(answer.token_ids) == list(kept)
            assert answer.stop_reason == ("rule:limit" if ends else None)
        llm.steering.set_rules([{**limit, "threshold": 0.001, "over": "all"}])
        early = Ask(
            PROMPTS[0], {**LIMIT, "prefill_steering_vectors": {"post_block": {0: vector(9)}}}
        )
        refused, plain = serve(llm, [early, Ask(PROMPTS[1], LIMIT)], log_probs=False)
        assert refused.outputs[0].token_ids == []
        assert len(plain.outputs[0].token_ids) == GENERATED, "nothing is added to it"
    finally:
        llm.steering.set_rules(FOR_ALL)
    assert llm.steering.rules() == before


def test_a_prompt_may_fire(llm: LLM) -> None:
    """The answer is empty then; with the last row of the prompt too, and not with the next."""
    [want] = plain(llm, PROMPTS[1:2])
    over = [19, 20]
    one = rule(over=over, then="stop")
    scores = want.scores(one)
    one["threshold"] = sum(scores.values()) / 2
    one["below"] = scores[19] < scores[20]
    other = {**one, "below": not one["below"]}
    ask = [Ask(want.prompt, {**LIMIT, "rules": [each], "logprobs": 0}) for each in (one, other)]
    first, second = serve(llm, ask, log_probs=False)
    assert check(first.outputs[0], want, [one]) == 19
    assert first.outputs[0].token_ids == [] and first.outputs[0].logprobs == []
    assert check(second.outputs[0], want, [other]) == 20
    assert len(second.outputs[0].logprobs) == 1


def test_completions_of_a_prompt_end_each_by_itself(llm: LLM) -> None:
    """n > 1: every completion by its own rows, and what it captures is of its own length."""
    more = {**LIMIT, "n": 4, "temperature": 1.0, **capture("all_generated", [SITE[0]], [SITE[1]])}
    # No seed: upstream cannot rewind a CPU's generator where a prompt comes in parts.
    [output] = serve(llm, [Ask(PROMPTS[4], more)], log_probs=False)
    rows = [serving.row_tensors(c)[SITE].double() for c in output.outputs]
    one = rule(then="stop")
    scores = (torch.cat(rows) @ one["probe"].double()).sort().values
    # Between two scores, as the same row may be drawn again: the widest gap of a quarter of them.
    middle = scores[len(scores) // 4 : len(scores) // 2]
    i = int(middle.diff().argmax())
    one["threshold"] = float(middle[i] + middle[i + 1]) / 2
    assert middle[i + 1] - middle[i] > 1e-3
    [output] = serve(llm, [Ask(PROMPTS[4], {**more, "rules": [one]})], log_probs=False)
    assert len(output.outputs) == 4
    for completion in output.outputs:
        assert completion.stop_reason == "rule:r"
        length = len(completion.token_ids)
        result = completion.rules["r"]
        assert result.fired_at == len(PROMPTS[4]) + length - 1
        assert (result.fired, result.rows) == (1, length)
        assert result.max > one["threshold"]
        scores = serving.row_tensors(completion)[SITE].double() @ one["probe"].double()
        assert len(scores) == length - 1 and (scores < one["threshold"]).all()


def test_rules_of_the_operator(llm: LLM) -> None:
    """They end answers of requests that say nothing of rules, or other things; an answer has their
    names alone, where they fired. They hold for requests that come later."""
    wants = plain(llm)
    ours = rule("ours", 1, then="stop", need=2, of=3)
    ours["threshold"] = wants[0].between(ours, 0.6)
    quiet = rule("quiet", 2, threshold=wants[0].between(rule("quiet", 2), 0.5))
    llm.steering.set_rules([ours, quiet])
    own = rule("own", 3, below=True)
    own["threshold"] = wants[0].between(own, 0.5)
    others: list[dict[str, Any]] = [{}, {"rules": [own]}, {"steering_inherit_global": False}]
    ended = 0
    for more in others:
        fields = {**LIMIT, **more, **capture("all_generated", [SITE[0]], [SITE[1]])}
        outputs = serve(llm, [Ask(w.prompt, fields) for w in wants], log_probs=False)
        for want, output in zip(wants, outputs, strict=True):
            completion, fires = output.outputs[0], want.fires(ours)
            last = len(want.prompt) + GENERATED - 1
            end = fires[0] if fires else last
            ended += bool(fires) and end < last - 1
            assert list(completion.token_ids) == want.tokens[: end + 1 - len(want.prompt)]
            assert completion.stop_reason == ("rule:ours" if fires else None)
            names = {"ours"} if fires else set()
            if any(p <= end for p in want.fires(quiet)):
                names.add("quiet")
            said = dict(completion.rules or {})
            if "rules" in more:
                scores = [s for p, s in want.scores(own).items() if p < end + bool(fires)]
                assert said.pop("own").mean == pytest.approx(sum(scores) / len(scores), abs=1e-3)
            assert said == dict.fromkeys(names)
            assert (completion.rules is None) == (not names and "rules" not in more)
    assert ended >= 9, "the operator's rule ended nothing"
    for wrong in ([ours], [{**own, "name": f"r{i}"} for i in range(31)]):
        with pytest.raises(ValueError, match="operator"):
            serve(llm, [Ask(PROMPTS[0], {**LIMIT, "rules": wrong})])
    fields = {"max_tokens": 1, "temperature": 0.0}  # an answer without a row that counts
    [one] = serve(llm, [Ask(PROMPTS[0], fields)], log_probs=False)
    assert one.outputs[0].rules is None and one.outputs[0].token_ids == wants[0].tokens[:1]
    with pytest.raises(ValueError, match="beam_search"):
        llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], BeamSearchParams(2, 3))
    before = llm.steering.rules()
    with pytest.raises(ValueError, match=r"rules\[1\]\.layer"):
        llm.steering.set_rules([own, {**own, "name": "b", "layer": 99}])
    assert llm.steering.rules() == before and [r["name"] for r in before] == ["ours", "quiet"]
    llm.steering.set_rules([])
    outputs = serve(llm, [Ask(w.prompt, LIMIT) for w in wants], log_probs=False)
    for want, output in zip(wants, outputs, strict=True):
        assert (list(output.outputs[0].token_ids), output.outputs[0].rules) == (want.tokens, None)


def test_the_operators_module_is_meant_as_it_was(llm: LLM) -> None:
    """A rule takes the direction that the name had when it was set."""
    [want] = plain(llm, PROMPTS[1:2])
    llm.steering.register_module("way", {"post_block": {SITE[1]: 9.0 * vector(5, 1.0)}})
    ours = rule("ours")
    ours["threshold"] = want.between(ours, 0.5)
    by_name = {**{k: v for k, v in ours.items() if k != "probe"}, "module": "way", "then": "stop"}
    llm.steering.set_rules([by_name])
    llm.steering.unregister_module("way")
    [output] = serve(llm, [Ask(want.prompt, LIMIT)], log_probs=False)
    length = want.fires(ours)[0] + 1 - len(want.prompt)
    assert list(output.outputs[0].token_ids) == want.tokens[:length]
    assert length < GENERATED and output.outputs[0].stop_reason == "rule:ours"
    assert "way" not in llm.steering.modules() and "_rules" not in llm.steering.modules()
    llm.steering.set_rules([])
