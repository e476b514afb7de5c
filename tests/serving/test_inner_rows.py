# SPDX-License-Identifier: Apache-2.0
"""Rows within a branch behind an engine: the logits of routers, and what the down projection of a
dense MLP reads; in chunks, beside plain requests, in files, compiled, and of two workers.

The reference is Hugging Face, by hooks on its routers and projections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, Reference
from tests.conformance.tiny import HIDDEN, INNER
from tests.support import serving
from tests.support.serving import Ask, Judge, prompt_of, serve, vector, worst_row
from vllm import LLM
from vllm.config.points import INNER_POINTS, NEURONS, ROUTER
from vllm.v1.capture.reader import open as open_captures

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

MODEL = "qwen2_moe"
"""Layer 1 has a dense MLP, all others experts, and one that every token takes beside. Its block
gives upstream's the logits; that of `WIDE` has upstream's make them."""
WIDE = "qwen3_moe"
"""Two workers can share its heads; otherwise alike."""
DENSE, SPARSE = [1], [0, 2, 3]
STEERED = {"steering_vectors": {"post_attn": {0: vector(190)}}}


@dataclass
class Running:
    """An engine with the points, its judge, and the folder of its files."""

    llm: LLM
    judge: Judge
    root: Path


@pytest.fixture(
    scope="module",
    params=["eager", pytest.param("compiled", marks=pytest.mark.long), "two workers"],
)
def running(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    runner: Runner,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """Two workers share the model by width (V1) or by depth (V2). In the tier full,
    tests/serving/test_compiled.py compiles the rows of a dense MLP."""
    options: dict[str, Any] = {"capture_lens": ["logit"]}
    if request.param == "compiled":
        if runner == "v2":
            pytest.skip("the interpreter that stands in for Triton has nothing to compile")
        options["enforce_eager"] = False
    elif request.param == "two workers":
        split = "tensor_parallel_size" if runner == "v1" else "pipeline_parallel_size"
        options = {split: 2}
    root = tmp_path_factory.mktemp("inner")
    name = WIDE if request.param == "two workers" else MODEL
    path, row = tiny_models.path(name), tiny_models.row(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("VLLM_CACHE_ROOT", str(root / "compiled"))
        llm = make_llm(
            path,
            enable_steering=True,
            capture_consumers=["inline", f"filesystem:root={root / 'rows'}"],
            capture_points=["post_block", *INNER_POINTS],
            max_num_batched_tokens=24,
            **options,
        )
        yield Running(llm, Judge(Reference(row, models.load(row, path))), root / "rows")
        shut_down(llm)


def reading(positions: Any = "all", **layers: Any) -> dict[str, Any]:
    hooks = layers or dict.fromkeys(INNER_POINTS, "all")
    return {"capture": {"inline": {"hooks": hooks, "positions": positions}}}


def rows_of(output: Any, name: str = "inline") -> dict[tuple[str, int], Any]:
    assert output.capture_results[name].status == "ok"
    return dict(output.capture_results[name].payload.items())


def test_beside_others(running: Running) -> None:
    """Rows of both kinds and of the stream, which have three widths."""
    asks = [
        Ask(prompt_of(41, 190), reading()),
        Ask(prompt_of(17, 191), STEERED | reading()),
        Ask(prompt_of(5, 192), reading("predicting", router_logits=[2], post_block=[1, 3])),
        Ask(prompt_of(5, 193), STEERED | reading([0, 3], mlp_act=DENSE)),
        Ask(prompt_of(5, 194)),
    ]
    with serving.watching(running.llm) as steps:
        outputs = serve(running.llm, asks)
    assert len([n for n in steps.chunks(0) if n > 1]) > 1, "the prompt was computed at once"
    for ask, output in zip(asks, outputs, strict=True):
        running.judge.check(ask, output)
    rows = rows_of(outputs[0])
    assert set(rows) == {(ROUTER, n) for n in SPARSE} | {(NEURONS, n) for n in DENSE}
    config: Any = running.judge.reference.model.config
    assert INNER > HIDDEN > config.num_experts
    for (point, _), of_site in rows.items():
        width = config.num_experts if point == ROUTER else INNER
        assert of_site.values.shape == (len(of_site), width) and of_site.heads == ()
        assert worst_row(of_site.values.roll(1, 0), of_site.values) > LEAST_MOVE
        assert worst_row(of_site.values.roll(1, 1), of_site.values) > LEAST_MOVE


def test_they_are_logits_and_what_is_projected(running: Running) -> None:
    """What stands beside them in the block would not pass: shares, and one half of the gate."""
    [output] = serve(running.llm, [Ask(prompt_of(17, 195), reading("all_prompt"))])
    rows, reference = rows_of(output), running.judge.reference
    want = reference.run(prompt_of(17, 195)).others
    logits = want[ROUTER, SPARSE[0]]
    assert worst_row(logits.softmax(-1), logits) > LEAST_MOVE
    block = reference.model.get_submodule(f"{reference.row.adapter.blocks}.{DENSE[0]}")
    read, half = want["mlp_in", DENSE[0]], block.get_submodule("mlp.gate_proj")
    with torch.no_grad():
        assert worst_row(half(read), want[NEURONS, DENSE[0]]) > LEAST_MOVE
        down = block.get_submodule("mlp.down_proj")(rows[NEURONS, DENSE[0]].values)
    assert worst_row(down, want["mlp_out", DENSE[0]]) <= READ_TOLERANCE


def test_files_and_norms(running: Running) -> None:
    """Files give back what inline does, and norms are of whole rows."""
    for point, layers in ((ROUTER, SPARSE), (NEURONS, DENSE)):
        asked: dict[str, Any] = {"hooks": {point: layers}, "positions": "all_prompt"}
        inline = [asked, asked | {"norms": True}]
        files = asked | {"request_id": f"of-{point}"}
        fields = {"capture": {"inline": inline, "filesystem": files}}
        [output] = serve(running.llm, [Ask(prompt_of(9, 196), fields)])
        assert output.capture_results["filesystem"].status == "ok"
        rows, norms = rows_of(output, "inline[0]"), rows_of(output, "inline[1]")
        stored = open_captures(str(running.root)).find(f"of-{point}")
        for layer in layers:
            values = rows[point, layer].values
            read = stored.rows(point, layer)
            assert torch.equal(read.values, values) and read.heads == ()
            assert torch.allclose(norms[point, layer].values[:, 0], values.norm(dim=1))
    assert norms[NEURONS, 1].values.shape == (9, 1)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("'router_logits' can only be captured; here use", {"steering_vectors": {ROUTER: {0: [1.0]}}}),
    (
        "'mlp_act' can only be captured; here use",
        {"steering": [{"op": "add", "point": NEURONS, "layers": 1, "vector": [1.0]}]},
    ),
    ("layer 1 has no point 'router_logits'; it has", reading(router_logits=[1])),
    ("layer 0 has no point 'mlp_act'; it has", reading(mlp_act=[0])),
    *(
        (f"{field}: is for (rows of )?the residual stream", reading() | asked)
        for field, value in (
            ("project", [[1.0] * HIDDEN]),
            ("reduce", "mean"),
            ("lens", {"name": "logit", "top_k": 1}),
        )
        for asked in [
            {"capture": {"inline": {"hooks": {NEURONS: DENSE}, "positions": [0], field: value}}}
        ]
    ),
    (
        r"capture\.filesystem\.hooks: rows have different widths",
        {"capture": {"filesystem": {"hooks": {NEURONS: DENSE, ROUTER: [0]}, "positions": [0]}}},
    ),
]


@pytest.mark.parametrize(("said", "fields"), REFUSED)
def test_refused_by_name(running: Running, said: str, fields: dict[str, Any]) -> None:
    lenses = running.llm.llm_engine.vllm_config.capture_config.capture_lens
    said = said if lenses or "lens" not in said else r"lens"
    with pytest.raises(ValueError, match=said):
        serve(running.llm, [Ask(prompt_of(5, 197), fields)])


def test_cached_prefixes(running: Running) -> None:
    """A hit ends before the first wanted position."""
    prompt, hits = prompt_of(70, 198), []
    for positions in ("last_prompt", "last_prompt", [3]):
        ask = Ask(prompt, reading(positions))
        [output] = serve(running.llm, [ask])
        running.judge.check(ask, output)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 64, 0]


def test_without_the_option(tiny_models: TinyModels) -> None:
    """The engine refuses by name; its answers are those of one with the points, bit for bit."""
    prompts = [Ask(prompt_of(17, 199)), Ask(prompt_of(5, 199))]
    answers = []
    for points in (["post_block"], ["post_block", *INNER_POINTS]):
        options: dict[str, Any] = {"capture_consumers": ["inline"], "capture_points": points}
        llm = make_llm(tiny_models.path(MODEL), **options)
        try:
            answers.append([serving.log_probs(o.outputs[0]) for o in serve(llm, prompts)])
            for point in INNER_POINTS:
                if point not in points:
                    said = rf"capture_points=\[.*\]; start it with '{point}' among them"
                    with pytest.raises(ValueError, match=said):
                        serve(llm, [Ask(prompt_of(5, 199), reading(**{point: "all"}))])
        finally:
            shut_down(llm)
    without, with_points = answers
    assert all(torch.equal(a, b) for a, b in zip(without, with_points, strict=True))
    assert not torch.equal(without[0], without[1])


def _proofs(model: Any) -> dict[str, list[bool]]:
    """What a layer's MLP proves as it is, with its output doubled, with a way round its down
    projection, and with another input. Runs in the worker."""
    from vllm.v1.interventions.worker.inner import dense_mlp_of, proves
    from vllm.v1.interventions.worker.layers import find_layers

    found: dict[str, list[bool]] = {}
    for index, layer in find_layers(model).items():
        mlp = dense_mlp_of(layer)
        if mlp is None:
            found[str(index)] = []
            continue
        plain = mlp.module.forward
        ways: dict[str, Any] = {
            "plain": plain,
            "doubled": lambda x, plain=plain: 2 * plain(x),
            "round": lambda x, plain=plain: x + plain(x),
            "unused": lambda x, plain=plain: x + 0 * plain(x),
            "twice": lambda x, plain=plain: plain(plain(x)),
        }
        try:
            for name, way in ways.items():
                mlp.module.forward = way
                found.setdefault(name, []).append(proves(mlp, torch.float32))
        finally:
            del mlp.module.forward
    return found


def test_an_mlp_proves_what_it_is(running: Running) -> None:
    """Once for each worker and dense layer; a way round the projection is seen."""
    for found in running.llm.collective_rpc(_of_worker):
        sparse = {name for name, proofs in found.items() if not proofs}
        assert sparse <= {str(n) for n in SPARSE} and sparse
        proofs = {name: each for name, each in found.items() if each}
        assert proofs in (
            {},
            {"plain": [True], "doubled": [True], "round": [False], "unused": [False],
             "twice": [False]},
        )  # fmt: skip


def _of_worker(worker: Any) -> dict[str, list[bool]]:
    return _proofs(worker.worker.model_runner.get_model())
