# SPDX-License-Identifier: Apache-2.0
"""Rows under a lens are what transformers' own final norm and head say of its rows, from engines
that chunk, steer and share steps."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.models import HIDDEN, LAYERS, VOCAB
from tests.conformance.runner import Reference, unread
from tests.support import serving
from tests.support.serving import Ask, Judge, prompt_of, relative, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.cli import main
from vllm.entrypoints.cli.steering.convert import convert_lens
from vllm.v1.interventions.worker.check import lens as lens_check
from vllm.v1.interventions.worker.check import taps as tap_check
from vllm.v1.interventions.worker.check.taps import check_worker
from vllm.v1.interventions.worker.making import lens as lens_reader

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

TOLERANCE = 2e-5
"""Of a log-probability, in nats."""
APART = 0.1
"""Least difference of what must differ, in nats."""
ROWS = 40
"""Rows a step may read under lenses; seven of them at once."""
LAST = "post_block", LAYERS - 1
STEERED = {"steering_vectors": {"post_block": {1: vector(70)}}}
NORMS = lens_check._norms
EVERYWHERE = dict.fromkeys(STREAM_POINTS, "all")
FULL: dict[str, Any] = {"name": "logit", "top_k": 5, "tokens": [3, 200, 17], "entropy": True}


def under(positions: Any = "all", lens: Any = FULL, hooks: Any = EVERYWHERE) -> dict[str, Any]:
    """One capture under a lens."""
    return {"hooks": hooks, "positions": positions, "lens": lens}


def inline(*captures: dict[str, Any]) -> dict[str, Any]:
    return {"capture": {"inline": captures[0] if len(captures) == 1 else list(captures)}}


def matrix(seed: int) -> torch.Tensor:
    """float32 [HIDDEN, HIDDEN] that keeps norms."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5


TUNED = {f"{n}.weight": matrix(n) for n in (0, 3)} | {f"{n}.bias": matrix(9)[n] for n in (0, 3)}
JACOBIAN = {f"{n}.weight": matrix(20 + n) for n in range(LAYERS)}
IDENTITY = {f"{n}.weight": torch.eye(HIDDEN) for n in range(LAYERS)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tuned lens of two layers, a Jacobian one, and one that changes nothing."""
    folder, made = tmp_path_factory.mktemp("lenses"), {}
    kinds = {"tuned": TUNED, "moved": JACOBIAN, "same": IDENTITY}
    for name, tensors in kinds.items():
        made[name] = folder / f"{name}.safetensors"
        if name != "moved":
            save_file(tensors, made[name], {"kind": "tuned" if name == "tuned" else "jacobian"})
    # One as it is published, by layer and stacked; the layers in any order.
    layers = [3, 0, *range(1, LAYERS - 1)]
    by_layer = {n: JACOBIAN[f"{n}.weight"] for n in layers}
    stacked = torch.stack(list(by_layer.values())).double()
    for name, matrices in ("by_layer", by_layer), ("stacked", stacked):
        lens = {"J": matrices, "source_layers": layers, "d_model": HIDDEN, "n_prompts": 7}
        torch.save(lens, folder / f"{name}.pt")
    command = ["vllm", "steering", "convert", str(folder / "by_layer.pt"), str(made["moved"])]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", command)
        main.main()
    assert ended.value.code == 0
    assert convert_lens(folder / "stacked.pt", folder / "s.safetensors") == sorted(layers)
    assert (folder / "s.safetensors").read_bytes() == made["moved"].read_bytes()
    return made


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, files: dict[str, Path]) -> Iterator[tuple[LLM, Judge]]:
    """A model that caps its logits, whose head is its embedding."""
    path, row = tiny_models.path("gemma2"), tiny_models.row("gemma2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lens_reader, "LOGIT_BYTES", 7 * 4 * VOCAB)
        llm = make_llm(
            path,
            enable_steering=True,
            capture_consumers=["inline"],
            capture_points=[*STREAM_POINTS, "final", "q", "k", "z"],
            capture_lens=["logit", *[f"{name}={file}" for name, file in files.items()]],
            capture_lens_rows=ROWS,
            **row.engine,
        )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def read(judge: Judge, sequence: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the reference whose last layer returns `rows`: [n, vocabulary]."""
    last = judge.reference.run(sequence).rows[LAST]
    logits = judge.reference.run(sequence, {LAST: rows - last}).logits
    return logits.log_softmax(-1)


def check(rows: Any, want: torch.Tensor, tokens: list[int]) -> None:
    """What a site gives is that of log-probabilities [n, vocabulary]."""
    assert (rows.top_logprobs - want.topk(5).values).abs().max() <= TOLERANCE
    assert torch.equal(rows.top_ids[:, 0].long(), want.argmax(-1))
    assert (rows.top_logprobs - want.gather(1, rows.top_ids.long())).abs().max() <= TOLERANCE
    own = want[:, tokens]
    assert (rows.token_logprobs - own).abs().max() <= TOLERANCE
    # Those about as likely may stand on either side.
    most = (want[:, None] >= own[..., None] - TOLERANCE).sum(-1)
    least = (want[:, None] > own[..., None] + TOLERANCE).sum(-1) + 1
    assert ((least <= rows.token_ranks) & (rows.token_ranks <= most)).all()
    assert (most == least).float().mean() > 0.9, "ranks mean nothing"
    entropy = -(want.exp() * want).sum(-1)
    assert (rows.entropy - entropy).abs().max() <= TOLERANCE


def test_rows_are_what_norm_and_head_say(pair: tuple[LLM, Judge]) -> None:
    """At all points of all layers; of steered and plain requests, which read from another."""
    llm, judge = pair
    other = {"name": "logit", "top_k": 5, "tokens": [9], "entropy": True}
    asks = [
        Ask(prompt_of(20, 70), inline(under())),
        Ask(prompt_of(20, 70), {**STEERED, **inline(under())}),
        Ask(prompt_of(7, 71), {**STEERED, **inline(under("predicting", other))}),
        Ask(prompt_of(9, 72), inline(under([0, -1], hooks={"pre_attn": [2]}))),
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks, log_probs=False)
    assert steps.largest_row_count <= ROWS, "more rows in a step than it may read"
    assert len(steps.chunks(0)) > 3 + serving.GENERATED, "the prompt was not cut"
    for ask, output in zip(asks, outputs, strict=True):
        completion = output.outputs[0]
        result = completion.capture_results["inline"]
        assert result.status == "ok", result.error
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        streams = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
        asked = ask.fields["capture"]["inline"]
        for site, rows in result.payload.items():
            assert rows.token_ids.tolist() == [sequence[t] for t in rows.positions]
            want = read(judge, sequence, streams[site])[rows.positions]
            check(rows, want, asked["lens"]["tokens"])
            assert rows.asked == tuple(asked["lens"]["tokens"]) and rows.lens == "logit"
    plain, steered = (out.outputs[0].capture_results["inline"].payload for out in outputs[:2])
    for layer in range(LAYERS):
        moved = (plain["post_block", layer].entropy - steered["post_block", layer].entropy)[:20]
        assert (moved.abs().max() > APART) == (layer >= 1), "only behind the vector it differs"


def test_the_last_layer_is_what_the_server_says(pair: tuple[LLM, Judge]) -> None:
    """Of the prompt's own tokens; the layer before says something else. Under a second norm, which
    is what comes of transformers' last hidden state, the answer is another."""
    llm, judge = pair
    prompt = prompt_of(20, 73)
    lens = {"name": "logit", "top_k": 5, "tokens": prompt, "entropy": True}
    ask = Ask(prompt, {**inline(under("all_prompt", lens)), "prompt_logprobs": 0})
    [output] = serve(llm, [ask], log_probs=False)
    payload = output.outputs[0].capture_results["inline"].payload
    ids = range(len(prompt) - 1)
    own = [output.prompt_logprobs[t + 1][prompt[t + 1]] for t in ids]
    for site in (LAST, ("post_block", LAYERS - 2)):
        made = torch.stack([payload[site].token_logprobs[t, t + 1] for t in ids])
        off = float((made - torch.tensor([entry.logprob for entry in own])).abs().max())
        assert off <= 1e-5 if site == LAST else off >= APART
    ranks = [int(payload[LAST].token_ranks[t, t + 1]) for t in ids]
    assert ranks == [entry.rank for entry in own]
    model: Any = judge.reference.model
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    again = read(judge, prompt, states)
    assert (again.topk(5).values - payload[LAST].top_logprobs).abs().max() >= APART


def test_lens_beside_rows(pair: tuple[LLM, Judge]) -> None:
    """As one of several captures, each with its own positions; some parts alone; pickled."""
    llm, judge = pair
    prompt = prompt_of(12, 74)
    two = {"post_block": [3, 1]}
    asked = [
        under("predicting", {"name": "logit", "top_k": 2}, two),
        {"hooks": {"post_block": "all", "pre_attn": [0]}, "positions": "all"},
        under([2], {"name": "logit", "tokens": [5]}, {"post_attn": "all"}),
        {**under([3], {"name": "logit", "entropy": True}), "hooks": {"post_block": [1]}},
    ]
    several, alone = serve(
        llm, [Ask(prompt, inline(*asked)), Ask(prompt, inline(under()))], log_probs=False
    )
    results = several.outputs[0].capture_results
    whole = alone.outputs[0].capture_results["inline"].payload
    assert {result.status for result in results.values()} == {"ok"}
    few, rows, of_token, chaos = (results[f"inline[{i}]"].payload for i in range(4))
    sequence = [*prompt, *several.outputs[0].token_ids][:-1]
    streams = judge.reference.run(sequence).rows
    assert all(relative(rows[site].values, streams[site]) <= 1e-4 for site in rows)
    assert list(few) == [("post_block", 1), ("post_block", 3)]
    for site, made in few.items():
        assert made.give == ("top_ids", "top_logprobs")
        assert made.positions.tolist() == list(range(11, len(sequence)))
        assert torch.equal(made.top_ids, whole[site].top_ids[11:, :2])
        with pytest.raises(ValueError, match="'entropy' was not asked for"):
            _ = made.entropy
        one = pickle.loads(pickle.dumps(made)).at(12)
        assert torch.equal(one.top_ids, made.top_ids[1:2]) and len(one) == 1
        assert (one.top_logprobs - whole[site].top_logprobs[12:13, :2]).abs().max() <= TOLERANCE
        with pytest.raises(KeyError, match="position 3 was not captured"):
            made.at(3)
    for site, made in of_token.items():
        want = read(judge, sequence, streams[site])[2, 5]
        assert (made.token_logprobs - want).abs().max() <= TOLERANCE
    made = chaos["post_block", 1].entropy - whole["post_block", 1].entropy[3]
    assert made.abs().max() <= TOLERANCE


def test_lenses_of_files(pair: tuple[LLM, Judge]) -> None:
    """x + W x + b, and J x, go to norm and head; with J = 1 it is the logit lens bit for bit."""
    llm, judge = pair
    prompt, hooks = prompt_of(9, 75), {"post_block": "all"}
    two = {"post_block": [0, 3]}
    asked = [
        under(lens={**FULL, "name": "tuned"}, hooks=two),
        under(lens={**FULL, "name": "moved"}, hooks=hooks),
        under(lens={**FULL, "name": "same"}, hooks=hooks),
        under(lens=FULL, hooks=hooks),
    ]
    [output] = serve(llm, [Ask(prompt, {**STEERED, **inline(*asked)})], log_probs=False)
    results = output.outputs[0].capture_results
    assert {result.status for result in results.values()} == {"ok"}
    tuned, moved, same, plain = (results[f"inline[{i}]"].payload for i in range(4))
    sequence = [*prompt, *output.outputs[0].token_ids][:-1]
    ask = Ask(prompt, STEERED)
    streams = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
    for site in plain:
        rows, layer = streams[site], site[1]
        jacobian = JACOBIAN[f"{layer}.weight"]
        check(moved[site], read(judge, sequence, rows @ jacobian.T), FULL["tokens"])
        assert (moved[site].entropy - plain[site].entropy).abs().max() >= APART
        for name, part in same[site].parts().items():
            assert torch.equal(part, plain[site].parts()[name]), (site, name)
    assert list(tuned) == [("post_block", 0), ("post_block", 3)]
    for site, made in tuned.items():
        weight, bias = (TUNED[f"{site[1]}.{part}"] for part in ("weight", "bias"))
        moved_rows = streams[site] + streams[site] @ weight.T + bias
        check(made, read(judge, sequence, moved_rows), FULL["tokens"])
        assert (made.entropy - plain[site].entropy).abs().max() >= APART
    for layers in ([1], "all"):
        wrong = under(lens={**FULL, "name": "tuned"}, hooks={"post_block": layers})
        with pytest.raises(ValueError, match="lens tuned does not read post_block of layer 1"):
            serve(llm, [Ask(prompt, inline(wrong))])


def test_deltas_are_the_whole(pair: tuple[LLM, Judge]) -> None:
    llm, _ = pair
    ask = Ask(prompt_of(20, 81), inline(under("predicting")))
    (whole,) = serve(llm, [ask])
    expected = whole.outputs[0].capture_results["inline"].payload
    for site, rows in serving.streamed(llm, ask).items():
        for name in rows.give:
            assert torch.equal(getattr(rows, name), getattr(expected[site], name)), (site, name)


def scaled_norms(model: Any, layer: Any) -> Iterator[Any]:
    """Those of `lens_check._norms`, scaled by a little."""
    for norm in NORMS(model, layer):
        yield lambda rows, norm=norm: norm(rows) * 1.001


def test_a_model_whose_norm_is_not_found_does_not_start(
    pair: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No norm at all, one of a layer, and the right one scaled by a little."""
    llm, _ = pair

    def of_a_layer(model: Any, layer: Any) -> Iterator[Any]:
        yield layer.input_layernorm

    def none(model: Any, layer: Any) -> Iterator[Any]:
        yield next(NORMS(model, layer))

    for wrong in (scaled_norms, of_a_layer, none):
        with monkeypatch.context() as patch:
            patch.setattr(lens_check, "_norms", wrong)
            with pytest.raises(RuntimeError, match="no norm of Gemma2ForCausalLM gives"):
                llm.collective_rpc(check_worker)
    [shape] = llm.collective_rpc(check_worker)
    assert shape is not None and shape.vocab_size == VOCAB
    assert set(shape.lenses) == {"logit", "tuned", "moved", "same"}


@pytest.mark.parametrize("weights", ["zero row", "mostly zero", "one row", "massive", "all zero"])
def test_start_up_proofs_of_degenerate_embeddings(
    pair: tuple[LLM, Judge], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of padding and massive activations, without biases; a norm that is off by a little is
    refused as before. The embedding is the head, too."""
    llm, _ = pair
    model: Any = llm.apply_model(lambda model: model)[0]
    embedding = model.model.embed_tokens.weight
    changed = [embedding, *(p for n, p in model.named_parameters() if n.endswith(".bias"))]
    before = [each.clone() for each in changed]
    [whole] = llm.collective_rpc(check_worker)
    [caches] = llm.collective_rpc(lambda worker: worker.worker.model_runner.kv_caches)

    def prove(*args: Any) -> None:
        """As where nothing was steered before: no keys and values are left in the cache."""
        for pages in caches:
            pages.zero_()
        lens_check.prove_lenses(*args)

    monkeypatch.setattr(tap_check, "prove_lenses", prove)
    try:
        with torch.inference_mode():
            for bias in changed[1:]:
                bias.zero_()
            match weights:
                case "zero row":
                    embedding[0] = 0
                case "mostly zero":
                    embedding[torch.arange(len(embedding)) % 4 > 0] = 0
                case "one row":
                    embedding.copy_(before[0][3].expand_as(embedding))
                case "massive":
                    embedding[:, 5] = 2e4
                case _:
                    embedding.zero_()
        if weights == "all zero":
            with pytest.raises(RuntimeError, match="is zero or not finite for each of 16 random"):
                llm.collective_rpc(check_worker)
            return
        [shape] = llm.collective_rpc(check_worker)
        assert shape is not None and whole is not None
        assert shape.lenses == whole.lenses and unread(shape) == unread(whole) == {}
        assert all(layer.rule for layer in shape.layers.values()), "no attention was proved"
        monkeypatch.setattr(lens_check, "_norms", scaled_norms)
        with pytest.raises(RuntimeError, match="no norm of Gemma2ForCausalLM gives"):
            llm.collective_rpc(check_worker)
    finally:
        with torch.inference_mode():
            for each, kept in zip(changed, before, strict=True):
                each.copy_(kept)
