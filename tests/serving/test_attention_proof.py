# SPDX-License-Identifier: Apache-2.0
"""The start-up proof of attention weights: it passes, and each fault of the reader is found by it,
in every layer that the fault concerns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import ROOT
from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import unread
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.worker.attention import keys as layer_reader
from vllm.v1.interventions.worker.attention.keys import LayerReader
from vllm.v1.interventions.worker.attention.latent import LatentReader
from vllm.v1.interventions.worker.attention.pages import Sight, sight_of
from vllm.v1.interventions.worker.check.taps import check_worker
from vllm.v1.interventions.worker.focus.table import FocusedAttention

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="a CPU without AMX: upstream has no tiles there"
)

WRONG_SIGHTS: dict[str, Callable[[Sight], Sight]] = {
    "no soft-cap": lambda s: s._replace(cap=0.0),
    "no sink": lambda s: s._replace(sinks=None),
    "no window": lambda s: s._replace(window=0),
    "window off by one": lambda s: s._replace(window=s.window + 1 if s.window else 0),
    "scale off by 1 %": lambda s: s._replace(scale=s.scale * 1.01),
}
_rows = LayerReader.rows


def off_by_one(
    self: LayerReader, pages: torch.Tensor, request: int, head: int, stop: int
) -> torch.Tensor:
    rows = _rows(self, pages, request, head, stop)
    return rows.roll(1, 0) if pages is self.pages.keys else rows


def of_other_heads(
    self: LayerReader, pages: torch.Tensor, request: int, head: int, stop: int
) -> torch.Tensor:
    other = (head + 1) % pages.shape[1] if pages is self.pages.keys else head
    return _rows(self, pages, request, other, stop)


def of_another_request(
    self: LayerReader, pages: torch.Tensor, request: int, head: int, stop: int
) -> torch.Tensor:
    return _rows(self, pages, request + (pages is self.pages.keys) * 2, head, stop)


_attend = FocusedAttention.attend


def a_key_too_few(self: FocusedAttention, *rows: torch.Tensor | None) -> None:
    self._tokens.positions -= 1
    _attend(self, *rows)  # type: ignore[arg-type]
    self._tokens.positions += 1


FOCUSED: dict[str, Any] = {"enable_steering": True, "steering_families": ["add", "focus"]}


def proved(tiny_models: TinyModels, name: str, **options: Any) -> LLM:
    """An engine that reads attention, which its start-up proof allowed."""
    reads: dict[str, Any] = {"capture_consumers": ["inline"], "capture_points": ["q", "z"]}
    return make_llm(tiny_models.path(name), **reads, **options, **tiny_models.row(name).engine)


WRONG_ROWS = [off_by_one, of_other_heads, of_another_request]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_proof(name: str, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = proved(tiny_models, name)

    def unread() -> set[int]:
        return _unread(llm)

    assert unread() == set(), "as it was at the start"
    layers = _sights(llm)
    assert any(sight.window for sight in layers.values())
    found = {}
    for fault, wrong in WRONG_SIGHTS.items():
        concerned = {layer for layer, sight in layers.items() if wrong(sight) != sight}
        with monkeypatch.context() as patch:
            patch.setattr(layer_reader, "sight_of", lambda m, f=wrong: f(sight_of(m)))
            found[fault] = unread()
        assert found[fault] == concerned, fault
    for wrong_rows in WRONG_ROWS:
        with monkeypatch.context() as patch:
            patch.setattr(LayerReader, "rows", wrong_rows)
            assert unread() == set(layers), wrong_rows
    assert len([f for f in found.values() if f]) == 4, "each model lacks one of them"
    assert unread() == set()
    shut_down(llm)


@pytest.mark.v2
def test_proof_beside_layers_with_a_state(tiny_models: TinyModels) -> None:
    """Blocks are large there, so the model's longest sequence bounds the keys of the proof, and a
    state is where the last key is."""
    llm = proved(tiny_models, "granitemoehybrid")
    assert len(_sights(llm)) == 2
    assert _unread(llm) == set()
    shut_down(llm)


_FIRST = """
import sys
from pathlib import Path
from tests.conformance.engine import engine, prepare_environment
prepare_environment("v1")
with engine(Path(sys.argv[1]), dtype="bfloat16", enable_steering=True) as llm:
    print("started")
"""


@needs_amx
def test_the_first_attention_of_a_process_has_few_tokens(tiny_models: TinyModels) -> None:
    """Nothing before the start-up check may have asked for AMX: an engine in bfloat16 starts."""
    command = [sys.executable, "-c", _FIRST, str(tiny_models.path("llama"))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and "started" in run.stdout, run.stderr[-4000:]


@needs_amx
def test_proof_of_tiles(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes for pages in the tiles of AMX, also with focus; other orders are noticed."""
    llm = proved(tiny_models, "llama", **FOCUSED, dtype="bfloat16")
    layers = _sights(llm)

    def order(worker: Any) -> set[str]:
        return {m.isa for m in worker.worker.model_runner.interventions.attention.values()}

    assert llm.collective_rpc(order) == [{"amx"}]
    assert _unread(llm) == set()
    for wrong_rows in WRONG_ROWS:
        with monkeypatch.context() as patch:
            patch.setattr(LayerReader, "rows", wrong_rows)
            assert _unread(llm) == set(layers), wrong_rows
    shut_down(llm)


def test_proof_of_focus(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the op makes is not what its program says: captured weights have that."""
    llm = proved(tiny_models, "gemma2", **FOCUSED)
    layers = _sights(llm)
    assert _unread(llm) == set()
    with monkeypatch.context() as patch:
        patch.setattr(FocusedAttention, "attend", lambda *args: None)
        assert _unread(llm) == set(layers)
    with monkeypatch.context() as patch:
        patch.setattr(FocusedAttention, "attend", a_key_too_few)
        assert _unread(llm) == set(layers)
    assert _unread(llm) == set()
    shut_down(llm)


_for_pages = LatentReader.for_pages


def without_rotated(self: LatentReader, queries: torch.Tensor, heads: Any) -> torch.Tensor:
    queries = queries.clone()
    queries[..., -64:] = 0
    return _for_pages(self, queries, heads)


def absorbed_by_others(self: LatentReader, queries: torch.Tensor, heads: Any) -> torch.Tensor:
    return _for_pages(self, queries, [*heads[1:], heads[0]])


def scaled(self: LatentReader, queries: torch.Tensor, heads: Any) -> torch.Tensor:
    return _for_pages(self, queries * 1.01, heads)


def test_proof_of_a_latent_cache(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes for MLA, and notices what a reader may get wrong there; focus is refused."""
    llm = proved(tiny_models, "deepseek_v2", **FOCUSED)
    layers = set(range(models.LAYERS))
    assert _unread(llm) == set()
    for wrong in (without_rotated, absorbed_by_others, scaled):
        with monkeypatch.context() as patch:
            patch.setattr(LatentReader, "for_pages", wrong)
            assert _unread(llm) == layers, wrong
    for wrong_rows in (off_by_one, of_another_request):
        with monkeypatch.context() as patch:
            patch.setattr(LayerReader, "rows", wrong_rows)
            assert _unread(llm) == layers, wrong_rows
    assert _unread(llm) == set()
    steering = [{"op": "focus", "layers": [1], "span": [0], "factor": 2.0}]
    says = r"steering\[0\]\.layers: layer 1 cannot be focused: attention over a latent cache"
    with pytest.raises(ValueError, match=says):
        prompt = TokensPrompt(prompt_token_ids=[1, 2, 3])
        llm.generate(prompt, SamplingParams(max_tokens=2, steering=steering), use_tqdm=False)
    shut_down(llm)


def _unread(llm: Any) -> set[int]:
    """The layers that fail it."""
    shapes: list[Any] = llm.collective_rpc(check_worker)
    assert isinstance(shapes[0], TapShape)
    return set(unread(shapes[0]))


def _sights(llm: Any) -> dict[int, Sight]:
    def read(worker: Any) -> dict[int, Sight]:
        attention = worker.worker.model_runner.interventions.attention
        return {layer: sight_of(module) for layer, module in attention.items()}

    [made] = llm.collective_rpc(read)
    assert isinstance(made, dict)
    return made
