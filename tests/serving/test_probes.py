# SPDX-License-Identifier: Apache-2.0
"""Rules of probes of several layers, with every head and pool: what they say of an answer, and
where they end it, is what the definitions say of the rows that the same engine captures, in engines
that chunk, preempt, draft and take prompts from the prefix cache."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.interventions.frontend.test_webhook import Receiver, until
from tests.serving import test_speculation
from tests.serving.test_rules import CHUNKED, DRAFTS, GENERATED, LIMIT, PROMPTS
from tests.support import serving
from tests.support.probes import pooled
from tests.support.selected import expected_positions
from tests.support.serving import Ask, capture, serve
from vllm import LLM
from vllm.v1.probes.files import made_probe, save_probe
from vllm.v1.probes.pools import Attention, Exponential, Max, Mean, MultiMax, RollingMax
from vllm.v1.probes.probe import ServedProbe

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

POINTS = ["pre_attn", "post_block"]
SITES = [("post_block", models.LAYERS - 1), ("pre_attn", 1), ("post_block", 0)]
OVER = {"generated": "all_generated", "prompt": "all_prompt", "all": "all"}


def probe(seed: int, units: int = 1, sites: int = 3, **more: Any) -> ServedProbe:
    """One of random weights, which give numbers of about 1."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(units, sites, models.HIDDEN)) / (sites * models.HIDDEN) ** 0.5
    if (outputs := more.pop("outputs", 0)) > 0:
        more["output_weight"] = rng.normal(size=(outputs, units)) / units**0.5
        more["output_bias"] = rng.normal(size=outputs)
    return made_probe(SITES[:sites], weight, rng.normal(size=units), **more)


PROBES: dict[str, tuple[ServedProbe, str]] = {
    "linear": (probe(1), "all"),
    "mean": (probe(2, pool=Mean()), "generated"),
    "mlp": (probe(3, units=5, outputs=1, activation="relu", pool=Mean()), "all"),
    "exponential": (probe(4, pool=Exponential(0.3)), "generated"),
    "rolling": (probe(5, sites=2, pool=RollingMax(3)), "generated"),
    "max": (probe(6, sites=1, pool=Max()), "prompt"),
    "multimax": (probe(7, units=3, pool=MultiMax()), "all"),
    "attention": (probe(8, units=4, sites=2, pool=Attention()), "all"),
    "both": (probe(9, units=6, outputs=4, activation="silu", pool=Attention()), "generated"),
}
"""Probes by name, and the rows that count."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    started = Receiver()
    yield started
    started.close()


@pytest.fixture(scope="module", params=[pytest.param("chunked", marks=pytest.mark.v2), "drafts"])
def llm(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    receiver: Receiver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LLM]:
    """The operator has a rule of a probe's file, which fires at every first generated row, and a
    webhook that is told so."""
    if request.param == "drafts":
        test_speculation.keep_engines_startable()
    folder = tmp_path_factory.mktemp("rules")
    save_probe(PROBES["mlp"][0], folder / "house.safetensors")
    house = {"name": "house", "probe": {"file": "house.safetensors"}, "threshold": -1e30}
    rules = {"rules": [house], "webhook": {"url": receiver.url, "text": True}}
    (folder / "rules.json").write_text(json.dumps(rules))
    options = CHUNKED if request.param == "chunked" else DRAFTS
    engine = make_llm(
        tiny_models.path("llama"),
        capture_consumers=["inline"],
        rules=str(folder / "rules.json"),
        **options,
    )
    yield engine
    shut_down(engine)


class Replay:
    """An answer without rules, and the scores of probes by definition at its rows."""

    def __init__(self, prompt: list[int], completion: Any) -> None:
        self.prompt, self.tokens = prompt, list(completion.token_ids)
        self._rows = serving.row_tensors(completion)

    def scores(self, probe: ServedProbe, over: str) -> dict[int, float]:
        """Position -> score."""
        at = expected_positions(OVER[over], len(self.prompt), len(self.tokens))
        rows = torch.stack([self._rows[site] for site in probe.sites], 1)[list(at)]
        return dict(zip(at, pooled(probe.pool, probe.numbers(rows)), strict=True))


@pytest.fixture(scope="module")
def wants(llm: LLM) -> list[Replay]:
    fields = {**LIMIT, **capture("all", POINTS, "all")}
    outputs = serve(llm, [Ask(p, fields) for p in PROMPTS], log_probs=False)
    return [Replay(p, o.outputs[0]) for p, o in zip(PROMPTS, outputs, strict=True)]


def between(scores: dict[int, float], share: float) -> float:
    """A threshold that about `share` of the scores are above, near to none."""
    ordered = sorted(set(scores.values()))
    if len(ordered) == 1:
        return ordered[0] - 1.0
    middle = min(round((1 - share) * (len(ordered) - 1)), len(ordered) - 2)
    near = range(max(middle - 2, 0), min(middle + 3, len(ordered) - 1))
    at = max(near, key=lambda i: ordered[i + 1] - ordered[i])
    return (ordered[at] + ordered[at + 1]) / 2


def test_every_head_and_pool_is_what_it_says(llm: LLM, wants: list[Replay]) -> None:
    """All of them at once for each prompt of a batch. Prompts come a second time, so that an engine
    with a prefix cache has their blocks."""
    rules: list[list[dict[str, Any]]] = []
    for want in wants:
        thresholds = {n: between(want.scores(*one), 0.4) for n, one in PROBES.items()}
        rules.append(
            [
                {"name": name, "probe": one, "over": over, "threshold": thresholds[name]}
                for name, (one, over) in PROBES.items()
            ]
        )
    asks = [Ask(w.prompt, {**LIMIT, "rules": r}) for w, r in zip(wants, rules, strict=True)]
    for outputs in (serve(llm, asks, log_probs=False), serve(llm, asks, log_probs=False)):
        for want, of_prompt, output in zip(wants, rules, outputs, strict=True):
            completion = output.outputs[0]
            assert list(completion.token_ids) == want.tokens
            for rule in of_prompt:
                scores = want.scores(rule["probe"], rule["over"])
                fires = [p for p, s in scores.items() if s > rule["threshold"]]
                result = completion.rules[rule["name"]]
                assert (result.rows, result.fired) == (len(scores), len(fires)), rule["name"]
                assert result.fired_at == (fires[0] if fires else None)
                seen = list(scores.values())
                made = [max(seen), min(seen), sum(seen) / len(seen), seen[-1]]
                said = [result.max, result.min, result.mean, result.last]
                assert said == pytest.approx(made, abs=2e-4), rule["name"]


def test_an_operator_is_told_of_each_answer(
    llm: LLM, receiver: Receiver, wants: list[Replay]
) -> None:
    """By the webhook, once, with the score of the row; the answer has the rule's name alone."""
    time.sleep(0.5)  # of earlier answers
    before = len(receiver.got)
    outputs = serve(llm, [Ask(w.prompt, LIMIT) for w in wants], log_probs=False)
    until(lambda: len(receiver.got) == before + len(wants))
    events = [json.loads(body) for _, body in receiver.got[before:]]
    of_request = {event["request"]: event for event in events}
    for want, output in zip(wants, outputs, strict=True):
        assert output.outputs[0].rules == {"house": None}
        event = of_request[output.request_id]
        assert (event["rule"], event["then"], event["sample"]) == ("house", "flag", 0)
        assert event["position"] == len(want.prompt) == event["prompt_tokens"]
        [first, *_] = want.scores(PROBES["mlp"][0], "generated").values()
        assert event["score"] == pytest.approx(first, abs=2e-4) and "answer" in event
    assert max(e["score"] for e in events) - min(e["score"] for e in events) > 1e-2


def test_sites_are_not_exchanged_and_weights_matter(llm: LLM, wants: list[Replay]) -> None:
    """The twin: a probe of the same weights at its sites in another order says another thing."""
    one = PROBES["linear"][0]
    other = made_probe(SITES[::-1], one.weight, np.array(one.head.fields()["bias"]))
    rules = [{"name": n, "probe": p, "threshold": 0} for n, p in (("a", one), ("b", other))]
    [output] = serve(llm, [Ask(wants[0].prompt, {**LIMIT, "rules": rules})], log_probs=False)
    a, b = (output.outputs[0].rules[name] for name in "ab")
    want = list(wants[0].scores(other, "generated").values())[-1]
    assert b.last == pytest.approx(want, abs=2e-4) and abs(a.last - b.last) > 0.05


@pytest.mark.parametrize("name", ["mlp", "rolling", "both", "multimax"])
def test_answers_end_with_the_token_whose_score_fired(
    llm: LLM, wants: list[Replay], name: str
) -> None:
    one, _ = PROBES[name]
    asks, ends = [], []
    for want in wants:
        scores = want.scores(one, "generated")
        threshold = between(scores, 0.5)
        ends.append(next(p for p, s in scores.items() if s > threshold))
        rule = {"name": "stop", "probe": one, "threshold": threshold, "then": "stop"}
        asks.append(Ask(want.prompt, {**LIMIT, "rules": [rule]}))
    for want, end, output in zip(wants, ends, serve(llm, asks, log_probs=False), strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == want.tokens[: end + 1 - len(want.prompt)]
        assert completion.stop_reason == "rule:stop"
    assert len({end - len(w.prompt) for end, w in zip(ends, wants, strict=True)}) > 1
    assert min(end - len(w.prompt) for end, w in zip(ends, wants, strict=True)) < GENERATED - 2


def test_each_completion_has_a_pool_of_its_own(llm: LLM) -> None:
    """n > 1: the mean of each by its own rows."""
    one, _ = PROBES["mean"]
    fields = {**LIMIT, "n": 3, "temperature": 1.0, **capture("all_generated", POINTS, "all")}
    rule = {"name": "r", "probe": one, "threshold": 0.0}
    [output] = serve(llm, [Ask(PROMPTS[1], {**fields, "rules": [rule]})], log_probs=False)
    means = []
    for completion in output.outputs:
        rows = serving.row_tensors(completion)
        numbers = one.numbers(torch.stack([rows[site] for site in one.sites], 1))
        assert completion.rules["r"].last == pytest.approx(numbers.mean(), abs=2e-4)
        means.append(numbers.mean())
    assert max(means) - min(means) > 1e-3
