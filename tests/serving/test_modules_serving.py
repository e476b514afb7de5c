# SPDX-License-Identifier: Apache-2.0
"""Named modules in a running engine: a name means what it meant when a request came."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import engine, make_llm, shut_down
from tests.conformance.reference import Site
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, deltas_of, prompt_of, serve, vector
from tests.support.timeline import Own, Timeline, added
from vllm import LLM
from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.global_state import Change
from vllm.v1.steering import files

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

PROMPT = prompt_of(70, 600)
FULL = 64
ROWS = capture("all")

CALM = {"post_block": {1: vector(600)}}
LOUD = {"post_block": {1: vector(601)}}
PHASES = {
    "vectors": {"pre_attn": {2: vector(602)}},
    "prefill_vectors": {"post_attn": {0: vector(603)}},
    "decode_vectors": {"post_block": {1: vector(604)}},
}


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Two requests run at a time; one slot more than these need."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        enable_prefix_caching=True,
        max_num_seqs=2,
        max_steering_configs=5,
        default_steering_modules=["house"],
        max_model_len=models.MAX_LENGTH,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


@pytest.fixture
def line(pair: tuple[LLM, Judge]) -> Iterator[Timeline]:
    llm, judge = pair
    assert llm.reset_prefix_cache()
    line = Timeline(llm, judge)
    yield line
    line.close()
    for name in llm.steering.modules():
        llm.steering.unregister_module(name)


def adds(source: Any, scale: float = 1.0, fields: dict[str, Any] | None = None) -> Own:
    """What a module adds to a request whose prompt is PROMPT, beside `fields`."""
    tiers = source if "vectors" in source else {"vectors": source}
    as_fields = {
        f"{phase}steering_vectors": {
            point: {layer: {"vector": v, "scale": scale} for layer, v in layers.items()}
            for point, layers in tiers.get(f"{phase}vectors", {}).items()
        }
        for phase in ("", "prefill_", "decode_")
    }

    def own(length: int) -> dict[Site, torch.Tensor]:
        asks = (Ask(PROMPT, as_fields), Ask(PROMPT, fields or {}))
        return added(*(deltas_of(ask, length) for ask in asks))

    return own


@pytest.mark.v2
def test_a_default_module_acts_while_it_is_registered(line: Timeline) -> None:
    """On requests that come then and say nothing, or name others; those that run keep theirs."""
    line.llm.steering.register_module("calm", CALM)
    running = line.add(PROMPT, {"max_tokens": 8, **ROWS})
    line.step(2)
    line.llm.steering.register_module("house", LOUD)
    plain = line.add(PROMPT, ROWS)
    line.finish()
    line.check(running, adds({"post_block": {}}))
    line.check(plain, adds(LOUD))
    with pytest.raises(AssertionError, match="off by"):
        line.check(plain, adds({"post_block": {}}))
    named = line.serve(PROMPT, {"steering_modules": ["calm"], **ROWS})
    weak = line.serve(PROMPT, {"steering_modules": [("house", 0.25)], **ROWS})
    without = line.serve(PROMPT, {"steering_inherit_global": False, **ROWS})
    calm, loud = adds(CALM), adds(LOUD)
    line.check(named, lambda length: added(calm(length), loud(length)))
    line.check(weak, adds(LOUD, 0.25))
    line.check(without, adds({"post_block": {}}))
    line.llm.steering.unregister_module("house")
    line.check(line.serve(PROMPT, ROWS), adds({"post_block": {}}))


@pytest.mark.v2
@pytest.mark.parametrize("scale", [1.0, -0.5], ids=str)
def test_scale_and_tiers(line: Timeline, scale: float) -> None:
    line.llm.steering.register_module("phases", PHASES)
    name = line.serve(PROMPT, {"steering_modules": [("phases", scale)], **ROWS})
    line.check(name, adds(PHASES, scale))
    with pytest.raises(AssertionError, match="off by"):
        line.check(name, adds(PHASES, scale + 0.01))


@pytest.mark.v2
def test_all_adds_up(line: Timeline) -> None:
    """Global tiers, two modules, one of them twice, and vectors of the request."""
    line.llm.steering.register_module("calm", CALM)
    line.llm.steering.register_module("phases", PHASES)
    line.set_tiers({"base": LOUD, "decode": {"pre_attn": {2: vector(605)}}})
    inline: dict[str, Any] = {
        "steering_vectors": {"post_block": {1: vector(606)}},
        "decode_steering_vectors": {"post_attn": {3: vector(607)}},
    }
    names = ["calm", ["phases", 0.5], ("calm", 0.25)]
    name = line.serve(PROMPT, {**inline, "steering_modules": names, **ROWS})
    calm, phases = adds(CALM, 1.25, inline), adds(PHASES, 0.5)
    line.check(name, lambda length: added(calm(length), phases(length)))
    with pytest.raises(AssertionError, match="off by"):
        line.check(name, calm)


def test_a_name_keeps_its_meaning(line: Timeline) -> None:
    """Of requests that run, and of one that waits, when the name is registered anew or gone."""
    register = line.llm.steering.register_module
    register("mood", CALM)
    mood = {"max_tokens": 12, "steering_modules": ["mood"], **ROWS}
    running = [line.add(PROMPT, mood), line.add(PROMPT, {**mood, "max_tokens": 30})]
    # Captured positions are computed, not taken from the cache: only the last, which leaves hits.
    last = {**mood, **capture([-1])}
    waiting = line.add(PROMPT, last)
    line.until(running[0], 3)
    register("mood", LOUD)
    later = line.add(PROMPT, last)
    line.step(2)
    line.llm.steering.unregister_module("mood")
    assert waiting not in line.tokens and later not in line.tokens
    line.finish()
    for name in (*running, waiting):
        line.check(name, adds(CALM))
    line.check(later, adds(LOUD))
    assert line.cached(waiting) == FULL
    assert line.cached(later) == 0, "blocks of the old meaning served the new one"
    with pytest.raises(ValueError, match=r"steering_modules\[0\]: unknown module 'mood'"):
        line.add(PROMPT, mood)
    # Identity is content: under another name the old blocks are found.
    register("again", CALM)
    name = line.serve(PROMPT, {"steering_modules": ["again"], **ROWS | capture([-1])})
    line.check(name, adds(CALM))
    assert line.cached(name) == FULL


def test_unknown_names(line: Timeline) -> None:
    steering = line.llm.steering
    steering.register_module("calm", CALM)
    unknown = r"steering_modules\[1\]: unknown module 'clam' \(did you mean 'calm'\?\); .* calm"
    with pytest.raises(ValueError, match=unknown):
        line.add(PROMPT, {"steering_modules": ["calm", "clam"]})
    with pytest.raises(ValueError, match=r"name: unknown module 'clam'"):
        steering.unregister_module("clam")
    with pytest.raises(ValueError, match=r"vectors|source|pre_attn"):
        steering.register_module("bad", {"pre_attn": {0: vector(1)[:-1]}})
    assert steering.modules().keys() == {"calm"}
    line.check(line.serve(PROMPT, {"steering_modules": ["calm"], **ROWS}), adds(CALM))


def test_unregistered_on_the_way(line: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another frontend may take a module away after this one has resolved the name: the request
    keeps what it meant. Long after, it is refused."""
    core = serving.core_of(line.llm)
    steering, preprocess = line.llm.steering, core.preprocess_add_request
    ours = core.scheduler.interventions
    modules = ours.modules
    steering.register_module("calm", CALM)

    def unregister() -> None:
        ours.changes.call(
            SteeringCall("prepare", "a", Change(drop=[("modules", "calm")])), [], list
        )
        ours.changes.call(SteeringCall("commit", "a"), [], list)

    def late(request: Any) -> Any:
        unregister()
        return preprocess(request)

    def too_late(request: Any) -> Any:
        unregister()
        modules._kept = deque((0.0, module) for _, module in modules._kept)
        modules.forget()
        return preprocess(request)

    with monkeypatch.context() as patch:
        patch.setattr(core, "preprocess_add_request", late)
        name = line.add(PROMPT, {"steering_modules": ["calm"], **ROWS})
    line.finish()
    line.check(name, adds(CALM))
    steering.register_module("calm", CALM)
    with monkeypatch.context() as patch:
        patch.setattr(core, "preprocess_add_request", too_late)
        with pytest.raises(ValueError, match=r"steering_modules: .* send it again"):
            line.add(PROMPT, {"steering_modules": ["calm"]})
    line.llm.llm_engine.abort_request([list(line.asks)[-1]])
    steering.register_module("calm", CALM)
    line.check(line.serve(PROMPT, {"steering_modules": ["calm"], **ROWS}), adds(CALM))


def test_slots_are_given_back(line: Timeline) -> None:
    """Modules do not hold slots; requests with many scales of one module take turns."""
    line.llm.steering.register_module("phases", PHASES)
    names = [
        line.add(PROMPT, {"steering_modules": [("phases", 0.3 * i)], **ROWS}) for i in range(1, 8)
    ]
    line.finish()
    for i, name in enumerate(names, start=1):
        line.check(name, adds(PHASES, 0.3 * i))
    assert line.llm.steering.state()["slots"] == {"in_use": 0, "size": 5}


def test_at_start_up(tiny_models: TinyModels, tmp_path: Path, pair: tuple[LLM, Judge]) -> None:
    """`--steering-modules name=path`, and a module saved by one engine and loaded by another."""
    llm, judge = pair
    llm.steering.register_module("phases", PHASES)
    path = tmp_path / "phases.safetensors"
    files.save(path, llm.steering.module("phases"))
    llm.steering.unregister_module("phases")
    options = {"steering_modules": [f"mood={path}"], "enable_steering": True}
    with engine(tiny_models.path("llama"), capture_consumers=["inline"], **options) as other:
        assert other.steering.modules().keys() == {"mood"}
        asks = [Ask(PROMPT, {"steering_modules": [("mood", 0.5)], **ROWS}), Ask(PROMPT, ROWS)]
        output, plain = (o.outputs[0] for o in serve(other, asks))
        sequence = [*PROMPT, *output.token_ids][:-1]
        want = judge.reference.run(sequence, adds(PHASES, 0.5)(len(sequence)))
        rows = serving.row_tensors(output)
        error = max(serving.worst_row(rows[site], want.rows[site]) for site in rows)
        assert error <= 1e-4
        assert not serving.same_completion(output, plain)
    with pytest.raises((ValueError, OSError), match="nowhere"):
        make_llm(
            tiny_models.path("llama"),
            steering_modules=["mood=/nowhere.safetensors"],
            enable_steering=True,
        )
