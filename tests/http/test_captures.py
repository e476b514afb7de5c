# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`: scores, lenses, means, tool calls, and a server that was started anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.models import HIDDEN
from tests.http.checks import (
    LAYER,
    PROMPT,
    READ,
    SAID,
    STEER,
    VECTOR,
    Reference,
    answered,
    check_rows,
)
from tests.http.server import KEY, NAME, Server, greedy, serve
from tests.support.serving import vector
from vllm.entrypoints.serve.steering.client import SteeringClient, SteeringError, joined
from vllm.pilot import Autoencoder

pytestmark = pytest.mark.full

MATRIX = np.stack([vector(n, norm=1.0).numpy() for n in range(2)])


@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("matrix", [MATRIX.tolist(), MATRIX], ids=["plain", "packed"])
def test_scores(
    client: SteeringClient, reference: Reference, prompt: Any, stream: bool, matrix: Any
) -> None:
    scored = {"inline": {**READ["inline"], "project": matrix}}
    asked = greedy(capture=scored, steering_vectors=STEER)
    choice = answered(client, prompt, asked, stream)
    assert choice.capture_status == {"inline": "ok"}
    for (_, layer), scores in choice.rows.items():
        read = scores.token_ids.tolist()
        steered, plain = (
            reference.rows(read, deltas)[layer].numpy() @ MATRIX.T
            for deltas in ({LAYER: VECTOR}, {})
        )
        assert scores.values.dtype == np.float32 and scores.values.shape == (len(read), 2)
        np.testing.assert_allclose(scores.values, steered, atol=1e-3)
        assert np.abs(scores.values - plain).max() > 1, "without steering they differ"


@pytest.mark.parametrize("stream", [False, True])
def test_norms(client: SteeringClient, reference: Reference, stream: bool) -> None:
    asked = greedy(capture={"inline": {**READ["inline"], "norms": True}}, steering_vectors=STEER)
    choice = answered(client, PROMPT, asked, stream)
    assert choice.capture_status == {"inline": "ok"}
    for (_, layer), norms in choice.rows.items():
        read = norms.token_ids.tolist()
        steered, plain = (
            reference.rows(read, deltas)[layer].norm(dim=-1, keepdim=True).numpy()
            for deltas in ({LAYER: VECTOR}, {})
        )
        assert norms.values.dtype == np.float32 and norms.values.shape == (len(read), 1)
        np.testing.assert_allclose(norms.values, steered, atol=1e-3)
        assert np.abs(norms.values - plain).max() > 1, "without steering they differ"


@pytest.mark.parametrize("stream", [False, True])
def test_doses(client: SteeringClient, reference: Reference, stream: bool) -> None:
    asked = greedy(capture={"inline": {**READ["inline"], "dose": True}}, steering_vectors=STEER)
    choice = answered(client, PROMPT, asked, stream)
    assert choice.capture_status == {"inline": "ok"}
    for (_, layer), doses in choice.rows.items():
        rows = reference.rows(doses.token_ids.tolist(), {LAYER: VECTOR})[layer]
        added = torch.from_numpy(VECTOR) * (layer == LAYER)
        want = added.norm() / (rows - added).norm(dim=-1, keepdim=True)
        np.testing.assert_allclose(doses.values, want.numpy(), rtol=1e-4)
        assert (doses.values > 0.01).all() == (layer == LAYER)


@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_modules_beside_their_tokens(
    client: SteeringClient, prompt: Any, stream: bool
) -> None:
    """What the names mean is what their vectors give; the texts are the tokens of the rows."""
    directions = {f"probe{n}": {LAYER: 3.0 * MATRIX[n]} for n in range(2)}
    for name, vectors in directions.items():
        client.register_module(name, {"vectors": {"post_block": vectors}})

    def asked(project: Any, **more: Any) -> dict[str, Any]:
        hooks = {"post_block": [LAYER]}
        return {"hooks": hooks, "positions": "all", "project": project, **more}

    captures = [
        asked({"modules": list(directions)}, tokens=True),
        asked(MATRIX),
        asked({"modules": ["probe1", "probe0"]}),
    ]
    fields = greedy(capture={"inline": captures})
    choice = answered(client, prompt, fields, stream)
    named, given, swapped = (choice.captures[f"inline[{i}]"]["post_block", LAYER] for i in range(3))
    np.testing.assert_allclose(named.values, given.values, rtol=1e-4, atol=1e-4)
    assert np.abs(named.values - swapped.values).max() > 0.1, "in another order they differ"
    assert given.tokens == swapped.tokens == ()
    assert len(named.tokens) == len(named.token_ids)
    said = "".join(named.tokens)
    assert said.startswith(PROMPT) if prompt == PROMPT else PROMPT in said
    for name in directions:
        client.unregister_module(name)


@pytest.mark.parametrize("stream", [False, True])
def test_features(
    client: SteeringClient, reference: Reference, features: Path, stream: bool
) -> None:
    """Activations of the model's rows under the server's own autoencoder, steered and plain."""
    sae = Autoencoder.load(features)
    asked = {"features": {"name": "made", "top": 3, "ids": [5], "error": True}, "positions": "all"}
    fields = greedy(capture={"inline": asked}, steering_vectors=STEER)
    choice = answered(client, PROMPT, fields, stream)
    assert choice.capture_status == {"inline": "ok"} and not choice.captures.get("inline")
    [(site, made)] = choice.features["inline"].items()
    assert site == ("post_block", 1) and (made.features, made.asked) == ("made", (5,))
    read = made.token_ids.tolist()
    rows = [reference.rows(read, deltas)[1] for deltas in ({LAYER: VECTOR}, {})]
    want, plain = (sae.encode(each) for each in rows)
    near = (want - sae.threshold).abs().min(1).values < 1e-3
    top = want.topk(3).values[~near].numpy()
    np.testing.assert_allclose(made.given["top_values"][~near], top, atol=2e-3)
    np.testing.assert_allclose(made.given["values"], want[:, [5]], atol=2e-3)
    left = (rows[0] - sae.decode(want)).norm(dim=1)[~near].numpy()
    np.testing.assert_allclose(made.given["error"][~near], left, rtol=1e-3)
    assert (want - plain).abs().max() > 1, "without steering they differ"
    assert made.given["top_ids"].dtype == np.int32 and len(made.given["active"]) == len(read)


def test_the_server_names_its_autoencoders(server: Server) -> None:
    told = server.get("/v1/capture").json()["features"]
    assert told == {"made": {"point": "post_block", "layer": 1}}


@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_lens(client: SteeringClient, reference: Reference, prompt: Any, stream: bool) -> None:
    """The last layer says what the server reports, and earlier ones what their rows give; `a` is
    the first token of the vocabulary."""
    hooks = {"post_block": "all"}
    lens = {"name": "logit", "top_k": 2, "tokens": ["a", 200], "entropy": True}
    asked = {"hooks": hooks, "positions": "predicting", "lens": lens, "tokens": True}
    rows = {"hooks": hooks, "positions": "predicting"}
    fields = greedy(capture={"inline": [asked, rows]}, steering_vectors=STEER)
    choice = answered(client, prompt, fields, stream)
    assert choice.capture_status == {"inline[0]": "ok", "inline[1]": "ok"}
    under, read = choice.lenses["inline[0]"], choice.captures["inline[1]"]
    assert list(under) == list(read) and not choice.captures.get("inline[0]")
    model, said = reference.model, []
    for site, made in under.items():
        with torch.no_grad():
            logits = model.lm_head(model.model.norm(torch.from_numpy(read[site].values.copy())))
        want = logits.log_softmax(-1).numpy()
        best = np.argsort(-want)[:, :2]
        assert made.lens == "logit" and made.asked == (0, 200)
        assert np.array_equal(made.given["top_ids"], best)
        top = np.take_along_axis(want, best, 1)
        np.testing.assert_allclose(made.given["top_logprobs"], top, atol=1e-4)
        np.testing.assert_allclose(made.given["token_logprobs"], want[:, [0, 200]], atol=1e-4)
        ranks = (want[:, None] >= want[:, [0, 200], None]).sum(-1)
        assert np.array_equal(made.given["token_ranks"], ranks)
        entropy = -(np.exp(want) * want).sum(-1)
        np.testing.assert_allclose(made.given["entropy"], entropy, atol=1e-4)
        assert len(made.tokens) == len(made.token_ids) == len(made.positions) == len(want) > 1
        said.append(made.given["top_ids"][:-1, 0].tolist())
    read_next = under["post_block", 3].token_ids[1:].tolist()
    assert said[-1] == read_next and said[0] != read_next


@pytest.mark.parametrize(
    ("lens", "error"),
    [
        ({"top_k": 10**9}, "lens.top_k: must be an int from 0 to 128"),
        ({"tokens": ["ab"]}, r"lens.tokens\[0\]: 'ab' is 2 tokens, not one"),
        ({"tokens": [251]}, r"lens.tokens\[0\]: token 251 is out of range, there are 0-250"),
        ({"name": "tuned"}, "lens.name: unknown lens 'tuned'; known are logit"),
    ],
)
def test_lens_refused(client: SteeringClient, lens: dict[str, Any], error: str) -> None:
    asked = {"hooks": {"post_block": "all"}, "lens": {"name": "logit", **lens}}
    with pytest.raises(SteeringError, match=f"capture.inline.{error}"):
        client.complete(PROMPT, **greedy(capture={"inline": asked}))


@pytest.mark.parametrize("stream", [False, True])
def test_several_captures(client: SteeringClient, reference: Reference, stream: bool) -> None:
    """Rows, and beside them scores with a matrix for each layer."""
    by_layer = {"post_block": {str(LAYER): MATRIX, "3": MATRIX[:, ::-1].copy()}}
    asked = greedy(capture={"inline": [READ["inline"], {**READ["inline"], "project": by_layer}]})
    choice = answered(client, PROMPT, asked, stream)
    assert choice.capture_status == {"inline[0]": "ok", "inline[1]": "ok"}
    assert choice.rows == {}
    rows, scores = choice.captures["inline[0]"], choice.captures["inline[1]"]
    read = rows["post_block", 3].token_ids.tolist()
    for layer, matrix in ((LAYER, MATRIX), (3, MATRIX[:, ::-1])):
        want = reference.rows(read, {})[layer].numpy()
        np.testing.assert_allclose(rows["post_block", layer].values, want, atol=1e-3)
        values = scores["post_block", layer].values
        np.testing.assert_allclose(values, want @ matrix.T, atol=1e-3)
        assert np.abs(values - want @ matrix[:, ::-1].T).max() > 1e-2


TALK = [
    {"role": "user", "content": "Today I went"},
    {"role": "assistant", "content": "I went"},
    {"role": "user", "content": "I"},
]


@pytest.mark.parametrize("stream", [False, True])
def test_means_of_turns(client: SteeringClient, reference: Reference, stream: bool) -> None:
    """Of the assistant's turn in a chat, beside the rows it is the mean of and those of all."""
    turn = {**READ["inline"], "positions": {"role": "assistant", "turn": -1}}
    asked = greedy(capture={"inline": [{**turn, "reduce": "mean"}, turn, READ["inline"]]})
    choice = answered(client, TALK, asked, stream)
    assert set(choice.capture_status.values()) == {"ok"}
    means, rows, every = (choice.captures[f"inline[{i}]"] for i in range(3))
    read = every["post_block", LAYER].token_ids.tolist()
    at = rows["post_block", LAYER].positions.tolist()
    first = len("u:Today I went\na:")
    assert at == list(range(first, first + len("I went")))
    assert reference.tokenizer.decode(read[at[0] : at[-1] + 1]) == "I went"
    for (point, layer), mean in means.items():
        want = reference.rows(read, {})[layer].numpy()
        assert mean.positions.tolist() == at[-1:] and mean.values.dtype == np.float32
        np.testing.assert_allclose(mean.values, want[at].mean(0, keepdims=True), atol=1e-3)
        assert np.abs(mean.values - want[: at[-1]].mean(0)).max() > 1e-2
        assert point == "post_block" and len(rows[point, layer].positions) == len(at)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"reduce": "sum"}, ("capture.inline.reduce", "must be 'mean'")),
        ({"reduce": "mean"}, ("capture.inline.reduce", "takes positions of the prompt")),
        ({"positions": {"role": "system"}}, ("capture.inline.positions.role", "no turn is of")),
    ],
)
def test_wrong_means_and_turns_are_refused(
    client: SteeringClient, field: Any, said: tuple[str, str]
) -> None:
    asked = greedy(capture={"inline": {**READ["inline"], **field}})
    with pytest.raises(SteeringError, match=said[1]) as raised:
        client.complete(TALK, **asked)
    assert (raised.value.status, raised.value.param) == (400, said[0])
    if "positions" in field:
        with pytest.raises(SteeringError, match="is for chats"):
            client.complete(PROMPT, **asked)


@pytest.mark.parametrize(
    ("matrix", "path"),
    [
        ([[0.0] * 3], "capture.inline.project"),
        ({"dtype": "float32", "shape": [1, HIDDEN], "data": "AAAA"}, "capture.inline.project.data"),
        (
            {"post_block": {"3": {"dtype": "float32", "shape": [1, HIDDEN], "data": "AAAA"}}},
            "capture.inline.project.post_block.3.data",
        ),
    ],
)
def test_wrong_matrices_are_refused(client: SteeringClient, matrix: Any, path: str) -> None:
    with pytest.raises(SteeringError) as raised:
        client.complete(PROMPT, **greedy(capture={"inline": {**READ["inline"], "project": matrix}}))
    assert raised.value.status == 400
    assert (raised.value.param or "").startswith(path)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_has_its_rows(
    client: SteeringClient, reference: Reference, stream: bool
) -> None:
    """The tiny tokenizer has no braces, so the function's argument is a bare number."""
    function = {"name": "count", "parameters": {"type": "integer"}}
    asked = greedy(
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "count"}},
        capture=READ,
        steering_vectors=STEER,
        ignore_eos=False,
    )
    if stream:
        choice = joined(list(client.stream(SAID, **asked)))
    else:
        answer = client.complete(SAID, **asked)
        choice = answer.choices[0]
        [call] = answer.raw["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "count"
        assert call["function"]["arguments"].isdigit()
    check_rows(choice, reference, {LAYER: VECTOR})


@pytest.mark.long
def test_a_server_started_anew_knows_no_module(
    client: SteeringClient,
    reference: Reference,
    model: Path,
    options: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """The same command again: nothing of the first server's steering is kept anywhere."""
    client.register_module("lost", STEER)
    client.set(STEER)
    client.complete(PROMPT, **greedy(steering_modules=["lost"]))
    assert client.state()["tiers"]
    with (
        serve(model, tmp_path / "server.log", *options) as anew,
        SteeringClient(anew.url, steering_key=KEY, model=NAME) as other,
    ):
        assert (other.state()["tiers"], other.modules()) == ({}, {})
        for prompt, stream in ((PROMPT, False), (SAID, True)):
            asked = greedy(steering_modules=["lost"])
            with pytest.raises(SteeringError, match="unknown module 'lost'") as raised:
                list(other.stream(prompt, **asked)) if stream else other.complete(prompt, **asked)
            assert (raised.value.status, raised.value.param) == (400, "steering_modules[0]")
        plain = other.complete(PROMPT, **greedy(capture=READ))
    steered = client.complete(PROMPT, **greedy(capture=READ))
    check_rows(plain.choices[0], reference, {})
    check_rows(steered.choices[0], reference, {LAYER: VECTOR})
