# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`: heads, branches and the ends of the stream, focus and attention weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.heads import recorded
from tests.http.checks import PROMPT, VECTOR, Reference, answered
from tests.http.server import greedy
from tests.support.serving import vector
from vllm.entrypoints.serve.steering.client import SteeringClient, SteeringError
from vllm.pilot.tracker import attention_tracker

pytestmark = pytest.mark.full


@pytest.mark.parametrize("stream", [False, True])
def test_heads(client: SteeringClient, reference: Reference, stream: bool) -> None:
    hooks = {"q": {"1": [3, 0]}, "z": {"0-1": "2-3"}, "post_block": [3]}
    asked = greedy(capture={"inline": {"hooks": hooks, "positions": "all"}})
    choice = answered(client, PROMPT, asked, stream)
    assert choice.capture_status == {"inline": "ok"}
    model = reference.model
    with recorded(model, list(model.model.layers)) as heads, torch.no_grad():
        model.set_attn_implementation("eager")
        model(torch.tensor([choice.rows["z", 0].token_ids.tolist()]))
    chosen = {("q", 1): (0, 3), ("z", 0): (2, 3), ("z", 1): (2, 3), ("post_block", 3): ()}
    assert {site: rows.heads for site, rows in choice.rows.items()} == chosen
    for site in heads.keys() & chosen:
        want = heads[site][:, list(chosen[site])].numpy()
        got = choice.rows[site].values
        np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())
        assert np.abs(got - want[:, ::-1]).max() > 0.1 * np.abs(want).max(), "heads differ"
    shape = client.layers()
    assert shape["heads"]["1"]["q"] == [4, 32]


@pytest.mark.parametrize("stream", [False, True])
def test_ends_and_branches(client: SteeringClient, reference: Reference, stream: bool) -> None:
    """Against what transformers says itself, and its modules."""
    hooks = {"embed": "all", "final": -1, "attn_out": [0], "mlp_out": "1"}
    asked = greedy(capture={"inline": {"hooks": hooks, "positions": "all"}})
    choice = answered(client, PROMPT, asked, stream)
    assert choice.capture_status == {"inline": "ok"}
    model, ids = reference.model, torch.tensor([choice.rows["embed", 0].token_ids.tolist()])
    layers, want = model.model.layers, {}
    with ExitStack() as hooked, torch.no_grad():
        for site, module in (
            (("attn_out", 0), layers[0].self_attn), (("mlp_out", 1), layers[1].mlp),
        ):  # fmt: skip

            def keep(_: Any, args: Any, out: Any, site: Any = site) -> None:
                want[site] = (out[0] if isinstance(out, tuple) else out)[0].numpy()

            hooked.callback(module.register_forward_hook(keep).remove)
        said = model.model(ids, output_hidden_states=True)
    last = len(layers) - 1
    want["embed", 0] = said.hidden_states[0][0].numpy()
    want["final", last] = said.last_hidden_state[0].numpy()
    assert set(choice.rows) == set(want)
    for site, rows in choice.rows.items():
        bound = 1e-3 * np.abs(want[site]).max()
        np.testing.assert_allclose(rows.values, want[site], atol=bound)
        assert np.abs(rows.values - np.roll(want[site], 1, 0)).max() > 100 * bound, site
    captured = client.layers()["captured"]
    assert captured["0"] == ["embed", "mlp_in", "mlp_act", "attn_out", "mlp_out"]
    assert captured[str(last)] == ["mlp_in", "mlp_act", "attn_out", "mlp_out", "final"]
    refused = greedy(steering_vectors={"final": {str(last): VECTOR}})
    with pytest.raises(SteeringError, match="'final' can only be captured"):
        client.complete(PROMPT, **refused)


def test_steered_heads(client: SteeringClient) -> None:
    """Factors and vectors at z by JSON and packed; the heads that are not named keep their rows."""
    read = {"inline": {"hooks": {"z": {"1": "all"}}, "positions": "all_prompt"}}
    v = vector(9, width=32).numpy()
    plain, packed, listed, none = (
        client.complete(PROMPT, **greedy(capture=read, **fields)).choices[0].rows["z", 1].values
        for fields in (
            {},
            {"steering": [{"op": "add", "point": "z", "heads": {"1": [2]}, "vector": v}]},
            {"steering_vectors": {"z": {"1": [0.0] * 64 + v.tolist() + [0.0] * 32}}},
            {"steering": [{"op": "scale", "point": "z", "heads": {"1": [2, "0-1"]}, "factor": 0}]},
        )
    )
    np.testing.assert_allclose(packed[:, 2] - plain[:, 2], np.tile(v, (len(plain), 1)), atol=1e-4)
    assert np.array_equal(packed, listed)
    assert np.array_equal(packed[:, [0, 1, 3]], plain[:, [0, 1, 3]])
    assert not none[:, :3].any() and np.array_equal(none[:, 3], plain[:, 3])
    with pytest.raises(SteeringError, match=r"heads\.1: head 4 is out of range"):
        client.complete(
            PROMPT,
            **greedy(steering=[{"op": "scale", "point": "z", "heads": {"1": 4}, "factor": 0}]),
        )


def test_focus(client: SteeringClient) -> None:
    """What a span takes is what the entries say, and not what it took."""
    attention = {"heads": "0-1", "queries": "last_prompt", "give": ["mass"], "keys": {"a": [1, 2]}}
    asked = greedy(capture={"inline": {"attention": attention}})
    share = {"op": "focus", "layers": [0], "span": [1, 2], "share": 0.9}
    factor = {"op": "focus", "heads": {"1": [3]}, "span": [1, 2], "factor": 4.0}

    def mass(entries: list[dict[str, Any]]) -> list[np.ndarray]:
        [choice] = client.complete(PROMPT, **asked, steering=entries).choices
        return [choice.attention["inline"][layer].given["mass"][0, :, 0] for layer in (0, 1)]

    plain, shared, weighed = mass([]), mass([share]), mass([factor])
    assert plain[0].max() < 0.8
    np.testing.assert_allclose(shared[0], 0.9, atol=1e-5)
    np.testing.assert_allclose(weighed[0], plain[0], atol=1e-5)
    m = plain[1][3]
    np.testing.assert_allclose(weighed[1], [*plain[1][:3], 4 * m / (1 + 3 * m)], atol=1e-5)
    assert abs(weighed[1][3] - m) > 0.05
    with pytest.raises(SteeringError) as refused:
        mass([{**factor, "factor": -1.0}])
    assert refused.value.param == "steering[0].factor"


@pytest.mark.parametrize("stream", [False, True])
def test_attention(client: SteeringClient, reference: Reference, stream: bool) -> None:
    keys = {"first": [0], "later": {"start": 1}}
    several = [
        {"heads": {"1": [3, 0]}, "queries": "predicting", "give": ["weights", "top"], "top": 2},
        {"heads": "0-1", "queries": "all", "give": ["mass", "peak"], "keys": keys},
    ]
    asked = greedy(capture={"inline": [{"attention": one} for one in several]})
    choice = answered(client, PROMPT, asked, stream)
    assert choice.capture_status == {"inline[0]": "ok", "inline[1]": "ok"}
    ranges = choice.attention["inline[1]"]
    model = reference.model
    with recorded(model, list(model.model.layers)) as heads, torch.no_grad():
        model.set_attn_implementation("eager")
        model(torch.tensor([ranges[1].token_ids.tolist()]))
    [got] = choice.attention["inline[0]"].values()
    want = heads["attn", 1][:, [0, 3]].numpy()
    assert got.heads == (0, 3) and len(got.weights) == len(got.positions) > 1
    for i, t in enumerate(got.positions):
        np.testing.assert_allclose(got.weights[i], want[t, :, : t + 1], atol=1e-3)
        assert np.abs(got.weights[i] - want[t, ::-1, : t + 1]).max() > 0.01, "heads differ"
        best = np.sort(want[t])[:, :-3:-1]
        np.testing.assert_allclose(got.given["top_weights"][i], best, atol=1e-3)
    assert got.given["top_positions"].dtype == np.int32
    for layer in (0, 1):
        rows = ranges[layer]
        exact = heads["attn", layer].numpy()
        assert rows.ranges == ("first", "later") and rows.heads == (0, 1, 2, 3)
        mass = np.stack([exact[..., 0], exact[..., 1:].sum(-1)], -1)
        np.testing.assert_allclose(rows.given["mass"], mass, atol=1e-3)
        peak = np.stack([exact[..., 0], exact[..., 1:].max(-1)], -1)
        np.testing.assert_allclose(rows.given["peak"], peak, atol=1e-3)
    # Analyzers read a client's answer: every weight is of the two ranges.
    share = np.concatenate([heads["attn", layer][3, :, 0].numpy() for layer in (0, 1)])
    found = attention_tracker(choice, "first", "later", consumer="inline[1]", query=3)
    np.testing.assert_allclose(found.values, share, atol=1e-3)
    assert np.abs(found.values - np.roll(share, 1)).max() > 0.01
    by_rows = attention_tracker(choice, [0], [1, 2, 3], consumer="inline[0]", query=len(PROMPT))
    given = want[len(PROMPT)]
    few = given[:, 0] / given[:, :4].sum(-1)
    np.testing.assert_allclose(by_rows.values, few, atol=5e-3)
