# SPDX-License-Identifier: Apache-2.0
"""The taps inside torch.compile: steering traced by Dynamo, capture as an opaque op, Inductor's
code. V1 only: the interpreter that stands in for Triton under V2 has nothing to compile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference, unread, with_heads
from tests.support import serving
from tests.support.focus import Focusing, focused
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import (
    CAPTURE_POINTS,
    HEAD_POINTS,
    NEURONS,
    STEERING_POINTS,
    STREAM_POINTS,
)

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

PROMPT, SHORT = prompt_of(41, 130), prompt_of(5, 131)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, caches: Path) -> Iterator[tuple[LLM, Judge]]:
    """Compiled from nothing: an artifact of an earlier run could hide what is traced today."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(caches))
        llm = make_llm(
            path,
            enforce_eager=False,
            enable_steering=True,
            steering_points=list(STEERING_POINTS),
            steering_families=["add", "scale", "focus"],
            capture_consumers=["inline"],
            capture_points=list(CAPTURE_POINTS),
            max_num_batched_tokens=24,
        )
        yield llm, Judge(Reference(row, models.load(row, path)))
        shut_down(llm)


def test_taps_are_in_the_code_of_one_form(pair: tuple[LLM, Judge], caches: Path) -> None:
    """The artifacts of the form with taps and of the plain one lie in folders of their own."""
    folders = list((caches / "torch_compile_cache" / "torch_aot_compile").iterdir())
    code = ["".join(path.read_text() for path in f.rglob("*.py")) for f in folders]
    assert all(code), "nothing was compiled"
    assert sorted("vllm.capture_rows" in text for text in code) == [False, True]


@pytest.mark.parametrize("point", STREAM_POINTS)
def test_read_and_write(pair: tuple[LLM, Judge], point: str) -> None:
    """Each point at the first, a middle and the last layer, chunked, beside plain neighbours."""
    llm, judge = pair
    fields: list[dict[str, Any]] = [
        {"steering_vectors": {point: {0: vector(130)}}},
        {"prefill_steering_vectors": {point: {2: vector(131)}}},
        {"decode_steering_vectors": {point: {3: vector(132)}}},
        {},
    ]
    asks = [Ask(p, {**f, **capture("all")}) for f in fields for p in (PROMPT, SHORT)]
    asks += [Ask(PROMPT), Ask(SHORT, fields[0])]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        judge.check(ask, output)


def test_heads_ends_and_branches(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    steered = {"steering_vectors": {"pre_attn": {1: vector(134)}}}
    asks = [
        Ask(p, {**f, **capture("all", HEAD_POINTS)}) for f in (steered, {}) for p in (PROMPT, SHORT)
    ]
    asks.append(Ask(PROMPT))
    ends = ("embed", "attn_out", "mlp_out", "final", NEURONS)
    asks += [Ask(p, {**steered, **capture("all", ends)}) for p in (PROMPT, SHORT)]
    z = {"point": "z", "heads": {0: [1, 2], 3: [0]}}
    asks += [
        Ask(PROMPT, {"steering_vectors": {"z": {1: vector(135, width=128)}}, **capture("all")}),
        Ask(SHORT, {"steering": [{"op": "scale", "factor": -1.0, **z}], **capture("all", ["z"])}),
        Ask(PROMPT, {"steering": [{"op": "add", "vector": vector(136, width=32), **z}]}),
    ]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        judge.check(ask, output)


def test_attention_weights(pair: tuple[LLM, Judge]) -> None:
    """Their start-up proof ran in compiled code."""
    llm, judge = pair
    shape = llm.llm_engine.vllm_config.tap_shape
    assert shape is not None and with_heads(shape) and not unread(shape)
    asked = {"attention": {"heads": "all", "queries": "all", "give": ["weights"]}}
    asks = [Ask(p, {"capture": {"inline": asked}}) for p in (PROMPT, SHORT)]
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        assert judge.check_weights(ask, output.outputs[0]) > 0.05


def test_focus(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    every = {layer: range(4) for layer in range(models.LAYERS)}
    each = Focusing(every, range(2, 4), factor=8.0)
    model, adapter = judge.reference.model, judge.reference.row.adapter
    blocks = list(model.get_submodule(adapter.blocks).children())
    asks = [
        Ask(p, {"steering": [each.request(len(p))], **capture("all", ("z", "post_block"))})
        for p in (PROMPT, SHORT)
    ]
    for ask, output in zip(asks, serve(llm, [*asks, Ask(PROMPT)]), strict=False):
        ids = [*ask.prompt, *output.outputs[0].token_ids][:-1]
        with focused(model, blocks, [each]):
            want = judge.reference.run(ids)
        plain = judge.reference.run(ids)
        for layer in range(models.LAYERS):
            rows = serving.row_tensors(output.outputs[0])["post_block", layer]
            assert serving.worst_row(rows, want.rows["post_block", layer]) < 1e-3
            assert serving.worst_row(rows, plain.rows["post_block", layer]) > 1e-2


def test_neighbours_leave_plain_requests_bit_identical(pair: tuple[LLM, Judge]) -> None:
    llm, _ = pair
    steered = {"steering_vectors": {"post_block": {1: vector(133)}}}
    plain = Ask(SHORT, capture("all"))
    alone = serve(llm, [plain, Ask(SHORT)])
    among = serve(llm, [plain, Ask(SHORT, steered)])
    assert serving.same_completion(alone[0].outputs[0], among[0].outputs[0])
    assert not serving.same_completion(alone[1].outputs[0], among[1].outputs[0])
