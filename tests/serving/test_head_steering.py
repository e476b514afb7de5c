# SPDX-License-Identifier: Apache-2.0
"""Vectors and factors at z, head by head, behind an engine: beside other requests and plain ones,
in chunks, with cached prefixes, preempted, in modules and in global tiers.

The reference is Hugging Face's own attention with what it returns changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, same_completion, serve, vector
from vllm import LLM
from vllm.config.points import CAPTURE_POINTS, STEERING_POINTS
from vllm.v1.steering.files import save

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

COUNT, WIDTH = 4, 32
MIDDLE = models.LAYERS // 2
READ = capture("all", ("z", "post_block"))


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        steering_points=list(STEERING_POINTS),
        steering_families=["add", "scale", "ablate"],
        capture_consumers=["inline"],
        capture_points=list(CAPTURE_POINTS),
        max_num_batched_tokens=24,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def row(seed: int, heads: int = COUNT, norm: float = 24.0) -> torch.Tensor:
    """float32 [heads * width]; the rows of the tiny model have norms near 3."""
    values = torch.randn(heads * WIDTH, generator=torch.Generator().manual_seed(seed))
    return norm * values / values.norm()


def scale(factor: float, heads: dict[int, list[int]], **more: Any) -> dict[str, Any]:
    return {"op": "scale", "point": "z", "heads": heads, "factor": factor, **more}


def add(seed: int, heads: dict[int, list[int]], **more: Any) -> dict[str, Any]:
    return {"op": "add", "point": "z", "heads": heads, "vector": row(seed, 1), **more}


VECTORS = {"steering_vectors": {"z": {0: row(1), MIDDLE: {"vector": row(2), "scale": 0.7}}}}
ABLATED = {"steering": [scale(0.0, {1: [0, 1, 2, 3], 2: [1, 3]})]}
ASKS = [
    Ask(prompt_of(41, 160), {**VECTORS, **READ}),
    Ask(prompt_of(17, 161), {**ABLATED, **capture("all", ("post_block",))}),
    Ask(prompt_of(17, 162), {"prefill_steering_vectors": {"z": {1: row(3)}}, **READ}),
    Ask(
        prompt_of(5, 163), {"decode_steering_vectors": {"z": {-1 % models.LAYERS: row(4)}}, **READ}
    ),
    # In their order, beside vectors, and operations and vectors of the stream.
    Ask(
        prompt_of(30, 164),
        {
            "steering_vectors": {"z": {MIDDLE: row(5)}, "pre_attn": {0: vector(5)}},
            "steering": [
                add(6, {MIDDLE: [2]}, positions={"start": 3}),
                scale(-1.5, {MIDDLE: [2, 0], 1: [1]}),
                add(7, {MIDDLE: [0, 1]}, scale=2.0),
                scale(0.5, {MIDDLE: [1]}, positions="all_prompt"),
                {"op": "ablate", "point": "post_attn", "layers": MIDDLE, "direction": vector(8)},
            ],
            **READ,
        },
    ),
    # One row for each position, and whole rows.
    Ask(
        prompt_of(9, 165),
        {
            "steering": [
                {"op": "scale", "point": "z", "layers": [2], "factor": 0.0, "positions": [8, 2]},
                {
                    "op": "add",
                    "point": "z",
                    "layers": [2],
                    "values": torch.stack([row(9), row(10)]),
                    "positions": [8, 2],
                },
            ],
            **READ,
        },
    ),
    Ask(prompt_of(41, 166), READ),
    Ask(prompt_of(9, 167)),
]


def test_each_way(pair: tuple[LLM, Judge]) -> None:
    """In one batch, in chunks: rows and log-probabilities; plain neighbours keep their bits."""
    llm, judge = pair
    outputs = serve(llm, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        judge.check(ask, output)
    llm.reset_prefix_cache()
    plain = serve(llm, ASKS[-2:])
    for alone, output in zip(plain, outputs[-2:], strict=True):
        assert same_completion(alone.outputs[0], output.outputs[0])


def test_a_layer_without_heads_adds_nothing(pair: tuple[LLM, Judge]) -> None:
    """All factors 0: the branch is its bias. The twin keeps one head."""
    llm, judge = pair
    read = capture("all", ("pre_attn", "z", "post_attn"), [1])
    ops = [scale(0.0, {1: [0, 1, 2, 3]})], [scale(0.0, {1: [0, 1, 3]})]
    outputs = serve(llm, [Ask(prompt_of(17, 168), {"steering": op, **read}) for op in ops])
    gone, kept = (serving.row_tensors(output.outputs[0]) for output in outputs)
    model: Any = judge.reference.model
    bias = model.model.layers[1].self_attn.o_proj.bias
    assert not gone["z", 1].any()
    assert torch.equal(gone["post_attn", 1], gone["pre_attn", 1] + bias)
    assert not kept["z", 1][:, [0, 1, 3]].any() and kept["z", 1][:, 2].any()
    assert serving.worst_row(kept["post_attn", 1], kept["pre_attn", 1] + bias) > LEAST_MOVE


def test_factor_of_one_and_a_vector_taken_back(pair: tuple[LLM, Judge]) -> None:
    """They change no bit; a factor a little off does."""
    llm, _ = pair
    taken_back = [add(11, {1: [2]}), add(11, {1: [2]}, scale=-1.0)]
    ops: list[Any] = [[scale(1.0, {1: [2]})], taken_back, [scale(0.9, {1: [2]})]]
    asks = [Ask(prompt_of(17, 169), READ)]
    asks += [Ask(prompt_of(17, 169), {"steering": op, **READ}) for op in ops]
    plain, one, back, off = (output.outputs[0] for output in serve(llm, asks))
    assert same_completion(plain, one) and same_completion(plain, back)
    assert not same_completion(plain, off)


def test_cached_prefixes(pair: tuple[LLM, Judge]) -> None:
    """Blocks are shared by requests that scale the same, and by no others, both ways."""
    llm, judge = pair
    prompt = prompt_of(70, 170)
    of_answer = {"decode_steering_vectors": {"z": {1: row(12)}}}
    late = {"steering": [scale(0.0, {0: [0, 1, 2, 3]}, positions={"start": 40})]}
    other = {"steering": [scale(0.25, {1: [0, 1, 2, 3], 2: [1, 3]})]}
    fields: list[dict[str, Any]] = [
        ABLATED,
        {},
        ABLATED,
        VECTORS,
        {},
        VECTORS,
        of_answer,
        late,
        other,
    ]
    hits = []
    for changed in fields:
        ask = Ask(prompt, changed)
        [output] = serve(llm, [ask])
        judge.check(ask, output)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 64, 0, 64, 64, 64, 32, 0]


def test_recomputed_after_preemption(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    ask = Ask(prompt_of(30, 171), {**ASKS[4].fields, "max_tokens": 12})
    engine, scheduler = llm.llm_engine, serving.scheduler_of(llm)
    with serving.watching(llm) as steps:
        engine.add_request("171", {"prompt_token_ids": ask.prompt}, ask.params())
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += [o for o in engine.step() if o.finished]
            if len(steps.outputs) == 5:
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert steps.recomputed == [0]
    judge.check(ask, outputs[0])


def test_modules_and_global_tiers(pair: tuple[LLM, Judge], tmp_path: Path) -> None:
    """What a request scales is all that stands at the head: of modules and global tiers as well."""
    llm, judge = pair
    module = {"vectors": {"z": {1: row(13), MIDDLE: row(14)}}, "ops": [add(15, {1: [3]})]}
    llm.steering.register_module("m", module)
    save(tmp_path / "m.safetensors", llm.steering.module("m"))
    llm.steering.register_module("again", str(tmp_path / "m.safetensors"))
    assert llm.steering.modules()["again"] == llm.steering.modules()["m"]
    assert set(llm.steering.layers()[1]) == set(STEERING_POINTS)
    shape = llm.llm_engine.vllm_config.tap_shape
    counts = llm.steering.heads()
    assert counts == {n: layer.heads for n, layer in shape.layers.items() if layer.heads}
    assert counts[1]["z"] == judge.reference.run(prompt_of(3, 1)).heads["z", 1].shape[1:]
    ops = [scale(-0.5, {1: [3, 0]}), scale(0.3, {MIDDLE: [1]})]
    prompt = prompt_of(17, 172)
    base: dict[str, Any] = {"steering_vectors": {"z": {1: row(13) + row(16), MIDDLE: row(14)}}}
    alike = Ask(prompt, {**base, "steering": [add(15, {1: [3]}), *ops], **READ})
    llm.steering.set({"z": {1: row(16)}})
    try:
        named = {"steering_modules": ["again"], "steering": ops, **READ}
        answers = serve(llm, [Ask(prompt, named), Ask(prompt, {**named, "steering": None})])
    finally:
        llm.steering.clear()
        for name in ("m", "again"):
            llm.steering.unregister_module(name)
    judge.check(alike, answers[0])
    judge.check(Ask(prompt, {**base, "steering": [add(15, {1: [3]})], **READ}), answers[1])
