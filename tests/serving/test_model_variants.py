# SPDX-License-Identifier: Apache-2.0
"""The model's two forms: which steps run the one without taps, and that it is upstream's."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from tests.conformance.engine import engine
from tests.support.serving import Ask, capture, prompt_of, same_completion, serve, vector
from vllm import LLM
from vllm.config import VllmConfig
from vllm.model_executor.layers.residual_taps import BoundTaps, PassTap, UnboundTaps
from vllm.v1.interventions.worker.model_variants import ModelVariants
from vllm.v1.interventions.worker.runner import WorkerInterventions
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.quick, pytest.mark.v2("full")]

PLAIN, TAPPED = False, True
STEERED = {"steering_vectors": {"post_attn": {1: vector(150)}}}


@contextmanager
def watching_forms(llm: LLM) -> Iterator[list[bool]]:
    """Whether each step ran the form with taps."""
    interventions: WorkerInterventions = (
        llm.llm_engine.model_executor.driver_worker.worker.model_runner.interventions
    )
    forms = interventions._variants
    assert forms is not None
    chosen, choose = list[bool](), forms.choose

    def recorded(tapped: bool) -> bool:
        chosen.append(used := choose(tapped))
        return used

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "choose", recorded)
        yield chosen


def test_a_single_variant_runs_every_step(tiny_models: TinyModels) -> None:
    prompt = prompt_of(9, 150)
    steered = Ask(prompt, {"max_tokens": 3, **STEERED})
    answers = []
    for single in (True, False):
        options: dict[str, Any] = {"enable_steering": True, "capture_consumers": ["inline"]}
        with engine(tiny_models.path("llama"), single_variant=single, **options) as llm:
            with watching_forms(llm) as seen:
                answers.append(serve(llm, [Ask(prompt, {"max_tokens": 3})]))
                answers.append(serve(llm, [steered]))
            assert set(seen) == ({TAPPED} if single else {PLAIN, TAPPED})
    one, one_steered, two, two_steered = (answer[0].outputs[0] for answer in answers)
    assert same_completion(one, two)
    assert same_completion(one_steered, two_steered)
    assert not same_completion(one, one_steered)


def test_the_form_follows_the_requests(tiny_models: TinyModels) -> None:
    """A step has taps while a request in it steers or captures, and global vectors steer all."""
    prompt = prompt_of(9, 150)
    with engine(
        tiny_models.path("llama"), enable_steering=True, capture_consumers=["inline"]
    ) as llm:
        with watching_forms(llm) as alone:
            [plain] = serve(llm, [Ask(prompt, {"max_tokens": 6})])
        assert set(alone) == {PLAIN}
        for fields in (STEERED, capture("all")):
            with watching_forms(llm) as beside:
                among, _ = serve(
                    llm, [Ask(prompt, {"max_tokens": 6}), Ask(prompt, {"max_tokens": 3, **fields})]
                )
            assert beside == [TAPPED] * 3 + [PLAIN] * 3
            assert same_completion(among.outputs[0], plain.outputs[0])
        llm.steering.set(STEERED["steering_vectors"])
        with watching_forms(llm) as under_global:
            [steered] = serve(llm, [Ask(prompt, {"max_tokens": 6})])
        assert set(under_global) == {TAPPED}
        assert not same_completion(steered.outputs[0], plain.outputs[0])
        llm.steering.clear()
        with watching_forms(llm) as cleared:
            serve(llm, [Ask(prompt, {"max_tokens": 6})])
        assert set(cleared) == {PLAIN}


def test_plain_is_what_upstream_runs(tiny_models: TinyModels) -> None:
    """The same bits as an engine that was started without steering and capture."""
    asks = [Ask(prompt_of(7 + 5 * i, 151 + i), {"max_tokens": 8, "logprobs": 5}) for i in range(4)]
    path = tiny_models.path("llama")
    with engine(path) as llm:
        without = serve(llm, asks)
    with engine(path, enable_steering=True, capture_consumers=["inline"]) as llm:
        idle = serve(llm, asks)
        steered = serve(llm, [Ask(a.prompt, {**a.fields, **STEERED}) for a in asks])
    for off, on, moved in zip(without, idle, steered, strict=True):
        assert _logprobs(off) == _logprobs(on)
        assert _logprobs(off) != _logprobs(moved)


def _logprobs(output: Any) -> list[dict[int, float]]:
    return [{t: lp.logprob for t, lp in at.items()} for at in output.outputs[0].logprobs]


class Layer(nn.Module):
    taps = UnboundTaps("pre_attn")


def made() -> tuple[ModelVariants, Layer]:
    layer = Layer()
    bound = BoundTaps(PassTap(), PassTap(), PassTap())
    return ModelVariants(VllmConfig(), nn.Sequential(layer), {layer: bound}), layer


def tapped(layer: Layer) -> bool:
    taps: object = layer.taps
    return isinstance(taps, BoundTaps)


def test_each_form_has_taps_of_its_own() -> None:
    forms, layer = made()
    assert tapped(layer)
    assert not forms.choose(tapped=False)
    assert layer.taps is Layer.taps
    assert forms.choose(tapped=True)
    assert tapped(layer)


def test_each_form_has_graphs_of_its_own() -> None:
    """And those of a holder that upstream replaces, as after profiling, are let go."""
    forms, layer = made()
    taken: Counter[str] = Counter()
    for round_number in range(2):
        manager: Any = CudaGraphManager.__new__(CudaGraphManager)
        manager.graphs = {}
        for size in forms.each((8, 4), manager):
            form = "tapped" if tapped(layer) else "plain"
            taken[form] += 1
            assert size not in manager.graphs
            manager.graphs[size] = nn.Linear(1, 1)
        with_taps = dict(manager.graphs)
        forms.choose(tapped=False)
        plain = dict(manager.graphs)
        assert set(plain) == set(with_taps) == {8, 4}
        assert all(plain[size] is not with_taps[size] for size in plain)
        forms.choose(tapped=True)
        assert manager.graphs == with_taps
        assert taken == {"plain": 2 * (round_number + 1), "tapped": 2 * (round_number + 1)}
        graph = weakref.ref(plain[8])
        del plain, with_taps, manager
        gc.collect()
        assert graph() is None


def test_batch_invariance_has_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """There results must not depend on what other requests ask for, not even by rounding."""
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    forms, layer = made()
    assert forms.count == 1
    assert forms.choose(tapped=False)
    assert tapped(layer)
    assert list(forms.each((1, 2))) == [1, 2]
