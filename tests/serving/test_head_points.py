# SPDX-License-Identifier: Apache-2.0
"""q, k, v and z at chosen heads behind an engine, beside rows of the residual stream and plain
requests: chunks, cached prefixes, steering, small budgets, several completions, consumers.

The reference is Hugging Face's own attention, run once over the final sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import READ_TOLERANCE, Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import CAPTURE_POINTS
from vllm.v1.capture import CapturedRows
from vllm.v1.capture.reader import open as open_captures

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from vllm.v1.capture.consumer import RequestInfo

pytestmark = [pytest.mark.full, pytest.mark.v2]

ROWS_OF_ARENA = 80
HEADS = {"q": 4, "k": 2, "v": 2, "z": 4}


@dataclass
class Running:
    """An engine with a small arena, its judge, and what its other consumers got."""

    llm: LLM
    judge: Judge
    root: Path
    seen: dict[str, list[dict[Any, CapturedRows]]] = field(default_factory=dict)

    def look(self, request: RequestInfo, rows: dict[Any, CapturedRows]) -> None:
        self.seen.setdefault(request.external_id, []).append(rows)


@pytest.fixture(scope="module")
def running(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    judge = Judge(Reference(row, models.load(row, path)))
    made = Running(None, judge, tmp_path_factory.mktemp("acts"))  # type: ignore[arg-type]
    made.llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline", f"filesystem:root={made.root}", "logging", made.look],
        capture_points=list(CAPTURE_POINTS),
        capture_buffer_bytes=ROWS_OF_ARENA * models.HIDDEN * 4,
        max_num_batched_tokens=24,
    )
    yield made
    shut_down(made.llm)


def heads(hooks: dict[str, Any], positions: Any = "all") -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": hooks, "positions": positions}}}


CHOSEN = {"q": {0: [3, 1], "2-3": "all"}, "k": {1: 0}, "v": "all", "z": {-1: "1-2"}}
STEERED = {"steering_vectors": {"pre_attn": {1: vector(140)}}}
ASKS = [
    Ask(prompt_of(41, 140), heads(CHOSEN)),
    Ask(prompt_of(17, 141), {**STEERED, **heads({**CHOSEN, "post_block": [1], "pre_attn": [1]})}),
    Ask(prompt_of(5, 142), heads({"z": "all"}, "predicting")),
    Ask(prompt_of(5, 143), heads({"post_attn": "all"})),
    Ask(prompt_of(5, 144)),
    Ask(prompt_of(9, 145), STEERED),
]


def test_chosen_heads(running: Running) -> None:
    """In one batch with other requests, in chunks that the arena's rows allow."""
    with serving.watching(running.llm) as steps:
        outputs = serve(running.llm, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        running.judge.check(ask, output)
    payload = outputs[0].capture_results["inline"].payload
    assert {site: rows.heads for site, rows in payload.items() if site[0] in "qkz"} == {
        ("q", 0): (1, 3), ("k", 1): (0,), ("q", 2): (0, 1, 2, 3), ("q", 3): (0, 1, 2, 3),
        ("z", 3): (1, 2),
    }  # fmt: skip
    assert payload["q", 0].values.shape == (46, 2, 32)
    assert payload["q", 0].at(3).shape == (2, 32)
    # 9 sites of at most one arena row each; of 24 tokens they would need 216.
    assert len(steps.chunks(0)) > 41 // 24 + 6


def test_neighbouring_heads_differ(running: Running) -> None:
    """The comparison means something: no other head would pass."""
    [output] = serve(running.llm, [Ask(prompt_of(17, 146), heads(dict.fromkeys(HEADS, "all")))])
    payload = output.capture_results["inline"].payload
    sequence = [*prompt_of(17, 146), *output.outputs[0].token_ids][:-1]
    want = running.judge.reference.run(sequence).heads
    assert len(payload) == len(HEADS) * models.LAYERS
    for (point, layer), rows in payload.items():
        assert rows.heads == tuple(range(HEADS[point]))
        assert serving.worst_row(rows.values, want[point, layer]) <= READ_TOLERANCE
        assert serving.worst_row(rows.values.roll(1, 1), want[point, layer]) > 0.5


def test_cached_prefixes(running: Running) -> None:
    """A hit ends before the first wanted position, and reaches as far as it may."""
    prompt = prompt_of(70, 147)
    last, all_rows = heads({"q": "all", "z": [0]}, "last_prompt"), heads({"k": [2]})
    hits = []
    for fields in (last, last, all_rows):
        ask = Ask(prompt, fields)
        [output] = serve(running.llm, [ask])
        running.judge.check(ask, output)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 64, 0]


def test_completions_of_one_prompt(running: Running) -> None:
    ask = Ask(
        prompt_of(5, 148),
        {**heads({"z": {1: [2]}}), "n": 2, "temperature": 1.0, "seed": 3},
    )
    [output] = serve(running.llm, [ask])
    one, two = output.outputs
    assert list(one.token_ids) != list(two.token_ids)
    for completion in (one, two):
        running.judge.check_rows(ask, completion)
        assert completion.capture_results["inline"].payload["z", 1].values.shape == (10, 1, 32)


def test_several_captures(running: Running) -> None:
    """Of other heads at the same sites, and scores with a matrix for each layer beside them."""
    generator = torch.Generator().manual_seed(4)
    by_layer = {n: torch.randn(2, models.HIDDEN, generator=generator) for n in (0, 1)}
    asked = [
        {"hooks": {"q": {1: [2], 2: "all"}, "post_block": [1]}, "positions": "all"},
        {"hooks": {"q": {1: [0, 3]}}, "positions": [1, 20]},
        {"hooks": {"post_block": [0, 1]}, "project": {"post_block": by_layer}, "positions": [1]},
    ]
    ask = Ask(prompt_of(17, 152), {**STEERED, "capture": {"inline": asked}})
    [output] = serve(running.llm, [ask], log_probs=False)
    results = output.capture_results
    assert list(results) == ["inline[0]", "inline[1]", "inline[2]"]
    sequence = [*ask.prompt, *output.outputs[0].token_ids][:-1]
    want = running.judge.reference.run(sequence, running.judge.deltas(ask, sequence))
    every = list(range(len(sequence)))
    for name, site, chosen, positions in (
        ("inline[0]", ("q", 1), [2], every),
        ("inline[0]", ("q", 2), [0, 1, 2, 3], every),
        ("inline[1]", ("q", 1), [0, 3], [1, 20]),
    ):
        rows = results[name].payload[site]
        assert rows.positions.tolist() == positions and list(rows.heads) == chosen
        exact = want.heads[site][positions]
        assert serving.worst_row(rows.values, exact[:, chosen]) <= READ_TOLERANCE
        assert serving.worst_row(rows.values, exact.roll(1, 1)[:, chosen]) > 0.5
    stream = results["inline[0]"].payload["post_block", 1].values
    assert serving.worst_row(stream, want.rows["post_block", 1]) <= READ_TOLERANCE
    for layer, matrix in by_layer.items():
        scores = results["inline[2]"].payload["post_block", layer].values
        exact = want.rows["post_block", layer][[1]]
        assert serving.worst_row(scores, exact @ matrix.T) <= 1e-3
        assert serving.worst_row(scores, exact @ by_layer[1 - layer].T) > 0.1


def test_consumers_and_files(running: Running) -> None:
    """Each consumer gets its own heads, whatever others take of the same sites."""
    hooks = {"q": {1: [3, 0], 2: [1, 2]}, "z": {1: [0, 1]}}
    asked = {"hooks": hooks, "positions": "all_prompt"}
    capture = {
        "inline": {"hooks": {"q": {1: [2]}}, "positions": "all_prompt"},
        "filesystem": {**asked, "request_id": "heads"},
        "look": asked,
        "logging": {"hooks": {"k": "all"}, "positions": [0]},
    }
    prompt = prompt_of(17, 149)
    running.seen.clear()
    [output] = serve(running.llm, [Ask(prompt, {"capture": capture})])
    assert {r.status for r in output.capture_results.values()} == {"ok"}
    want = running.judge.reference.run(prompt).heads
    rows = output.capture_results["inline"].payload["q", 1]
    assert serving.worst_row(rows.values, want["q", 1][:, [2]]) <= READ_TOLERANCE
    stored = open_captures(str(running.root)).find("heads")
    [batches] = running.seen.values()
    for (point, layer), chosen in {("q", 1): (0, 3), ("q", 2): (1, 2), ("z", 1): (0, 1)}.items():
        rows = stored.rows(point, layer)
        looked = [batch[point, layer] for batch in batches]
        assert rows.heads == looked[0].heads == chosen
        assert serving.worst_row(rows.values, want[point, layer][:, list(chosen)]) <= READ_TOLERANCE
        assert torch.equal(rows.values, torch.cat([part.values for part in looked]))
    table = open_captures(str(running.root)).table("q", 2, position=-1)
    assert table.values.shape == (1, 2, 32)
    assert "k 0 |h|=" in output.capture_results["logging"].payload


def test_rows_of_several_widths_are_inline_only(running: Running) -> None:
    for hooks in ({"q": {0: [1], 1: "all"}}, {"q": {0: [1]}, "post_block": [0]}):
        request = {"hooks": hooks, "positions": "last_prompt"}
        with pytest.raises(ValueError, match=r"capture\.logging\.hooks: rows have different"):
            serve(running.llm, [Ask(prompt_of(5, 150), {"capture": {"logging": request}})])
        ask = Ask(prompt_of(5, 150), {"capture": {"inline": request}})
        running.judge.check(ask, serve(running.llm, [ask])[0])


def test_stop_strings_and_what_was_not_reached(running: Running) -> None:
    """A named position that the answer did not reach makes the result partial; others are right."""
    ask = Ask(prompt_of(5, 151), {**heads({"q": {0: [1]}}, [0, 8]), "max_tokens": 5})
    [output] = serve(running.llm, [ask])
    running.judge.check(ask, output)
    first = output.outputs[0].token_ids[0]
    early = Ask(ask.prompt, {**ask.fields, "stop_token_ids": [first], "ignore_eos": False})
    [output] = serve(running.llm, [early])
    result = output.capture_results["inline"]
    assert result.status == "partial_error"
    assert result.payload["q", 0].values.shape == (1, 1, 32)


def attention(**asked: Any) -> dict[str, Any]:
    return {"capture": {"inline": {"attention": asked}}}


def test_attention_weights(running: Running) -> None:
    """Of steered and plain requests in one batch, in chunks, of prompts and answers."""
    asks = [
        Ask(prompt_of(41, 160), attention(heads="all", queries="all", give=["weights"])),
        Ask(
            prompt_of(17, 161),
            STEERED | attention(heads=[[3, 2], [1, 0]], queries="predicting", give=["weights"]),
        ),
        Ask(prompt_of(5, 162), attention(heads={"0-1": [3, 1]}, give=["weights"])),
        Ask(prompt_of(9, 163), heads({"q": "all"})),
        Ask(prompt_of(9, 164), STEERED),
    ]
    with serving.watching(running.llm) as steps:
        outputs = serve(running.llm, asks)
    assert len(steps.chunks(0)) > 41 // 24 + 1
    for ask, output in zip(asks[:3], outputs, strict=False):
        assert running.judge.check_weights(ask, output.outputs[0]) > 0.05
    running.judge.check(asks[3], outputs[3])
    found = {
        site: rows.heads for site, rows in outputs[1].capture_results["inline"].payload.items()
    }
    assert found == {("attn", 1): (0,), ("attn", 3): (2,)}


def test_what_is_given_of_attention(running: Running) -> None:
    """Mass, peak, top and sums are those of the weights, which are transformers'."""
    keys = {"start": {"stop": 4}, "few": [5, 7], "rest": {"start": 8}}
    captures = [
        {"attention": {"heads": {1: [2, 0], 2: "all"}, "queries": "all", "give": give, **more}}
        for give, more in (
            (["peak", "mass"], {"keys": keys}),
            (["weights", "top"], {"top": 3}),
            (["weights"], {"sum": "heads"}),
            (["weights"], {"sum": "all"}),
        )
    ]
    ask = Ask(prompt_of(17, 165), {"capture": {"inline": captures}})
    [output] = serve(running.llm, [ask])
    ranges, top, by_layer, total = (
        output.capture_results[f"inline[{i}]"].payload for i in range(4)
    )
    assert running.judge.check_weights(ask, output.outputs[0], "inline[1]") > 0.05
    sums: dict[int, torch.Tensor] = {}
    for layer in (1, 2):
        rows, best = ranges["attn", layer], top["attn", layer]
        assert rows.ranges == ("start", "few", "rest") and rows.give == ("mass", "peak")
        for i, weights in enumerate(best.weights):
            parts = [weights[:, :4], weights[:, [k for k in (5, 7) if k <= i]], weights[:, 8:]]
            mass = torch.stack([part.sum(-1) for part in parts], -1)
            assert torch.allclose(rows.mass[i], mass, atol=1e-6)
            peaks = [part.amax(-1) if part.numel() else part.sum(-1) for part in parts]
            assert torch.allclose(rows.peak[i], torch.stack(peaks, -1))
            count = min(3, i + 1)
            first = weights.sort(-1, descending=True)
            assert torch.equal(best.top_weights[i, :, :count], first.values[:, :count])
            at = best.top_positions[i].long()
            assert torch.equal(weights.gather(1, at[:, :count]), first.values[:, :count])
            assert (at[:, count:] == -1).all()
            summed = by_layer["attn", layer].weights[i]
            assert torch.allclose(summed, weights.sum(0), atol=1e-6)
            sums[i] = sums.get(i, 0) + summed
        with pytest.raises(ValueError, match="'weights' was not asked for: the capture gives"):
            _ = rows.weights
    assert list(total) == [("attn", None)]
    for i, weights in enumerate(total["attn", None].weights):
        assert torch.allclose(weights, sums[i], atol=1e-6)
    assert total["attn", None].at(3).weights[0].shape == (4,)


@pytest.mark.parametrize("layout", ["packed", "per_file", "sharded", "ehs"])
def test_attention_in_files(running: Running, layout: str) -> None:
    """They give back what inline does, bit for bit: each part, and sums; of other queries not."""
    keys = {"start": {"stop": 4}, "few": [5, 7]}
    forms: list[tuple[list[str], dict[str, Any]]] = [
        (["mass", "peak", "top"], {"keys": keys, "top": 3}),
        (["weights"], {}),
        (["weights"], {"sum": "heads"}),
        (["weights"], {"sum": "all"}),
    ]
    for i, (give, more) in enumerate(forms):
        asked = {"heads": {1: [2, 0], 2: [3, 1]}, "queries": "all", "give": give, **more}
        name = {"request_id": f"seen{i}", "tag": f"attention-{layout}", "layout": layout}
        capture = {"inline": {"attention": asked}, "filesystem": {"attention": asked, **name}}
        [output] = serve(running.llm, [Ask(prompt_of(41, 168), {"capture": capture})])
        assert {r.status for r in output.capture_results.values()} == {"ok"}
        stored = open_captures(str(running.root)).find(f"seen{i}", f"attention-{layout}")
        assert stored.sites == (("attn", 1), ("attn", 2))
        for (_, layer), rows in output.capture_results["inline"].payload.items():
            read = stored.attention(layer)
            assert (read.give, read.heads, read.ranges) == (rows.give, rows.heads, rows.ranges)
            assert read.positions.tolist() == rows.positions.tolist() == list(range(len(rows)))
            assert read.token_ids.tolist() == rows.token_ids.tolist()
            if give == ["weights"]:
                pairs = list(zip(read.weights, rows.weights, strict=True))
            else:
                pairs = [(read.mass, rows.mass), (read.peak, rows.peak)]
                pairs += [(read.top_positions, rows.top_positions)]
                pairs += [(read.top_weights, rows.top_weights)]
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
            assert torch.equal(read.at(7)._rows(), rows.at(7)._rows())
            assert not torch.equal(read.at(7)._rows(), rows.at(8)._rows())
        with pytest.raises(KeyError, match=r"has weights of attention: read attention\(1\)"):
            stored.rows("attn", 1)
        lacking = 1 if more.get("sum") == "all" else None
        with pytest.raises(KeyError, match=f"has no attention of layer {lacking}"):
            stored.attention(lacking)


def test_attention_of_other_numbers_of_heads_is_not_for_files(running: Running) -> None:
    asked = {"attention": {"heads": {0: [1], 1: "all"}, "give": ["weights"]}}
    says = r"capture\.filesystem\.attention\.heads: rows have different widths"
    with pytest.raises(ValueError, match=says):
        serve(running.llm, [Ask(prompt_of(5, 169), {"capture": {"filesystem": asked}})])


def test_attention_costs_no_prefix_hit(running: Running) -> None:
    """Keys may be cached; only wanted queries are computed."""
    prompt, hits = prompt_of(70, 166), []
    for queries in ("last_prompt", "last_prompt", [3]):
        ask = Ask(prompt, attention(heads="all", queries=queries, give=["weights"]))
        [output] = serve(running.llm, [ask])
        assert running.judge.check_weights(ask, output.outputs[0]) > 0.05 or queries == [3]
        hits.append(output.num_cached_tokens)
    assert hits == [0, 64, 0]


def test_attention_of_completions(running: Running) -> None:
    asked = attention(heads={2: [1]}, queries="all_generated", give=["weights"])
    ask = Ask(prompt_of(5, 167), {**asked, "n": 2, "temperature": 1.0, "seed": 3})
    [output] = serve(running.llm, [ask])
    one, two = output.outputs
    assert list(one.token_ids) != list(two.token_ids)
    for completion in (one, two):
        assert running.judge.check_weights(ask, completion) > 0.02
