# SPDX-License-Identifier: Apache-2.0
"""What tests/real checks of any model: rows and log-probabilities are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.conformance.engine import make_llm
from tests.conformance.reference import Adapter, Site
from tests.conformance.tiny import LLAMA_LIKE
from tests.support.real import (
    LEAST,
    NOISES,
    TOP,
    Answer,
    Errors,
    Real,
    errors,
    log_prob_error,
    rows_of,
    worst,
)
from vllm.config.points import CAPTURE_POINTS, STEERING_POINTS, STREAM_POINTS

CHUNK = 48
ENDS = ("embed", "final")
BRANCHES = ("attn_out", "mlp_out")
APART = 1.5
"""Multiple of what an error may be that rows of another layer or token are away, at least."""
LEAST_APART = 1e-3
"""Relative distance of a mean from that of one row fewer."""
EVERYTHING: dict[str, Any] = {
    "capture_points": list(CAPTURE_POINTS),
    "steering_points": list(STEERING_POINTS),
    "steering_families": ["add", "scale", "focus"],
    "capture_lens": ["logit"],
}


def start(dtype: str, folder: Path, adapter: Adapter = LLAMA_LIKE, **options: Any) -> Real:
    """An engine that cuts prompts into chunks and reads the prefix cache."""
    settings: dict[str, Any] = {
        "enable_steering": True,
        "capture_consumers": ["inline"],
        "capture_inline_max_bytes": 1 << 30,
        "max_model_len": 160,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "skip_tokenizer_init": False,
    }
    return Real(make_llm(folder, dtype=dtype, **{**settings, **options}), folder, adapter)


def hooks(*points: str) -> dict[str, Any]:
    return {"hooks": dict.fromkeys(points, "all"), "positions": "all"}


def inline(*captures: dict[str, Any]) -> dict[str, Any]:
    return {"capture": {"inline": captures[0] if len(captures) == 1 else list(captures)}}


def neighbour(site: Site, layers: range) -> Site:
    point, layer = site
    return point, layer - 1 if layer == layers[-1] else layer + 1


def check_rows(
    real: Real, answers: list[Answer], deltas: list[dict[Site, torch.Tensor] | None]
) -> dict[str, Errors]:
    """All captured rows are those of transformers, and not those of the layer beside or, where a
    point has one layer, of the token before; returns the worst errors of each point."""
    found: dict[str, list[Errors]] = {}
    noise: dict[str, list[Errors]] = {}
    twins: dict[str, list[float]] = {}
    for answer, delta in zip(answers, deltas, strict=True):
        exact, same = (rows_of(forward) for forward in real.both(answer.ids, delta))
        for site, rows in answer.rows.items():
            want, (point, layer) = exact[site], site
            # Branches are differences of streams, and as exact as these.
            rest = exact["post_block", layer] - want if point in BRANCHES else torch.zeros(())
            found.setdefault(point, []).append(errors(rows + rest, want + rest))
            noise.setdefault(point, []).append(errors(same[site] + rest, want + rest))
            other = exact.get(neighbour(site, real.layers))
            twin = rows.roll(1, 0) if point in ENDS or other is None else other.to(rows.dtype)
            twins.setdefault(point, []).append(errors(twin + rest, want + rest)[1])
    made = {point: worst(each) for point, each in found.items()}
    for point, (whole, kept) in made.items():
        most = real.allowed(worst(noise[point]))
        said = " ".join(f"{number:.1e}" for number in (whole, kept, *most, min(twins[point])))
        print(f"{point}: {said}")
        assert whole <= most[0] and kept <= most[1], (point, whole, kept, most)
        assert min(twins[point]) >= APART * most[1], (point, min(twins[point]), most)
    return made


def check_writes(real: Real, prompt: list[int]) -> None:
    """Each site with a vector of its own, all at once: the rows behind each are captured, too.
    Without one of the vectors its site's rows would be others."""
    plain = real.run("exact", prompt)
    generator = torch.Generator().manual_seed(7)
    vectors: dict[Site, torch.Tensor] = {}
    for point in STREAM_POINTS:
        for layer in real.layers:
            rows = plain.rows[point, layer]
            vector = torch.randn(rows.shape[-1], generator=generator)
            # As long as the typical number of the stream makes it, whatever the massive ones are.
            vectors[point, layer] = vector * float(rows.abs().median())
    fields: dict[str, Any] = {}
    for (point, layer), vector in vectors.items():
        fields.setdefault(point, {})[layer] = vector
    [answer] = real.ask(
        [(prompt, {"steering_vectors": fields, **inline(hooks(*STREAM_POINTS))})], TOP
    )
    count = len(answer.ids)
    deltas = {site: vector.expand(count, -1) for site, vector in vectors.items()}
    check_rows(real, [answer], [deltas])
    exact, same = real.both(answer.ids, deltas)
    for site, vector in vectors.items():
        want = exact.rows[site]
        noise = errors(same.rows[site], want)
        assert errors(want - vector, want)[1] >= APART * real.allowed(noise)[1], site
    check_log_probs(answer, real, deltas)


def check_log_probs(answer: Answer, real: Real, deltas: dict[Site, torch.Tensor]) -> None:
    """The log-probabilities are those of transformers steered so, and not those of plain ones."""
    exact, same = real.both(answer.ids, deltas)
    most = real.allowed_nats(answer.top, same, exact)
    off, plain = (log_prob_error(answer.top, f) for f in (exact, real.run("exact", answer.ids)))
    print(f"log-probabilities: {off:.1e} of {most:.1e}; plain {plain:.1e}")
    assert off <= most
    assert plain >= 2 * most


def check_scores_means_and_prefix_cache(real: Real, prompt: list[int]) -> None:
    """Those of a prompt in chunks that was read before, plain and steered."""
    width = real.llm.llm_engine.model_config.get_hidden_size()
    matrix = torch.randn(3, width, generator=torch.Generator().manual_seed(4))
    steered = {"steering_vectors": {"post_block": {4: 2.0 * matrix[0]}}}
    # What the prefix cache keeps is of the plain model.
    real.ask([(prompt, {})])
    last = {"hooks": {"post_block": "all"}, "positions": "predicting"}
    [again] = real.ask([(prompt, inline(last))])
    assert again.output.num_cached_tokens > 0, "no prefix was cached"
    every = hooks("post_block")
    mean = {**every, "positions": "all_prompt", "reduce": "mean"}
    asked = inline(every, {**every, "project": matrix}, mean)
    for fields in ({}, steered):
        [answer] = real.ask([(prompt, {**fields, **asked})])
        count = len(answer.ids)
        deltas = {("post_block", 4): 2.0 * matrix[0].expand(count, -1)} if fields else None
        exact, same = real.both(answer.ids, deltas)
        at = slice(len(prompt) - 1, None)
        for layer in real.layers:
            site = "post_block", layer
            want, near = exact.rows[site].double(), same.rows[site].double()
            most = real.allowed(errors(near, want))
            if not fields:
                got = again.captured["inline"][site]
                assert got.positions.tolist() == list(range(len(prompt) - 1, count))
                assert errors(got.values, want[at])[1] <= most[1]
            rows, scores, means = (answer.captured[f"inline[{i}]"][site].values for i in range(3))
            assert errors(rows, want)[1] <= most[1]
            exactly, nearly = want @ matrix.double().T, near @ matrix.double().T
            size = want.norm(dim=-1, keepdim=True) * matrix.norm(dim=-1)
            off, noise, other = (
                float(((made - exactly).abs() / size).max())
                for made in (scores, nearly, exactly.roll(1, 1))
            )
            assert off <= max(LEAST, NOISES[real.dtype] * noise) <= other / 3
            prompt_rows = want[: len(prompt)]
            assert errors(means, prompt_rows.mean(0, keepdim=True))[1] <= most[1]
            fewer = errors(means, prompt_rows[:-1].mean(0, keepdim=True))
            assert fewer[1] > LEAST_APART if real.dtype == torch.float32 else fewer[1] > 0
