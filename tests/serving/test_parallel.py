# SPDX-License-Identifier: Apache-2.0
"""Two workers share the model: split by width (V1) or by depth (V2, which is the runner upstream
can split by depth on a CPU). The reference is Hugging Face, as for one worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.conformance.models import HIDDEN
from tests.serving.test_focus_scheduling import check_focused
from tests.serving.test_lens import APART, FULL, JACOBIAN, inline, read, under
from tests.serving.test_lens import check as check_lens
from tests.serving.test_project_serving import check as check_scores
from tests.serving.test_project_serving import matrix, mean, scores
from tests.support import serving
from tests.support.focus import Focusing
from tests.support.serving import Ask, Judge, capture, prompt_of, relative, serve, vector
from vllm import LLM
from vllm.config.points import CAPTURE_POINTS, HEAD_POINTS, STEERING_POINTS
from vllm.v1.capture.lens import LensRows

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

PROMPTS = check.prompts(lengths=(17, 5))
STEERED = {"steering_vectors": {"post_attn": {1: vector(70)}}}
EVERY = {layer: range(models.HEADS) for layer in range(models.LAYERS)}


@pytest.fixture(scope="module")
def pair(
    tiny_models: TinyModels, runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Judge]]:
    """Chunks of at most 24."""
    lens = tmp_path_factory.mktemp("lens") / "moved.safetensors"
    save_file(JACOBIAN, lens, {"kind": "jacobian"})
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    split = "tensor_parallel_size" if runner == "v1" else "pipeline_parallel_size"
    options: dict[str, Any] = {split: 2, "enable_steering": True, "max_num_batched_tokens": 24}
    options["capture_points"] = list(CAPTURE_POINTS)
    options["steering_points"] = list(STEERING_POINTS)
    options["steering_families"] = ["add", "scale", "focus"]
    if runner == "v1":
        options |= {"capture_lens": ["logit", f"moved={lens}"], "capture_lens_rows": 40}
    with pytest.MonkeyPatch.context() as patch:
        # A forked worker would inherit the threads of this process, but not their locks' owners.
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        llm = make_llm(path, capture_consumers=["inline"], enable_prefix_caching=False, **options)
        yield llm, Judge(check.Reference(row, models.load(row, path)))
        shut_down(llm)


def test_two_workers_agree_with_transformers(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    results = check.write_errors(llm, judge.reference, PROMPTS)
    assert not [r for r in results if r.error > check.WRITE_TOLERANCE]
    assert not [r for r in results if r.moved is not None and r.moved < check.LEAST_MOVE]
    rows = check.read_errors(llm, judge.reference, PROMPTS)
    assert rows and not [r for r in rows if r.error > check.READ_TOLERANCE]


ASKS = [
    Ask(prompt_of(41, 100), capture("all")),
    # Of the first stage alone, of the last, of both.
    Ask(prompt_of(30, 101), {**STEERED, **capture([3, 29], ("post_block",), [0])}),
    Ask(prompt_of(5, 102), capture("all", ("pre_attn", "post_attn"), [models.LAYERS - 1])),
    Ask(prompt_of(5, 103), {**STEERED, **capture("last_generated", ("post_block",), "all")}),
]


def test_rows_of_all_workers_arrive_as_one(pair: tuple[LLM, Judge]) -> None:
    """Sites of one stage and of both, in one batch, a prompt in chunks."""
    llm, judge = pair
    with serving.watching(llm) as steps:
        outputs = serve(llm, ASKS)
    assert len([n for n in steps.chunks(0) if n > 1]) > 1, "the prompt was computed at once"
    for ask, output in zip(ASKS, outputs, strict=True):
        judge.check(ask, output)


def test_heads_of_all_workers(pair: tuple[LLM, Judge]) -> None:
    """Each rank has half of the heads, or each stage half of the layers."""
    llm, judge = pair
    hooks = {"q": {0: [0, 3], 3: "all"}, "k": "all", "v": {2: 1}, "post_block": [1]}
    asks = [
        Ask(prompt_of(41, 110), {**STEERED, **capture("all", HEAD_POINTS)}),
        Ask(prompt_of(5, 111), {"capture": {"inline": {"hooks": hooks, "positions": "all"}}}),
        Ask(prompt_of(5, 112), capture("predicting", ("z",), [models.LAYERS - 1])),
        Ask(prompt_of(5, 113)),
    ]
    outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    keys = outputs[1].capture_results["inline"].payload["k", 1]
    assert keys.heads == (0, 1)
    assert not torch.equal(keys.values[:, 0], keys.values[:, 1])


def test_ends_and_branches_of_all_workers(pair: tuple[LLM, Judge]) -> None:
    """embed is of the first stage, final of the last; a stage may have none of what is asked."""
    llm, judge = pair
    last = models.LAYERS - 1

    def hooked(hooks: Any) -> dict[str, Any]:
        return inline({"hooks": hooks, "positions": "all"})

    ends, branches = {"embed": "all", "final": "all"}, {"attn_out": "all", "mlp_out": "all"}
    asks = [
        Ask(prompt_of(41, 118), {**STEERED, **hooked({**ends, **branches, "pre_attn": [0]})}),
        Ask(prompt_of(17, 119), hooked({"embed": 0})),
        Ask(prompt_of(5, 120), hooked({"final": last})),
        Ask(prompt_of(5, 121), hooked({"mlp_out": last, "post_block": [0]})),
        Ask(prompt_of(5, 122), {**STEERED, **hooked({"attn_out": [0, 1], "final": last})}),
        Ask(prompt_of(5, 123)),
    ]
    outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    payload = outputs[0].capture_results["inline"].payload
    assert len(payload) == 2 * models.LAYERS + 3
    assert relative(payload["final", last].values, payload["embed", 0].values) > check.LEAST_MOVE
    project = matrix(2)
    scored = [{"hooks": hooks, "positions": "all"} for hooks in (ends, branches)]
    scored += [{**one, "project": project} for one in scored]
    [output] = serve(llm, [Ask(prompt_of(17, 124), {"capture": {"inline": scored}})])
    for i in range(2):
        rows, scores_of = (output.capture_results[f"inline[{j}]"].payload for j in (i, i + 2))
        for site, values in rows.items():
            want = values.values @ project.T
            assert relative(scores_of[site].values, want) <= check.READ_TOLERANCE


def test_heads_are_steered_by_the_worker_that_has_them(pair: tuple[LLM, Judge]) -> None:
    """Rows are cut by columns: heads of both ranks, or layers of both stages."""
    llm, judge = pair
    every = {"point": "z", "heads": {0: [0, 3], 3: [1, 2]}}
    read = capture("all", ("z", "post_block"))
    asks = [
        Ask(prompt_of(41, 114), {"steering": [{"op": "scale", "factor": -1.0, **every}], **read}),
        Ask(
            prompt_of(5, 115),
            {"steering": [{"op": "add", "vector": vector(115, width=32), **every}], **read},
        ),
        Ask(prompt_of(17, 116), {"steering_vectors": {"z": {1: vector(116, width=128)}}, **read}),
        Ask(prompt_of(5, 117), read),
    ]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        judge.check(ask, output)


def test_attention_of_all_workers(pair: tuple[LLM, Judge]) -> None:
    """Each stage reads the pages of its layers, each rank those of its heads."""
    llm, judge = pair
    asked = {"heads": "all", "queries": "all", "give": ["weights"]}
    several = [{"attention": asked}, {"attention": {**asked, "sum": "all"}}]
    ask = Ask(prompt_of(17, 76), {"capture": {"inline": several}})
    [output] = serve(llm, [ask])
    assert judge.check_weights(ask, output.outputs[0], "inline[0]") > 0.05
    each, total = (output.capture_results[f"inline[{i}]"].payload for i in range(2))
    for t, weights in enumerate(total["attn", None].weights):
        parts = [rows.weights[t].sum(0) for rows in each.values()]
        assert torch.allclose(weights, torch.stack(parts).sum(0), atol=1e-6)


def test_attention_of_some_heads(pair: tuple[LLM, Judge]) -> None:
    """A worker may have one of two heads that are asked for, both or none."""
    llm, judge = pair
    asked = {"heads": {0: [0, 3], 1: [0, 1], 2: [2, 3], 3: [1, 2]}, "top": 3, "queries": "all"}
    given = {"give": ["mass", "peak", "top", "weights"], "keys": {"a": [0, 1], "b": [3]}}
    plain = Ask(prompt_of(9, 78), capture("all"))
    ask = Ask(prompt_of(17, 77), {"capture": {"inline": {"attention": asked | given}}})
    output, _ = serve(llm, [ask, plain])
    assert judge.check_weights(ask, output.outputs[0]) > 0.05
    for rows in output.capture_results["inline"].payload.values():
        for i, weights in enumerate(rows.weights):
            full = torch.nn.functional.pad(weights, (0, 4))
            ranges = full[:, :2], full[:, 3:4]
            assert torch.allclose(rows.mass[i], torch.stack([r.sum(1) for r in ranges], 1))
            assert torch.equal(rows.peak[i], torch.stack([r.amax(1) for r in ranges], 1))
            best = weights.topk(min(3, weights.shape[1]))
            assert torch.equal(rows.top_weights[i, :, : best.values.shape[1]], best.values)
            assert torch.equal(rows.top_positions[i, :, : best.values.shape[1]], best.indices.int())
            assert bool((rows.top_positions[i, :, best.values.shape[1] :] == -1).all())


def test_focus_of_some_heads(pair: tuple[LLM, Judge]) -> None:
    """A worker may have the heads that are focused, half of them or none; a share is of one head,
    whoever has it. In chunks; the twin has the other rank's heads."""
    llm, judge = pair
    chosen = {0: [0, 3], 1: [0, 1], 2: [2, 3], 3: [1, 2]}
    span, last = range(3, 12), range(30, 1 << 20)

    def of(first: int, *others: int) -> list[Focusing]:
        cut = Focusing({1: [first]}, span, factor=0.0)
        return [cut, Focusing({2: others, 3: others}, [2, 20], factor=300.0)]

    asked = [
        [Focusing(chosen, span, factor=50.0)],
        of(3, 0, 1),
        [Focusing(chosen, span, share=0.9)],
        [Focusing(EVERY, span, last, share=0.6, ratio=True)],
    ]
    read = capture("all", ("z", "post_block"))
    asks = [
        Ask(prompt_of(41, 180 + i), {"steering": [e.request(45) for e in each], **read})
        for i, each in enumerate(asked)
    ]
    *outputs, plain = serve(llm, [*asks, Ask(prompt_of(5, 185), read)])
    for ask, each, output in zip(asks, asked, outputs, strict=True):
        check_focused(judge, ask, each, output)
    judge.check(Ask(prompt_of(5, 185), read), plain)
    with pytest.raises(AssertionError, match="rows off by"):
        check_focused(judge, asks[1], of(1, 2, 3), outputs[1])


def test_weights_of_focused_heads(pair: tuple[LLM, Judge]) -> None:
    """Captured weights of heads of both ranks are those that were used."""
    llm, _ = pair
    asked = {"heads": "all", "queries": "all", "give": ["mass"], "keys": {"span": [3, 4]}}
    each = Focusing({0: [0, 3], 1: [2]}, [3, 4], share=0.7)
    capture = {"inline": {"attention": asked}}
    ask = Ask(prompt_of(17, 186), {"steering": [each.request(21)], "capture": capture})
    [output] = serve(llm, [ask])
    payload = output.capture_results["inline"].payload
    for layer in range(models.LAYERS):
        mass = payload["attn", layer].mass[5:, :, 0]
        focused = list(each.heads.get(layer, ()))
        others = [h for h in range(4) if h not in focused]
        assert (mass[:, focused] > 0.7 - 1e-4).all()
        assert mass[:, others].mean() < 0.5


def test_lenses_of_all_workers(pair: tuple[LLM, Judge], runner: Runner) -> None:
    """Each rank has a part of the head. As with one: what transformers say, in chunks, beside
    requests that read rows or nothing."""
    llm, judge = pair
    if runner == "v2":
        pytest.skip("two stages: refused, see tests/config")
    captures = [
        under("all"),
        under("predicting", {**FULL, "name": "moved"}, {"post_block": [0, 3]}),
        {"hooks": {"pre_attn": [1]}, "positions": "all"},
    ]
    asks = [
        Ask(prompt_of(41, 130), inline(*captures)),
        Ask(prompt_of(41, 130), {**STEERED, **inline(*captures)}),
        Ask(prompt_of(5, 131), capture("all", ("post_block",), [0])),
        Ask(prompt_of(5, 132), inline(under([2, -1], hooks={"pre_attn": [2]}))),
        Ask(prompt_of(9, 133)),
    ]
    outputs = serve(llm, asks)
    entropies = []
    for ask, output in zip(asks, outputs, strict=True):
        completion = output.outputs[0]
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        streams = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
        payloads = [r.payload for r in (completion.capture_results or {}).values()]
        for site, rows in (entry for payload in payloads for entry in payload.items()):
            if not isinstance(rows, LensRows):
                assert serving.relative(rows.values, streams[site][rows.positions]) <= 1e-4
                continue
            moved = JACOBIAN[f"{site[1]}.weight"].T if rows.lens == "moved" else torch.eye(HIDDEN)
            want = read(judge, sequence, streams[site] @ moved)[rows.positions]
            check_lens(rows, want, FULL["tokens"])
        if payloads and payloads[0].keys() > {("post_block", 2)}:
            entropies.append(payloads[0]["post_block", 2].entropy[:41])
    plain, steered = entropies
    assert (plain - steered).abs().max() > APART


def test_scores_of_all_workers(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    last = {"post_block": [models.LAYERS - 1]}
    asks = [
        Ask(prompt_of(41, 120), {**STEERED, **scores(matrix(3))}),
        Ask(prompt_of(5, 121), scores(matrix(1, seed=1), "predicting", {"post_block": [0]})),
        Ask(prompt_of(5, 122), scores(matrix(7, seed=2), "all", last)),
        Ask(prompt_of(30, 123), capture("all")),
        Ask(prompt_of(41, 124), {**STEERED, **mean("all_prompt")}),
        Ask(prompt_of(30, 125), mean([3, 4, 28], last)),
    ]
    outputs = serve(llm, asks)
    for ask, output in zip(asks[:3], outputs, strict=False):
        k = len(ask.fields["capture"]["inline"]["project"])
        check_scores(judge, ask, output, matrix(k, seed=9))
    for ask, output in zip(asks[3:], outputs[3:], strict=True):
        judge.check(ask, output)
