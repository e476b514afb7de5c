# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, weights that people have, beside transformers on the same folder.

One engine in float32 offers everything; V2 has one under the interpreter. Both cut prompts into
chunks and read the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conformance.engine import Runner, shut_down
from tests.conformance.reference import Site
from tests.support.focus import Focusing, focused
from tests.support.real import (
    CHAT,
    GENERATED,
    TOP,
    Real,
    answer_of,
    errors,
    first_layers,
    log_prob_error,
    model_folder,
    rows_of,
)
from tests.support.real_checks import (
    BRANCHES,
    CHUNK,
    ENDS,
    EVERYTHING,
    check_log_probs,
    check_rows,
    check_scores_means_and_prefix_cache,
    check_writes,
    hooks,
    inline,
    neighbour,
    start,
)
from vllm import SamplingParams
from vllm.config.points import HEAD_POINTS, STREAM_POINTS

pytestmark = pytest.mark.full

LAYERS = 8
"""Of V2, whose kernels are interpreted. Massive activations are made in these."""


@pytest.fixture(scope="module")
def full() -> Iterator[Real]:
    """In float32, eager, with all points and families."""
    real = start("float32", model_folder(), **EVERYTHING)
    yield real
    shut_down(real.llm)


@pytest.fixture(scope="module")
def real(
    request: pytest.FixtureRequest, runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Real]:
    """Under V2 an engine of its own: the points of the stream are enough, and the first layers."""
    if runner == "v1":
        yield request.getfixturevalue("full")
        return
    made = start(
        "float32", first_layers(model_folder(), LAYERS, tmp_path_factory.mktemp("real") / "first")
    )
    yield made
    shut_down(made.llm)


def prompts(real: Real) -> list[list[int]]:
    long = real.tokens(real.chat_text(CHAT))
    assert len(long) > CHUNK, "nothing is cut"
    return [
        long,
        real.tokens("The capital of France is"),
        real.tokens("def add(a, b):\n    return"),
    ]


@pytest.mark.v2
def test_every_point_of_every_layer_is_read(real: Real) -> None:
    points = STREAM_POINTS if real.dtype == torch.bfloat16 else (*STREAM_POINTS, *ENDS, *BRANCHES)
    answers = real.ask([(prompt, inline(hooks(*points))) for prompt in prompts(real)])
    check_rows(real, answers, [None] * len(answers))
    assert {site[1] for site in answers[0].rows} == set(real.layers)
    largest = max(float(rows.abs().max()) for rows in answers[0].rows.values())
    typical = float(answers[0].rows["post_block", 5].float().abs().median())
    print(f"largest {largest:.0f}, median {typical:.2f}")
    least = 500 if len(real.layers) == LAYERS else 1000
    assert largest > least * typical, "this model had massive activations"


@pytest.mark.v2
def test_every_point_of_every_layer_is_written(real: Real) -> None:
    check_writes(real, real.tokens("The capital of France is"))


@pytest.mark.v2
def test_single_sites_move_the_answer_as_in_transformers(real: Real) -> None:
    """First, middle and last layer, in V2 the middle one; beside plain neighbours in a batch."""
    prompt = real.tokens("def add(a, b):\n    return")
    plain = real.run("exact", prompt)
    generator = torch.Generator().manual_seed(8)
    cases: list[tuple[Site, torch.Tensor]] = []
    first, middle, last = 0, len(real.layers) // 2, real.layers[-1]
    for layer in (middle,) if len(real.layers) == LAYERS else (first, middle, last):
        for point in STREAM_POINTS:
            size = float(plain.rows[point, layer].norm(dim=-1).median())
            vector = torch.randn(576, generator=generator)
            cases.append(((point, layer), vector * (size / vector.norm())))
    asked = [(prompt, {"steering_vectors": {p: {n: v}}}) for (p, n), v in cases]
    *answers, bystander = real.ask([*asked, (prompt, {})], TOP)
    for (site, vector), answer in zip(cases, answers, strict=True):
        check_log_probs(answer, real, {site: vector.expand(len(answer.ids), -1)})
    exact, same = real.both(bystander.ids)
    most = real.allowed_nats(bystander.top, same, exact)
    assert log_prob_error(bystander.top, exact) <= most


def test_heads_are_read(full: Real) -> None:
    asked = hooks(*HEAD_POINTS)
    answers = full.ask([(prompt, inline(asked)) for prompt in prompts(full)])
    check_rows(full, answers, [None] * len(answers))
    for site, rows in answers[0].rows.items():
        want = rows_of(full.run("exact", answers[0].ids))[site]
        assert errors(rows.roll(1, 1), want)[0] > 0.1, f"{site}: heads are alike"


def test_attention_weights(full: Real) -> None:
    """All weights of all heads; at the first token is the sink that real models have."""
    asked = {"attention": {"heads": "all", "queries": "all", "give": ["weights"]}}
    [answer] = full.ask([(prompts(full)[0], inline(asked))])
    exact, same = (forward.heads for forward in full.both(answer.ids))
    sites = answer.rows
    assert {layer for _, layer in sites} == set(full.layers)
    noise = max(float((same[site] - exact[site]).abs().max()) for site in sites)
    off = max(float((rows - exact[site]).abs().max()) for site, rows in sites.items())
    assert off <= max(1e-6, 4 * noise), (off, noise)
    for site, rows in sites.items():
        assert float((rows.roll(1, 1) - exact[site]).abs().max()) > 0.05, "heads are alike"
    sink = torch.stack([rows[-1, :, 0] for rows in sites.values()]).mean()
    assert sink > 0.3, "no attention sink"


def test_heads_are_written_and_focused(full: Real) -> None:
    """A vector at z, a head turned round, and keys in focus."""
    prompt = full.tokens("The capital of France is")
    width, layer = 9 * 64, 10
    vector = torch.randn(width, generator=torch.Generator().manual_seed(9))
    size = full.run("exact", prompt).heads["z", layer].flatten(1).norm(dim=-1).mean()
    vector = vector * float(4 * size / vector.norm())
    turned = {"op": "scale", "point": "z", "heads": {12: [0, 4, 8]}, "factor": -3.0}
    focus = Focusing({n: range(9) for n in full.layers}, range(1, 3), factor=32.0)
    added, scaled, focusing = full.ask(
        [
            (prompt, {"steering_vectors": {"z": {layer: vector}}}),
            (prompt, {"steering": [turned]}),
            (prompt, {"steering": [focus.request(len(prompt))]}),
        ],
        TOP,
    )
    check_log_probs(added, full, {("z", layer): vector.expand(len(added.ids), -1)})
    rows = full.run("exact", scaled.ids).heads["z", 12]
    factors = torch.zeros(9, 1, dtype=rows.dtype)
    factors[[0, 4, 8]] = -4.0
    check_log_probs(scaled, full, {("z", 12): (factors * rows).flatten(1)})
    plain = full.run("exact", focusing.ids)
    made = []
    for name in ("exact", "same"):
        model = getattr(full, name)
        with focused(model, list(model.model.layers), [focus]):
            # Deltas of nothing, so that it is not taken for the plain run.
            made.append(full.run(name, focusing.ids, {}))
    most = full.allowed_nats(focusing.top, made[1], made[0])
    assert log_prob_error(focusing.top, made[0]) <= most
    assert log_prob_error(focusing.top, plain) >= 2 * most


def test_logit_lens(full: Real) -> None:
    """At all layers, by transformers' own norm and head."""
    lens: dict[str, Any] = {"name": "logit", "top_k": 5, "tokens": [260, 7042], "entropy": True}
    asked = {**hooks("pre_attn", "post_block"), "lens": lens}
    [answer] = full.ask([(full.tokens("The capital of France is"), inline(asked))])
    model: Any = full.exact
    exact, same = full.both(answer.ids)

    def said(rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            table: torch.Tensor = model.lm_head(model.model.norm(rows.double())).log_softmax(-1)
        return table

    off, noise, apart = [], [], []
    for site, rows in answer.captured["inline"].items():
        want, near = said(exact.rows[site]), said(same.rows[site])
        top = want.gather(1, rows.top_ids.long())
        off.append(float((rows.top_logprobs - top).abs().max()))
        off.append(float((rows.token_logprobs - want[:, lens["tokens"]]).abs().max()))
        off.append(float((rows.entropy + (want.exp() * want).sum(-1)).abs().max()))
        noise.append(float((near - want).abs().max()))
        assert (rows.top_logprobs - want.topk(5).values).abs().max() <= off[-3] + 1e-3
        other = said(exact.rows[neighbour(site, full.layers)]).gather(1, rows.top_ids.long())
        apart.append(float((other - top).abs().max()))
    print(f"lens: {max(off):.1e}, noise {max(noise):.1e}, apart {min(apart):.1e}")
    assert max(off) <= max(1e-4, 4 * max(noise))
    assert min(apart) >= 10 * max(off)


def test_scores_means_and_the_prefix_cache(real: Real) -> None:
    check_scores_means_and_prefix_cache(real, prompts(real)[0])


def test_a_rule_ends_the_answer_where_its_row_says(full: Real) -> None:
    prompt, site = prompts(full)[0], ("post_block", 20)
    probe = torch.randn(576, generator=torch.Generator().manual_seed(3))
    [plain] = full.ask([(prompt, {})], generated=12)
    scores = full.run("exact", plain.ids).rows[site].double()[len(prompt) :] @ probe.double()
    ordered = scores.sort().values
    # Between two scores that are far from each other, so that some fire and some do not.
    middle = range(2, len(ordered) - 2)
    cut = max(middle, key=lambda i: float(ordered[i + 1] - ordered[i]))
    threshold = float(ordered[cut] + ordered[cut + 1]) / 2
    rule: dict[str, Any] = {
        "name": "r", "point": site[0], "layer": site[1], "probe": probe, "threshold": threshold,
        "then": "stop",
    }  # fmt: skip
    first = int((scores > threshold).nonzero()[0])
    never = {**rule, "threshold": 1e30}
    ended, whole = full.ask([(prompt, {"rules": [one]}) for one in (rule, never)], generated=12)
    said = ended.output.outputs[0]
    assert said.stop_reason == "rule:r" and whole.output.outputs[0].finish_reason == "length"
    assert said.rules["r"].fired_at == len(prompt) + first
    assert list(said.token_ids) == whole.output.outputs[0].token_ids[: first + 1]


@pytest.mark.parametrize(
    ("positions", "turns"),
    [
        ({"role": "system"}, [0]),
        ({"role": "user"}, [1, 3]),
        ({"role": "assistant", "turn": -1}, [2]),
        ({"role": "user", "turn": -1}, [3]),
    ],
)
def test_turns_of_its_own_template(full: Real, positions: Any, turns: list[int]) -> None:
    """The tokens of the content, in the text that transformers makes of the chat."""
    text = full.chat_text(CHAT)
    encoded = full.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    spans, at = [], 0
    for turn in CHAT:
        at = text.index(turn["content"], at)
        spans.append((at, at + len(turn["content"])))
    expected = [
        i
        for i, (start, stop) in enumerate(encoded.offset_mapping)
        if any(start < spans[turn][1] and stop > spans[turn][0] for turn in turns)
    ]
    asked = {"hooks": {"post_block": [15]}, "positions": positions}
    [output] = full.llm.chat(CHAT, params_of(inline(asked)), use_tqdm=False)
    answer = answer_of(output)
    assert output.prompt_token_ids == encoded.input_ids
    [rows] = answer.captured["inline"].values()
    assert rows.positions.tolist() == expected
    assert full.tokenizer.decode([answer.ids[i] for i in expected]) == "".join(
        CHAT[turn]["content"] for turn in turns
    )
    exact, same = (forward.rows["post_block", 15] for forward in full.both(answer.ids))
    assert errors(rows.values, exact[expected])[1] <= full.allowed(errors(same, exact))[1]


def params_of(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True, **fields)


def test_a_turn_that_the_template_adds_is_nobody_s(full: Real) -> None:
    """Without a system turn the template writes one of its own."""
    chat: list[Any] = CHAT[1:2]
    assert "SmolLM" in full.chat_text(chat)
    asked = {"hooks": {"post_block": [15]}, "positions": {"role": "system"}}
    with pytest.raises(ValueError, match="no turn is of"):
        full.llm.chat(chat, params_of(inline(asked)), use_tqdm=False)
