# SPDX-License-Identifier: Apache-2.0
"""The model's two forms: which steps run the one without taps, and that it is upstream's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.conformance.engine import engine
from tests.support.serving import Ask, capture, prompt_of, same_completion, serve, vector
from vllm import LLM
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.model_executor.layers.residual_taps import BoundTaps, PassTap, UnboundTaps
from vllm.platforms import current_platform
from vllm.v1.interventions.worker.runner import WorkerInterventions
from vllm.v1.interventions.worker.token_map import TokenMap
from vllm.v1.interventions.worker.variants import recording, site_sets
from vllm.v1.interventions.worker.variants.graphs import coarse
from vllm.v1.interventions.worker.variants.site_sets import SETS
from vllm.v1.interventions.worker.variants.variants import STAND_INS, ModelVariants
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.quick, pytest.mark.v2("full")]

PLAIN, TAPPED = False, True
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""Of upstream's graphs."""
STEERED = {"steering_vectors": {"post_attn": {1: vector(150)}}}


@contextmanager
def watching_forms(llm: LLM, captures: bool = False) -> Iterator[list[bool]]:
    """Whether each step ran the form with taps, or, if `captures`, whether its captures ran."""
    interventions: WorkerInterventions = (
        llm.llm_engine.model_executor.driver_worker.worker.model_runner.interventions
    )
    forms, arena = interventions._variants, interventions.capture
    assert forms is not None and arena is not None
    chosen, choose = list[bool](), forms.choose

    def recorded(tapped: bool, wanted: frozenset[int]) -> None:
        choose(tapped, wanted)
        assert on(arena.switches) == wanted
        chosen.append(bool(wanted) if captures else forms.tapped)

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


def test_captures_rest_while_none_is_wanted(tiny_models: TinyModels) -> None:
    """A step that steers alone turns them off; rows are those of an engine in which they never
    rested."""
    prompt = prompt_of(9, 150)
    options: dict[str, Any] = {"enable_steering": True, "capture_consumers": ["inline"]}
    both = Ask(prompt, {"max_tokens": 3, **STEERED, **capture("all")})
    with engine(tiny_models.path("llama"), **options) as llm:
        [fresh], [unsteered] = serve(llm, [both]), serve(llm, [Ask(prompt, capture("all"))])
        with watching_forms(llm, captures=True) as seen:
            _, beside = serve(llm, [Ask(prompt, {"max_tokens": 6, **STEERED}), both])
            [again] = serve(llm, [both])
    assert seen == [True] * 3 + [False] * 3 + [True] * 3
    for one in (beside, again):
        assert same_completion(one.outputs[0], fresh.outputs[0])
    assert not same_completion(unsteered.outputs[0], fresh.outputs[0])


def test_kernels_of_steering_run_before_there_are_requests(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA loads a kernel when it first runs, and steps would wait for it."""
    loaded, load = list[bool](), TokenMap.load_kernels

    def loading(tokens: TokenMap) -> None:
        loaded.append(torch.is_inference_mode_enabled())
        load(tokens)

    monkeypatch.setattr(TokenMap, "load_kernels", loading)
    with engine(tiny_models.path("llama"), enable_steering=True):
        assert loaded == [True], "as in a step, whose tensors cannot be written to otherwise"


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


NONE, ONE, TWO = frozenset[int](), frozenset([1]), frozenset([0, 1])
ALL = frozenset(range(4))
STEERS, CAPTURES, NEITHER = (True, NONE), (True, ALL), (False, NONE)
"""What steps want: taps, and where they capture."""


def switches_of(sites: frozenset[int] = ALL) -> torch.Tensor:
    return torch.tensor([site in sites for site in ALL])


def on(switches: torch.Tensor) -> frozenset[int]:
    return frozenset(switches.nonzero().flatten().tolist())


def made(switches: torch.Tensor | None = None, late: bool = True) -> tuple[ModelVariants, Layer]:
    """`late`: whether graphs with taps may be recorded when they are needed."""
    layer = Layer()
    bound = BoundTaps(PassTap(), PassTap(), PassTap(), PassTap())
    config = VllmConfig()
    if not late:
        config.kv_transfer_config = KVTransferConfig()
    config.steering_config.enable_steering = switches is not None
    return ModelVariants(config, nn.Sequential(layer), {layer: bound}, switches), layer


def tapped(layer: Layer) -> bool:
    taps: object = layer.taps
    return isinstance(taps, BoundTaps)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Callable[[], CudaGraphManager]:
    """Makes upstream's own, which plans graphs of whole forwards and of pieces."""
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: stage)
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", object())

    def make() -> CudaGraphManager:
        config = VllmConfig()
        config.compilation_config.cudagraph_capture_sizes = SIZES
        config.compilation_config.max_cudagraph_capture_size = SIZES[-1]
        config.scheduler_config.max_num_seqs = SIZES[-1]
        both = CUDAGraphMode.FULL_AND_PIECEWISE
        return CudaGraphManager(config, torch.device("cpu"), both, decode_query_len=1)

    return make


def planned(manager: CudaGraphManager, mode: CUDAGraphMode) -> list[int]:
    return sorted(desc.num_tokens for desc in manager._capture_descs.get(mode, []))


def test_each_form_has_taps_of_its_own() -> None:
    forms, layer = made()
    seen = [(tapped(layer), forms.tapped)]
    for taps in (False, True, True):
        forms.choose(taps, NONE)
        seen.append((tapped(layer), forms.tapped))
    assert seen == [(True, True), (False, False), (True, True), (True, True)]
    forms.choose(*NEITHER)
    assert layer.taps is Layer.taps


def test_each_form_has_graphs_of_its_own(manager: Callable[[], CudaGraphManager]) -> None:
    """And those of a holder that upstream replaces, as after profiling, are let go."""
    switches = switches_of()
    forms, layer = made(switches, late=False)
    full, pieces = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    for _ in range(2):
        holder = manager()
        assert planned(holder, full) == planned(holder, pieces) == SIZES
        taken = []
        for _ in forms.each([None], holder):
            taken.append((tapped(layer), on(switches), planned(holder, full)))
            assert not holder.graphs
            of_pieces = planned(holder, pieces)
            assert of_pieces == ([] if not on(switches) else taken[-1][-1])
            for desc in holder._capture_descs[full]:
                holder.graphs[desc] = nn.Linear(1, 1)  # type: ignore[assignment]
        thin = coarse(SIZES)
        assert taken == [(False, ALL, SIZES), (*CAPTURES, thin), (*STEERS, thin)]
        assert forms.num_full_graphs(holder) == len(SIZES) + 2 * len(thin)
        holder._graphs_captured = True
        found = {}
        for wants in (NEITHER, CAPTURES, STEERS):
            forms.choose(*wants)
            assert on(switches) == wants[1]
            for tokens in range(1, SIZES[-1] + 1):
                desc = holder.dispatch(tokens, tokens, 1, 0)
                sizes = thin if wants[0] else SIZES
                assert desc.num_tokens == min(size for size in sizes if size >= tokens)
                found[wants, tokens] = holder.graphs[desc]
        assert len(set(map(id, found.values()))) == len(SIZES) + 2 * len(thin)
        assert forms.num_graphs(full=True) == 3 and forms.num_graphs(full=False) == 2
        graph = weakref.ref(found[NEITHER, 8])
        forms.choose(*NEITHER)
        del found, holder
        gc.collect()
        assert graph() is None


def test_graphs_with_taps_are_recorded_when_first_needed(
    manager: Callable[[], CudaGraphManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the largest, at start-up; those of pieces once, while their captures are on. The
    step before warms up: a whole forward by a dummy, pieces as it runs without them."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # there is none here
    emptied = list[None]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    for name in ("synchronize", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    piece: Any = SimpleNamespace(capture_begin=lambda *_, **__: None, capture_end=lambda: None)
    stream: Any = object()
    monkeypatch.setattr(site_sets, "STEPS", 3)
    switches = switches_of()
    forms, layer = made(switches)
    full, pieces = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    holder, dummies = manager(), list[None]()
    recorded, warm = list[Any](), list[Any]()

    def capture(**kwargs: object) -> None:
        sizes = planned(holder, full), planned(holder, pieces)
        assert kwargs or (holder.warms_up and holder.records)
        for _ in range(3):
            with recording.recorded(piece, pool=None, stream=stream):
                pass  # at start-up torch gives memory back before each
        if kwargs and holder.warms_up:
            warm.append((tapped(layer), on(switches), *sizes))
        if not holder.records:
            return
        recorded.append((tapped(layer), on(switches), *sizes))
        for desc in holder._capture_descs.get(full, []):
            assert desc not in holder.graphs
            holder.graphs[desc] = nn.Linear(1, 1)  # type: ignore[assignment]
        holder._graphs_captured = True

    forms.recorder = capture
    for _ in forms.each([None], holder):
        capture()
    most = [SIZES[-1]]
    assert recorded == [(False, ALL, SIZES, SIZES), (*CAPTURES, most, most), (*STEERS, most, [])]
    thin = coarse(SIZES)
    assert len(emptied) == 3 * 3
    memory_is_kept_for = len(SIZES) + (2 + SETS) * len(thin)
    assert forms.num_full_graphs(holder) == memory_is_kept_for

    def step(wants: tuple[bool, frozenset[int]], tokens: int, uniform: bool = True) -> Any:
        """What was recorded for it; None if it runs without a graph."""
        for calls in (recorded, warm, dummies, emptied):
            calls.clear()
        forms.choose(*wants)
        desc = holder.dispatch(tokens, tokens, 1 if uniform else None, 0)
        assert desc.cg_mode == (full if uniform else pieces)
        runs = forms.need_graph(desc, lambda: dummies.append(None))
        assert len(dummies) == len(emptied) == len(recorded) + len(warm)
        assert holder.warms_up and holder.records
        if runs != desc:
            assert runs == replace(desc, cg_mode=CUDAGraphMode.NONE, num_reqs=None)
            assert not recorded
            assert len(warm) == uniform and on(switches) == (wants[1] if uniform else ALL)
            return None
        assert on(switches) == wants[1] and (not uniform or desc in holder.graphs)
        assert not warm
        return [*recorded]

    def warmed(wants: tuple[bool, frozenset[int]], tokens: int) -> Any:
        """The same of the second step, when the first has warmed up just that."""
        assert step(wants, tokens) is None
        [seen] = warm
        assert step(wants, tokens) == [seen]
        return [seen]

    for uniform in (True, False):
        for tokens in (1, 7, 500):
            assert step(NEITHER, tokens, uniform) == []
        assert step(CAPTURES, 500, uniform) == step(STEERS, 500, uniform) == []
    assert warmed(CAPTURES, 7) == [(*CAPTURES, [8], [])]
    assert step(CAPTURES, 8) == []
    assert warmed(STEERS, 7) == [(*STEERS, [8], [])]
    assert step(STEERS, 7) == []
    assert step(STEERS, 7, False) is step(CAPTURES, 90, False) is None
    assert step(CAPTURES, 7, False) == [(*CAPTURES, [], [8])]
    assert step(STEERS, 90, False) == [(*CAPTURES, [], [96])]
    assert step(CAPTURES, 7, False) == step(STEERS, 7, False) == []
    # A set that is wanted often has graphs of its own, others those of all sites.
    one, two, three = (True, ONE), (True, TWO), (True, frozenset([0, 1, 2]))
    assert step(one, 8) == step(one, 8) == []
    assert warmed(one, 8) == [(*one, [8], [])]
    assert step(one, 8) == step(one, 7, False) == step(CAPTURES, 8) == step(STEERS, 8) == []
    assert warmed(one, 16) == [(*one, [16], [])]
    assert warmed(one, 500) == [(*one, most, [])]
    for wants in (two, three):
        assert step(wants, 8) == step(wants, 8) == []
        assert warmed(wants, 8) == [(*wants, [8], [])]
    # Those of the one not used for longest are let go: it runs those of two, then its own again,
    # whose kernels ran.
    assert step(one, 8) == step(one, 8) == []
    assert step(one, 8) == [(*one, [8], [])]
    assert forms.num_full_graphs(holder) == memory_is_kept_for
    fresh = manager()
    assert len([*forms.each([None], fresh)]) == 3, "all go with what upstream replaces"
    forms.choose(*one)
    assert on(switches) == ONE and not fresh.graphs


def test_a_larger_graph_stands_in_for_one_that_few_steps_want(
    manager: Callable[[], CudaGraphManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same kind and of at most twice the size; the steps that still come record it."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # there is none here
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    forms, _ = made(switches_of())
    full, pieces, none = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
    holder = manager()

    def capture(**kwargs: object) -> None:
        for desc in holder._capture_descs.get(full, []) if holder.records else []:
            holder.graphs[desc] = nn.Linear(1, 1)  # type: ignore[assignment]
        holder._graphs_captured = True

    forms.recorder = capture
    for _ in forms.each([None], holder):
        capture()

    def step(wants: tuple[bool, frozenset[int]], tokens: int, uniform: bool) -> Any:
        """Which graph it runs: its kind and size."""
        forms.choose(*wants)
        desc = holder.dispatch(tokens, tokens, 1 if uniform else None, 0)
        runs = forms.need_graph(desc, lambda: None)
        assert runs.num_reqs == (runs.num_tokens if runs.cg_mode == full else None)
        assert runs.cg_mode != full or runs in holder.graphs
        return runs.cg_mode, runs.num_tokens

    most, half, less = 512, 256, 224
    for wants in (CAPTURES, STEERS):
        for _ in range(STAND_INS + 1):  # beside the last of them it warms up
            assert step(wants, half, True) == (full, most)
        for kind in (none, full):
            found = step(wants, less, True)
            assert found == (kind, less), "the largest is more than twice its size"
        assert step(wants, half, True) == step(wants, half, True) == (full, half)
        # Now there is one closer by for those smaller.
        assert step(wants, 192, True) == (full, less)
        assert step(wants, 128, True) == (full, less)
        assert [step(wants, 96, True) for _ in range(2)] == [(none, 96), (full, 96)]
        assert step(wants, most, True) == (full, most)
    for _ in range(STAND_INS):
        assert step(CAPTURES, half, False) == (pieces, most), "graphs of forwards are no pieces"
    assert step(CAPTURES, half, False) == (none, half)
    assert step(CAPTURES, half, False) == (pieces, half)
    assert step(CAPTURES, 128, False) == (pieces, half)


def test_memory_of_all_graphs_is_measured(manager: Callable[[], CudaGraphManager]) -> None:
    """When upstream asks how much they take, it records all that it would."""
    forms, _ = made(switches_of())
    holder = manager()
    holder._max_full_descs_to_capture = 2
    found = [planned(holder, CUDAGraphMode.FULL) for _ in forms.each([None], holder)]
    assert found == [SIZES, coarse(SIZES), coarse(SIZES)]


def test_graphs_of_pieces_are_recorded_with_captures() -> None:
    """V1 goes through modes and sizes itself: what hangs off the code that two forms have is
    recorded once, while it captures."""
    switches = switches_of()
    forms, layer = made(switches)
    wrapper: Any = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
    wrapper.concrete_cudagraph_entries = {}
    items = [(CUDAGraphMode.PIECEWISE, [8]), (CUDAGraphMode.FULL, [4])]
    seen = [(tapped(layer), on(switches), item) for item in forms.each(items, wrapper)]
    plain, captures = [(False, ALL, i) for i in items], [(*CAPTURES, i) for i in items]
    assert seen == [*plain, *captures, (*STEERS, items[1])]
    assert [*forms.each(items)] == 2 * items, "nothing is compiled for the third"


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=80, unique=True))
def test_fewer_sizes_pad_little(sizes: list[int]) -> None:
    kept = coarse(sizes)
    assert kept == sorted(kept) and set(kept) <= set(sizes)
    for size in sizes:
        assert min(k for k in kept if k >= size) <= 1.25 * size


def test_upstreams_sizes_are_halved() -> None:
    assert len(SIZES) == 51 and len(coarse(SIZES)) == 23
    assert coarse([1, 100, 200]) == [1, 100, 200]


def test_batch_invariance_has_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """There results must not depend on what other requests ask for, not even by rounding."""
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    switches = switches_of()
    forms, layer = made(switches)
    assert forms.num_graphs(full=True) == forms.num_graphs(full=False) == 1
    forms.choose(*NEITHER)
    assert tapped(layer) and forms.tapped and on(switches) == NONE
    assert list(forms.each((1, 2))) == [1, 2]
    assert on(switches) == ALL
