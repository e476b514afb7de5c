# SPDX-License-Identifier: Apache-2.0
"""Rules over a real `vllm serve`: answers that end at a row, whole and streamed, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.models import HIDDEN
from tests.http.checks import LAYER, PROMPT, SAID
from tests.http.server import Server, greedy
from tests.support.serving import vector
from vllm.entrypoints.serve.steering.client import (
    Call,
    Choice,
    SteeringClient,
    SteeringError,
    joined,
)
from vllm.v1.probes.files import made_probe
from vllm.v1.probes.pools import Max

pytestmark = pytest.mark.full

PROBE = vector(5, norm=1.0).numpy()
LENGTH = 24
ROWS = {"inline": {"hooks": {"post_block": [LAYER]}, "positions": "all", "project": PROBE[None]}}


def rule(**fields: Any) -> dict[str, Any]:
    return {
        "name": "toxic",
        "point": "post_block",
        "layer": LAYER,
        "probe": PROBE,
        "threshold": 1e30,
        **fields,
    }


def answers(client: SteeringClient, prompt: Any, stream: bool, **fields: Any) -> list[Choice]:
    # The tokenizer has a character for these, and for others of the model's tokens none.
    asked = greedy(max_tokens=LENGTH, allowed_token_ids=[*range(62)], **fields)
    if not stream:
        return client.complete(prompt, **asked).choices
    chunks: dict[int, list[Choice]] = {}
    for chunk in client.stream(prompt, **asked):
        chunks.setdefault(chunk.index, []).append(chunk)
    for of_choice in chunks.values():
        assert [bool(chunk.finish_reason) for chunk in of_choice[:-1]] == [False] * (
            len(of_choice) - 1
        )
    return [joined(chunks[i]) for i in sorted(chunks)]


@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
def test_an_answer_ends_with_the_token_whose_row_fired(client: SteeringClient, prompt: Any) -> None:
    """A token is a character here. Streamed text is the same: nothing was sent that is taken back.
    A rule that flags, or never fires, changes nothing."""
    [plain] = answers(client, prompt, False, capture=ROWS)
    scores = plain.captures["inline"]["post_block", LAYER]
    made = scores.values[:, 0]
    first = len(made) - (LENGTH - 1)  # the first generated token's row
    ordered = np.sort(made[first:])
    threshold = float(ordered[-3] + ordered[-4]) / 2
    fired = int(np.flatnonzero(made[first:] > threshold)[0])
    other = int(np.argmax(made[first:]))
    assert len(plain.text) == LENGTH
    for stream in (False, True):
        [flagged] = answers(client, prompt, stream, rules=[rule(threshold=threshold)])
        assert (flagged.text, flagged.finish_reason) == (plain.text, "length")
        said = flagged.rules["toxic"]
        assert (said["fired_at"], said["fired"], said["rows"]) == (first + fired, 3, LENGTH - 1)
        assert said["max"] == pytest.approx(float(made[first:].max()), abs=1e-3)
        [stopped] = answers(
            client, prompt, stream, rules=[rule(threshold=threshold, then="stop", name="t")]
        )
        assert stopped.text == plain.text[: fired + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "rule:t")
        assert stopped.rules["t"]["fired_at"] == first + fired
        highest = float(ordered[-1] + ordered[-2]) / 2
        [later] = answers(client, prompt, stream, rules=[rule(threshold=highest, then="stop")])
        assert later.text == plain.text[: other + 1]
        [never] = answers(client, prompt, stream, rules=[rule(then="stop")])
        assert (never.text, never.rules["toxic"]["fired_at"]) == (plain.text, None)


@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fires_has_an_empty_answer(
    client: SteeringClient, prompt: Any, stream: bool
) -> None:
    """Each of several choices; the module's direction scores as the probe does."""
    client.register_module("kind", {"vectors": {"post_block": {LAYER: 3 * PROBE}}})
    one = rule(module="kind", over="prompt", then="stop", threshold=-1e30)
    del one["probe"]
    made = answers(client, prompt, stream, rules=[one], n=2, temperature=1, seed=1)
    assert len(made) == 2
    for choice in made:
        assert (choice.text, choice.stop_reason) == ("", "rule:toxic")
        assert choice.rules["toxic"]["fired_at"] == 0


def test_a_probe_of_several_layers(client: SteeringClient) -> None:
    """Its arrays are packed, and its score is the sum over layers; a list of numbers does as well.
    Of a rule of the operator nothing but kinds and a norm is told."""
    layers = [LAYER - 1, LAYER]
    rows = {"hooks": {"post_block": layers}, "positions": "all_generated", "project": PROBE[None]}
    [plain] = answers(client, PROMPT, False, capture={"inline": rows})
    made = sum(plain.captures["inline"]["post_block", n].values[:, 0] for n in layers) / 2 + 0.25
    want = np.maximum.accumulate(made)
    sites = [("post_block", n) for n in layers]
    weight = np.stack([PROBE, PROBE]).reshape(1, 2, -1) / 2
    probe = made_probe(sites, weight, np.array([0.25]), pool=Max(), threshold=float(want.mean()))
    listed = {**probe.fields(), "weight": weight[0].tolist(), "bias": [0.25]}
    for given in (probe.fields(), listed):
        rules = [{"name": "r", "probe": given}, {"name": "s", "probe": given, "threshold": 1e30}]
        [answer] = answers(client, PROMPT, False, rules=rules)
        said = answer.rules["r"]
        assert said["last"] == pytest.approx(float(want[-1]), abs=1e-3)
        assert said["fired"] == (want > want.mean()).sum() > answer.rules["s"]["fired"] == 0
    client.set_rules([{"name": "ours", "probe": probe.fields()}])
    [known] = client.rules()
    client.set_rules([])
    assert (known["head"], known["pool"], known["layer"]) == ("linear", "max", layers)
    assert not {"probe", "weight", "sites"} & known.keys()


HOSTILE: list[tuple[Any, str]] = [
    ([rule(name=f"r{i}") for i in range(33)], "rules"),
    ({"toxic": rule()}, "rules"),
    ([rule(threshold=None)], "rules[0].threshold"),
    ([rule(probe=[0.0] * (HIDDEN + 1))], "rules[0].probe"),
    ([rule(probe={"dtype": "float32", "shape": [HIDDEN], "data": "AA=="})], "rules[0].probe.data"),
    ([rule(over="last_generated")], "rules[0].over"),
    ([{"name": "a", "probe": {"sites": [["post_block", 0]]}}], "rules[0].probe.weight"),
    ([{"name": "a", "probe": {"file": "/etc/passwd"}}], "rules[0].probe"),
    ([{"name": "a", "probe": {"weight": {"data": "AA=="}}}], "rules[0].probe.weight"),
    ([{**rule(), "module": "none"}], "rules[0]"),
    ([{k: v for k, v in rule(module="none").items() if k != "probe"}], "rules[0].module"),
]


@pytest.mark.parametrize(("rules", "path"), HOSTILE, ids=[path for _, path in HOSTILE])
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_rules_are_refused(
    client: SteeringClient, rules: Any, path: str, stream: bool
) -> None:
    with pytest.raises(SteeringError) as raised:
        answers(client, PROMPT, stream, rules=rules)
    assert (raised.value.status, raised.value.param) == (400, path)


def metrics(server: Server) -> dict[str, float]:
    """The samples of rules, by name and labels."""
    lines = server.get("/metrics").text.splitlines()
    samples = [line.rpartition(" ") for line in lines if line.startswith("vllm:rule_")]
    return {name: float(value) for name, _, value in samples if "_created" not in name}


def test_rules_of_the_operator(server: Server, client: SteeringClient) -> None:
    """They end completions, chats and streams of clients that say nothing, who get their names and
    no more; the names of clients' own rules are no labels of metrics."""
    for given in (
        {},
        {"X-Steering-Key": "wrong"},
        {"Authorization": "Bearer wrong"},
    ):
        assert server.get("/v1/steering/rules", **given).status_code == 403
        answer = server.post("/v1/steering/rules", {"rules": []}, **given)
        assert (answer.status_code, "Forbidden" in answer.text) == (403, True)
    for prompt in (PROMPT, SAID):
        [plain] = answers(client, prompt, False, capture=ROWS)
        made = plain.captures["inline"]["post_block", LAYER].values[:, 0]
        first = len(made) - (LENGTH - 1)
        ordered = np.sort(made[first:])
        threshold = float(ordered[-3] + ordered[-4]) / 2
        fired = int(np.flatnonzero(made[first:] > threshold)[0])
        client.set_rules(
            [rule(name="ours", threshold=threshold, then="stop"), rule(name="never", over="all")]
        )
        [known, _] = client.rules()
        assert (known["name"], known["then"], "probe" in known) == ("ours", "stop", False)
        assert known["threshold"] == pytest.approx(threshold)
        for stream in (False, True):
            [stopped] = answers(client, prompt, stream)
            assert stopped.text == plain.text[: fired + 1]
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "rule:ours")
            assert stopped.rules == {"ours": None}
            [two] = answers(client, prompt, stream, rules=[rule(threshold=-1e30)])
            assert (two.text, two.rules["ours"]) == (stopped.text, None)
            assert two.rules["toxic"]["fired"] == fired + 1
            with pytest.raises(SteeringError, match="is the name of a rule of the operator") as e:
                answers(client, prompt, stream, rules=[rule(name="ours")])
            assert (e.value.status, e.value.param) == (400, "rules[0].name")
            with pytest.raises(SteeringError, match="operator's rules hold"):
                client.complete(prompt, **greedy(use_beam_search=True, n=2))
        assert "ours" not in server.get("/v1/steering").text
        for wrong, param in (
            ({"rules": [rule(probe=[0.0])]}, "rules[0].probe"),
            ({"rules": [rule(over=[3])]}, "rules[0].over"),
            ({"rules": "toxic"}, "rules"),
            ({"rule": []}, "rule"),
            ({}, "rules"),
        ):
            with pytest.raises(SteeringError) as raised:
                client._call(Call("POST", "/rules", wrong))
            assert (raised.value.status, raised.value.param) == (400, param)
        assert [one["name"] for one in client.rules()] == ["ours", "never"]
        client.set_rules([])
        [again] = answers(client, prompt, False)
        assert (again.text, again.rules, client.rules()) == (plain.text, {}, [])
    found = metrics(server)
    label = 'engine="0",model_name="tiny",rule="{}"'.format
    assert found[f'vllm:rule_fired_total{{{label("ours")},then="stop"}}'] == 8
    assert found[f"vllm:rule_score_count{{{label('ours')}}}"] == 8
    assert found[f"vllm:rule_score_count{{{label('never')}}}"] == 8
    assert found[f'vllm:rule_fired_total{{{label("")},then="flag"}}'] >= 4
    assert not any("toxic" in name or 'rule="never",then' in name for name in found)


def test_a_threshold_of_nan_is_refused(server: Server) -> None:
    """As JSON of Python's may have it."""
    import httpx

    probe = [0.0] * HIDDEN
    body = (
        '{"model": "tiny", "prompt": "a", "rules": [{"name": "r", "point": "post_block", '
        f'"layer": {LAYER}, "probe": {probe}, "threshold": NaN}}]}}'
    )
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=300)
    assert answer.status_code == 400
