# SPDX-License-Identifier: Apache-2.0
"""`project` and `reduce`: scores, or means, in place of rows, from engines that chunk, preempt and
share steps. What they must be is computed here, from the rows of the final sequence as Hugging Face
has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import READ_TOLERANCE, Reference
from tests.serving.test_capture_consumers import Keep, KeepHere
from tests.support import serving
from tests.support.selected import expected_positions
from tests.support.serving import Ask, Judge, prompt_of, relative, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.v1.capture import stack

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

GENERATED = 45
"""With a prompt of 20: three blocks each at the end, one at the start."""

STEERED = {"steering_vectors": {"post_attn": {1: vector(70)}}}


def matrix(k: int, seed: int = 0) -> torch.Tensor:
    """float32 [k, HIDDEN]; bounded away from one that all rows are nearly orthogonal to."""
    return torch.randn(k, models.HIDDEN, generator=torch.Generator().manual_seed(seed))


def scores(project: Any, positions: Any = "all", hooks: Any = None) -> dict[str, Any]:
    """The `capture` field for inline scores."""
    hooks = hooks or dict.fromkeys(STREAM_POINTS, "all")
    return {"capture": {"inline": {"hooks": hooks, "positions": positions, "project": project}}}


def mean(positions: Any, hooks: Any = None) -> dict[str, Any]:
    """The `capture` field for an inline mean."""
    hooks = hooks or dict.fromkeys(STREAM_POINTS, "all")
    return {"capture": {"inline": {"hooks": hooks, "positions": positions, "reduce": "mean"}}}


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Chunks of 7, room for the rows of five positions, and seven usable blocks of 32."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=[
            "inline",
            {"consumer": Keep, "instance_name": "core"},
            {"consumer": KeepHere(), "instance_name": "here"},
        ],
        enable_prefix_caching=False,
        num_gpu_blocks_override=8,
        long_prefill_token_threshold=7,
        capture_buffer_bytes=5 * len(STREAM_POINTS) * models.LAYERS * models.HIDDEN * 4,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def check(judge: Judge, ask: Ask, output: Any, twin: torch.Tensor) -> None:
    """The scores are those of the final sequence's rows, and not those under `twin`."""
    completion = output.outputs[0]
    result = completion.capture_results["inline"]
    assert result.status == "ok", result.error
    spec = ask.fields["capture"]["inline"]
    positions = expected_positions(spec["positions"], len(ask.prompt), len(completion.token_ids))
    sequence = [*ask.prompt, *completion.token_ids][:-1]
    want = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
    for site, rows in result.payload.items():
        assert rows.positions.tolist() == positions
        assert rows.values.dtype == torch.float32
        # Relative to what the scores could be: a row may be nearly orthogonal to a vector.
        size = want[site][positions].norm(dim=-1).max() * twin.norm(dim=-1).max()
        error = (rows.values - want[site][positions] @ spec["project"].T).abs().max() / size
        assert error <= READ_TOLERANCE, f"{site}: off by {error}"
        other = (rows.values - want[site][positions] @ twin.T).abs().max() / size
        assert other >= 0.01, f"{site}: another matrix would give the same"


@pytest.mark.v2
def test_several_captures_of_a_request(pair: tuple[LLM, Judge]) -> None:
    """Rows of some positions, and scores of others with a matrix for each layer."""
    llm, judge = pair
    by_layer = {n: matrix(2, seed=n) for n in (0, 1)}
    asked = [
        {"hooks": {"pre_attn": [0, 2]}, "positions": "last_prompt"},
        {"hooks": {"post_block": [0, 1]}, "positions": "all", "project": {"post_block": by_layer}},
        {"hooks": {"pre_attn": [0]}, "positions": [0, 1]},
    ]
    capture = {"inline": asked, "core": asked[0]}
    ask = Ask(prompt_of(20, 80), {"max_tokens": 6, **STEERED, "capture": capture})
    [output] = serve(llm, [ask], log_probs=False)
    results = output.capture_results
    assert list(results) == ["inline[0]", "inline[1]", "inline[2]", "core"]
    assert {result.status for result in results.values()} == {"ok"}
    sequence = [*ask.prompt, *output.outputs[0].token_ids][:-1]
    want = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
    for name, positions in (("inline[0]", [19]), ("inline[2]", [0, 1])):
        for site, rows in results[name].payload.items():
            assert rows.positions.tolist() == positions
            assert relative(rows.values, want[site][positions]) <= READ_TOLERANCE
    assert list(results["inline[0]"].payload) == [("pre_attn", 0), ("pre_attn", 2)]
    for layer, project in by_layer.items():
        rows = results["inline[1]"].payload["post_block", layer]
        assert rows.positions.tolist() == list(range(25))
        exact = want["post_block", layer]
        size = exact.norm(dim=-1).max() * project.norm(dim=-1).max()
        assert (rows.values - exact @ project.T).abs().max() / size <= READ_TOLERANCE
        other = by_layer[1 - layer]
        assert (rows.values - exact @ other.T).abs().max() / size >= 0.01


def test_scores_of_any_width(pair: tuple[LLM, Judge]) -> None:
    """In one batch, alone and beside rows, with equal and different matrices, while requests are
    chunked, preempted and computed again."""
    llm, judge = pair
    limit = {"max_tokens": GENERATED}
    one = [models.LAYERS - 1]
    asks = [
        Ask(prompt_of(20, 70), {**limit, **scores(matrix(1))}),
        Ask(prompt_of(20, 71), {**limit, **STEERED, **scores(matrix(5, seed=1))}),
        Ask(prompt_of(20, 72), {**limit, **scores(matrix(5, seed=1), "predicting")}),
        Ask(prompt_of(20, 73), {**limit, **scores(matrix(models.HIDDEN), "all_generated")}),
        Ask(prompt_of(20, 74), {**limit, **STEERED, **serving.capture("all")}),
        Ask(prompt_of(41, 75), {**limit, **scores(matrix(2), [3, -1], {"post_block": one})}),
    ]
    with serving.watching(llm, most=2000) as steps:
        outputs = serve(llm, asks, log_probs=False)
    assert steps.preempted and steps.recomputed, "nothing was preempted"
    assert max(steps.chunks(5)) in (5, 7)
    for ask, output in zip(asks, outputs, strict=True):
        project = ask.fields["capture"]["inline"].get("project")
        if project is None:
            judge.check_rows(ask, output.outputs[0])
        else:
            check(judge, ask, output, matrix(len(project), seed=9))
    assert serving.scheduler_of(llm).interventions.tables.matrices.in_use == 0


@pytest.mark.v2
def test_norms(pair: tuple[LLM, Judge]) -> None:
    """The length of each row that a steered, chunked request computes beside
    one that asks for rows; those of no steering differ."""
    llm, judge = pair
    hooks = dict.fromkeys(STREAM_POINTS, "all")
    asked = [
        {"hooks": hooks, "positions": "all", "norms": True},
        {"hooks": {"post_block": [2]}, "positions": [0, 11], "norms": True},
    ]
    fields = {"max_tokens": 6, **STEERED}
    ask = Ask(prompt_of(20, 85), {**fields, "capture": {"inline": asked}})
    beside = Ask(prompt_of(20, 86), {**fields, **serving.capture("all")})
    with serving.watching(llm, most=2000) as steps:
        output, rows_alone = serve(llm, [ask, beside], log_probs=False)
    assert max(steps.chunks(0)) in (5, 7)
    judge.check_rows(beside, rows_alone.outputs[0])
    results = output.outputs[0].capture_results
    assert {result.status for result in results.values()} == {"ok"}
    sequence = [*ask.prompt, *output.outputs[0].token_ids][:-1]
    steered = judge.reference.run(sequence, judge.deltas(ask, sequence)).rows
    plain = judge.reference.run(sequence, {}).rows
    for site, rows in results["inline[0]"].payload.items():
        assert rows.positions.tolist() == list(range(len(sequence)))
        assert rows.values.dtype == torch.float32 and rows.values.shape == (len(sequence), 1)
        want = steered[site].norm(dim=-1, keepdim=True)
        assert relative(rows.values, want) <= READ_TOLERANCE, site
        moved = site[1] > 1 or (site[1] == 1 and site[0] != "pre_attn")
        other = plain[site].norm(dim=-1, keepdim=True)
        assert (relative(rows.values, other) >= 0.01) == moved, site
    [rows] = results["inline[1]"].payload.values()
    assert torch.equal(rows.values, results["inline[0]"].payload["post_block", 2].values[[0, 11]])


@pytest.mark.v2
def test_doses(pair: tuple[LLM, Judge]) -> None:
    """How long the vectors of a request and of all are beside the rows that they meet, at every
    position of a chunked request; twice the vector is another dose, and nothing is none."""
    llm, _ = pair
    own, late, ours = vector(70), vector(71, 3.0), vector(72, 2.0)
    at_some = {"vector": late, "positions": [3, 4, 22]}
    vectors = {"post_attn": {1: own}, "post_block": {2: at_some}}
    hooks = dict.fromkeys(STREAM_POINTS, "all")
    asked = {"hooks": hooks, "positions": "all", "dose": True}
    read = {"hooks": hooks, "positions": "all"}
    fields = {"max_tokens": 6, "capture": {"inline": [asked, read]}}
    twice = {"post_attn": {1: 2 * own}}
    llm.steering.set({"post_attn": {1: ours}}, tier="decode")
    try:
        steered, doubled, alone = serve(
            llm,
            [
                Ask(prompt_of(20, 85), {**fields, "steering_vectors": vectors}),
                Ask(prompt_of(20, 86), {**fields, "steering_vectors": twice}),
                Ask(prompt_of(20, 87), {**fields, "steering_inherit_global": False}),
            ],
            log_probs=False,
        )
    finally:
        llm.steering.clear()
    for output, added in ((steered, own), (doubled, 2 * own), (alone, 0 * own)):
        results = output.outputs[0].capture_results
        assert {result.status for result in results.values()} == {"ok"}
        for site, doses in results["inline[0]"].payload.items():
            rows = results["inline[1]"].payload[site].values
            total = torch.zeros_like(rows)
            if site == ("post_attn", 1):
                total += added
                total[20:] += ours * bool(added.any())
            elif site == ("post_block", 2) and output is steered:
                total[[3, 4, 22]] = late
            want = total.norm(dim=1, keepdim=True) / (rows - total).norm(dim=1, keepdim=True)
            assert doses.values.dtype == torch.float32 and doses.values.shape == (len(rows), 1)
            assert torch.equal(doses.values == 0, want == 0), site
            assert relative(doses.values[want > 0], want[want > 0]) <= 1e-5 or not want.any()
    first, other = (
        output.outputs[0].capture_results["inline[0]"].payload["post_attn", 1].values[:20].mean()
        for output in (steered, doubled)
    )
    assert other > 1.5 * first > 0, "twice the vector is about twice the dose"


def test_means(pair: tuple[LLM, Judge]) -> None:
    """Of prompts that are chunked, and of requests that are preempted while and after their prompt
    is computed; beside rows and means of other positions, for all kinds of consumers."""
    llm, judge = pair
    limit = {"max_tokens": GENERATED}
    strided = {"start": 2, "stop": 30, "step": 3}
    hooks = {"post_block": "all", "pre_attn": [0]}
    fields = [mean("all_prompt"), {**STEERED, **mean(strided)}, {**STEERED, **mean([0, 1, -1])}]
    asks = [Ask(prompt_of(40, 90 + i), {**limit, **field}) for i, field in enumerate(fields)]
    several = {
        "inline": [
            {"hooks": hooks, "positions": "all_prompt", "reduce": "mean"},
            {"hooks": hooks, "positions": "all"},
            {"hooks": {"post_block": [1]}, "positions": [5, 6], "reduce": "mean"},
        ],
        "core": {"hooks": hooks, "positions": "all_prompt", "reduce": "mean"},
        "here": {"hooks": hooks, "positions": [5, 6, 9], "reduce": "mean"},
    }
    last = Ask(prompt_of(40, 99), {**limit, **STEERED, "capture": several})
    with serving.watching(llm, most=2000) as steps:
        *outputs, output = serve(llm, [*asks, last], log_probs=False)
    assert steps.preempted and steps.recomputed, "nothing was preempted"
    for ask, of_ask in zip(asks, outputs, strict=True):
        judge.check_rows(ask, of_ask.outputs[0])
    results = output.outputs[0].capture_results
    assert {result.status for result in results.values()} == {"ok"}
    rows = {site: site_rows.values for site, site_rows in results["inline[1]"].payload.items()}
    assert all(len(values) > 40 for values in rows.values())

    def close(got: torch.Tensor, site: Any, positions: Any) -> None:
        want = rows[site][positions].mean(0, keepdim=True)
        assert relative(got, want) <= 1e-6 and relative(got, rows[site][:39].mean(0)[None]) > 1e-3

    for site in rows:
        close(results["inline[0]"].payload[site].values, site, slice(40))
    close(results["inline[2]"].payload["post_block", 1].values, ("post_block", 1), [5, 6])
    for name, positions in (("core", list(range(40))), ("here", [5, 6, 9])):
        payload = results[name].payload
        assert payload["positions"] == positions[-1:]
        for site, values in zip(payload["sites"], payload["values"], strict=True):
            close(torch.tensor(values), tuple(site), positions)


def test_rows_and_scores_agree(pair: tuple[LLM, Judge]) -> None:
    """The same request twice: its rows, and what the device made of them."""
    llm, _ = pair
    ask = prompt_of(20, 80)
    project = matrix(4, seed=3)
    rows, made = serve(llm, [Ask(ask, serving.capture("all")), Ask(ask, scores(project))])
    for site, values in serving.row_tensors(rows.outputs[0]).items():
        torch.testing.assert_close(
            serving.row_tensors(made.outputs[0])[site], values @ project.T, atol=1e-4, rtol=1e-4
        )
    stacked = stack([made], "post_block", [0, 2], position=-1)
    assert stacked.shape == (1, 2, 4)
    last = serving.row_tensors(made.outputs[0])["post_block", 2][-1]
    assert torch.equal(stacked[0, 1], last)


def test_each_consumer_has_its_own_matrix(pair: tuple[LLM, Judge]) -> None:
    """In the engine core and in the frontend, beside one that takes the rows."""
    llm, judge = pair
    everywhere = {"hooks": {"post_block": "all"}, "positions": "all"}
    asked = {
        "inline": {"hooks": dict.fromkeys(STREAM_POINTS, "all"), "positions": "all"},
        "core": {**everywhere, "project": matrix(2, seed=5)},
        "here": {**everywhere, "project": matrix(3, seed=6), "positions": "predicting"},
    }
    swapped = {
        **asked,
        "inline": {**asked["inline"], "project": matrix(1, seed=7)},
        "core": {**everywhere, "project": matrix(3, seed=6)},
        "here": {**everywhere, "hooks": {"pre_attn": [1]}},
    }
    asks = [Ask(prompt_of(20, 83), {**STEERED, "capture": c}) for c in (asked, swapped)]
    one, two = serve(llm, asks)
    judge.check_rows(asks[0], one.outputs[0])
    rows = serving.row_tensors(one.outputs[0])
    layers = range(models.LAYERS)
    wanted = [
        (one, "core", [("post_block", n) for n in layers], matrix(2, seed=5), 0),
        (one, "here", [("post_block", n) for n in layers], matrix(3, seed=6), 19),
        (two, "core", [("post_block", n) for n in layers], matrix(3, seed=6), 0),
        (two, "here", [("pre_attn", 1)], torch.eye(models.HIDDEN), 0),
    ]
    for output, name, sites, project, first in wanted:
        result = output.capture_results[name]
        assert result.status == "ok", result.error
        assert [tuple(site) for site in result.payload["sites"]] == sites
        got = torch.tensor(result.payload["values"])
        want = torch.stack([rows[site][first:] @ project.T for site in sites])
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
    for site, values in serving.row_tensors(two.outputs[0]).items():
        want = rows[site] @ matrix(1, seed=7).T
        torch.testing.assert_close(values, want, atol=1e-3, rtol=1e-4)


def test_scores_stream(pair: tuple[LLM, Judge]) -> None:
    """Deltas, put together, are what comes at the end."""
    llm, _ = pair
    ask = Ask(prompt_of(20, 81), scores(matrix(3, seed=4), "predicting"))
    (whole,) = serve(llm, [ask])
    for site, rows in serving.streamed(llm, ask).items():
        assert torch.equal(rows.values, serving.row_tensors(whole.outputs[0])[site])


def test_limits_count_scores(tiny_models: TinyModels) -> None:
    """What is returned inline counts, not what it is made of; what is made counts on the device."""
    row_bytes = models.HIDDEN * 4
    llm = make_llm(
        tiny_models.path("llama"),
        capture_consumers=["inline"],
        capture_inline_max_bytes=2 * row_bytes,
        capture_buffer_bytes=2 * row_bytes,
    )
    hooks = {"post_block": [0, 1]}
    try:
        asks = [Ask(prompt_of(5, 82), scores(matrix(8), "all_prompt", hooks))]
        (output,) = serve(llm, asks, log_probs=False)
        assert len(output.outputs[0].capture_results["inline"].payload["post_block", 1]) == 5
        with pytest.raises(ValueError, match=rf"10 rows are {10 * row_bytes} bytes"):
            serve(
                llm, [Ask(prompt_of(5, 82), serving.capture("all_prompt", ("post_block",), [0, 1]))]
            )
        with pytest.raises(ValueError, match=rf"10 rows are {10 * 4 * 52} bytes"):
            serve(llm, [Ask(prompt_of(5, 82), scores(matrix(52), "all_prompt", hooks))])
        with pytest.raises(ValueError, match=rf"need {3 * row_bytes} bytes"):
            serve(llm, [Ask(prompt_of(5, 82), scores(matrix(1), [-1], {"post_block": [0, 1, 2]}))])
    finally:
        shut_down(llm)
