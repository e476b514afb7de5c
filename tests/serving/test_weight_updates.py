# SPDX-License-Identifier: Apache-2.0
"""New weights in a running engine, as trainers of policies send them: what was registered keeps its
values and acts on the new model, and what was computed with the old one is used no more once its
prefix cache is reset. CPUs have no sleep mode: `tests/gpu/sleep.py` sleeps and reloads on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import engine
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE, Reference
from tests.support import serving
from tests.support.serving import Ask, capture, prompt_of, relative, serve, vector

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from vllm import LLM

pytestmark = [pytest.mark.full, pytest.mark.v2]

PROMPT = prompt_of(40, 900)
SITE = ("post_block", 1)
MODULE, GLOBAL, PROBE = vector(901), vector(902), vector(903, norm=1.0)
ROWS = capture("all", ["post_block"])
NAMED = {"steering_modules": ["mood"]}
LENS = {
    "capture": {
        "inline": {
            "hooks": {"post_block": [models.LAYERS - 1]},
            "positions": "predicting",
            "lens": {"name": "logit", "top_k": 1},
        }
    }
}


@dataclass(frozen=True)
class Served:
    """An engine, and transformers with the weights before and after an update."""

    llm: LLM
    old: Reference
    new: Reference
    folder: Path
    """The new weights."""

    def restore(self, path: Path) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        assert self.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def new_weights(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("updated") / "model"
    models.build(tiny_models.row("llama"), seed=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def started(tiny_models: TinyModels, new_weights: Path) -> Iterator[Served]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    with engine(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        capture_lens=["logit"],
        enable_prefix_caching=True,
    ) as llm:
        llm.steering.register_module("mood", {"post_block": {1: MODULE}})
        old, new = (Reference(row, models.load(row, at)) for at in (path, new_weights))
        yield Served(llm, old, new, new_weights)


@pytest.fixture
def served(started: Served, tiny_models: TinyModels) -> Iterator[Served]:
    started.restore(tiny_models.path("llama"))
    yield started
    started.llm.steering.clear()
    started.llm.steering.set_rules([])


def by_reload(served: Served) -> None:
    """Read the new weights from their folder, in place."""
    served.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(served.folder)})


def by_call(served: Served) -> None:
    """Load named tensors by a function in the worker, which gets them in any way it knows."""
    tensors = {name: tensor.clone() for name, tensor in served.new.model.state_dict().items()}

    def load(worker: Any) -> None:
        worker.model_runner.reload_weights(weights_iterator=iter(tensors.items()))

    served.llm.collective_rpc(load)


UPDATES: list[Callable[[Served], None]] = [by_reload, by_call]


def rows_of(llm: LLM, **fields: Any) -> tuple[list[int], torch.Tensor]:
    """The tokens of an answer, and the rows that it captures at `SITE`."""
    (output,) = serve(llm, [Ask(PROMPT, {**ROWS, **fields})])
    return list(output.outputs[0].token_ids), serving.row_tensors(output.outputs[0])[SITE]


def wanted(reference: Reference, tokens: list[int], *added: torch.Tensor) -> torch.Tensor:
    """Rows of transformers at `SITE` over the prompt and all but the last of `tokens`."""
    sequence = [*PROMPT, *tokens[:-1]]
    delta = sum(added, torch.zeros(models.HIDDEN)).expand(len(sequence), -1)
    return reference.run(sequence, {SITE: delta}).rows[SITE]


def check(served: Served, reference: Reference, *added: torch.Tensor, **fields: Any) -> None:
    """An answer's rows are those of `reference`, and would not be of the other or without one."""
    tokens, rows = rows_of(served.llm, **fields)
    other = served.old if reference is served.new else served.new
    assert relative(rows, wanted(reference, tokens, *added)) <= READ_TOLERANCE + WRITE_TOLERANCE
    assert relative(rows, wanted(other, tokens, *added)) >= LEAST_MOVE
    for i in range(len(added)):
        less = (*added[:i], *added[i + 1 :])
        assert relative(rows, wanted(reference, tokens, *less)) >= LEAST_MOVE


@pytest.mark.parametrize("update", UPDATES)
def test_modules_and_tiers_keep_their_values(
    served: Served, update: Callable[[Served], None]
) -> None:
    served.llm.steering.set({"post_block": {1: GLOBAL}})
    before = served.llm.steering.state(), served.llm.steering.modules()
    check(served, served.old, MODULE, GLOBAL, **NAMED)
    update(served)
    assert served.llm.reset_prefix_cache()
    assert (served.llm.steering.state(), served.llm.steering.modules()) == before
    check(served, served.new, MODULE, GLOBAL, **NAMED)
    check(served, served.new, GLOBAL)


@pytest.mark.parametrize("update", UPDATES)
def test_probes_keep_direction_and_threshold(
    served: Served, update: Callable[[Served], None]
) -> None:
    """They read the new model: a threshold says of its rows what was fitted to the old one's."""
    rule = {"name": "r", "probe": PROBE, "point": SITE[0], "layer": SITE[1]}

    def fired(reference: Reference) -> tuple[Any, int]:
        """What a rule says, and how many rows of the answer pass by transformers."""
        tokens, _ = rows_of(served.llm)
        scores = wanted(reference, tokens)[len(PROMPT) :] @ PROBE
        limit = float(scores.sort().values[1:3].mean())
        asked = {"rules": [{**rule, "threshold": limit}]}
        (output,) = serve(served.llm, [Ask(PROMPT, asked)])
        other = served.old if reference is served.new else served.new
        assert (wanted(other, tokens)[len(PROMPT) :] @ PROBE > limit).tolist() != (
            scores > limit
        ).tolist()
        return output.outputs[0].rules["r"].fired, int((scores > limit).sum())

    for reference in (served.old, served.new):
        if reference is served.new:
            update(served)
            assert served.llm.reset_prefix_cache()
        said, want = fired(reference)
        assert said == want > 0


@pytest.mark.parametrize("update", UPDATES)
def test_lenses_read_the_new_head(served: Served, update: Callable[[Served], None]) -> None:
    def said() -> tuple[list[int], list[int]]:
        (output,) = serve(served.llm, [Ask(PROMPT, LENS)])
        rows = output.outputs[0].capture_results["inline"].payload[SITE[0], models.LAYERS - 1]
        return rows.top_ids[:, 0].tolist(), list(output.outputs[0].token_ids)

    lens, old = said()
    assert lens == old
    update(served)
    assert served.llm.reset_prefix_cache()
    lens, new = said()
    assert lens == new != old


@pytest.mark.parametrize("steered", [{}, NAMED], ids=["plain", "steered"])
def test_cached_blocks_are_of_the_weights_that_made_them(
    served: Served, steered: dict[str, Any]
) -> None:
    """Whoever updates resets the prefix cache, as upstream has it: until then answers continue from
    the old model's keys and values, steered ones and plain ones alike."""
    last = capture("last_prompt", ["post_block"])

    def last_row() -> tuple[int, torch.Tensor]:
        (output,) = serve(served.llm, [Ask(PROMPT, {**last, **steered})])
        return output.num_cached_tokens, serving.row_tensors(output.outputs[0])[SITE][0]

    last_row()
    by_reload(served)
    cached, stale = last_row()
    assert cached == 32
    assert served.llm.reset_prefix_cache()
    cached, row = last_row()
    want = wanted(served.new, [0], *([MODULE] if steered else []))[-1]
    assert cached == 0 and relative(row, want) <= READ_TOLERANCE + WRITE_TOLERANCE
    assert relative(stale, want) >= LEAST_MOVE


def test_a_model_that_ends_early(tiny_models: TinyModels, new_weights: Path) -> None:
    """Weights of layers that are not loaded are passed over, as at the start."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    with engine(path, capture_consumers=["inline"], capture_stop_after=1) as llm:
        asked = Ask(PROMPT, {**capture("all", ["post_block"], [1]), "max_tokens": 1})
        for at in (path, new_weights):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(at)})
            assert llm.reset_prefix_cache()
            (output,) = serve(llm, [asked], log_probs=False)
            rows = serving.row_tensors(output.outputs[0])[SITE]
            for weights in (path, new_weights):
                want = wanted(Reference(row, models.load(row, weights)), [0])
                off = relative(rows, want)
                assert off <= READ_TOLERANCE if weights is at else off >= LEAST_MOVE


@pytest.mark.long
def test_compiled_code_of_both_variants(tiny_models: TinyModels, new_weights: Path) -> None:
    """They share the weights that are updated: the plain one, and that with taps."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    old, new = (Reference(row, models.load(row, at)) for at in (path, new_weights))
    with engine(
        path, enable_steering=True, capture_consumers=["inline"], enforce_eager=False
    ) as llm:
        llm.steering.register_module("mood", {"post_block": {1: MODULE}})
        for reference, other in ((old, new), (new, old)):
            if reference is new:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new_weights)})
                assert llm.reset_prefix_cache()
            (output,) = serve(llm, [Ask(PROMPT)])
            sequence = [*PROMPT, *output.outputs[0].token_ids[:-1]]
            said = serving.log_probs(output.outputs[0])
            want, never = (
                each.run(sequence).logits[len(PROMPT) - 1 :].log_softmax(-1)
                for each in (reference, other)
            )
            assert (said - want).abs().max() <= 1e-3 < (said - never).abs().max()
            tokens, rows = rows_of(llm, **NAMED)
            off, apart = (
                relative(rows, wanted(each, tokens, MODULE)) for each in (reference, other)
            )
            assert off <= READ_TOLERANCE + WRITE_TOLERANCE and apart >= LEAST_MOVE
