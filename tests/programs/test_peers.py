# SPDX-License-Identifier: Apache-2.0
"""examples/peers: what other tools' classes return, against transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from examples.peers import hook_llm, probe_hook
from examples.peers.hook_llm import HookLLM, read_vector, steering_of
from tests.conformance import models
from tests.conformance.engine import shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE
from tests.http.server import save_model
from tests.peers.calls import Call, Rows, U, V, add, along
from tests.peers.test_coming_from import streams
from tests.support.serving import relative
from vllm import SamplingParams

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPTS = ["Today I went", "I"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
ENGINE: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 96, "seed": 0,
    "kv_cache_memory_bytes": 1 << 24, "disable_log_stats": True,
}  # fmt: skip
LAYER = 1


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_models, tmp_path_factory.mktemp("peers") / "model")


@pytest.fixture(scope="module")
def reference(tiny_models: TinyModels) -> Any:
    return models.load(tiny_models.row("llama"), tiny_models.path("llama")).double()


def fed(output: Any) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]


@pytest.fixture(scope="module")
def probe(model: Path) -> Iterator[probe_hook.LLM]:
    llm = probe_hook.LLM(str(model), layers=["all"], include_prefill=True, **ENGINE)
    yield llm
    shut_down(llm.llm)


def test_states_of_prompt_and_generation(probe: probe_hook.LLM, reference: Any) -> None:
    outputs = probe.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
    for output in outputs:
        want = streams(reference, fed(output), Call())
        length = len(output.prompt_token_ids or ())
        assert list(output.hidden_states) == list(range(models.LAYERS))
        for layer, states in output.hidden_states.items():
            rows = want["post_block", layer].float()
            assert states.shape == (3, models.HIDDEN)
            assert relative(states, rows[length:]) <= READ_TOLERANCE
            assert relative(states, rows[length - 1 : -1]) >= LEAST_MOVE
            before = output.prefill_hidden_states[layer]
            assert relative(before, rows[:length]) <= READ_TOLERANCE
        assert output.finished
    (one,) = probe.generate("I", SamplingParams(max_tokens=1), use_tqdm=False)
    assert not one.hidden_states and one.prefill_hidden_states
    with pytest.raises(ValueError, match="capture, n"):
        probe.generate("I", SamplingParams(n=2))


def test_states_come_with_the_tokens(model: Path) -> None:
    async def watch() -> list[tuple[int, int]]:
        engine = probe_hook.AsyncLLM(str(model), layers=[LAYER], **ENGINE)
        try:
            params = SamplingParams(**GREEDY)
            seen = [
                (len(output.outputs[0].token_ids), len(output.hidden_states[LAYER]))
                async for output in engine.generate(PROMPTS[0], params, "one")
            ]
        finally:
            engine.shutdown()
        return seen

    seen = asyncio.run(watch())
    assert seen[-1] == (4, 3)
    assert seen == sorted(seen) and all(rows == tokens - 1 for tokens, rows in seen)


def test_nothing_to_read_is_refused() -> None:
    for layers, options, named in (([], {}, "layers"), ([1], {"include_decode": False}, "include")):
        with pytest.raises(ValueError, match=named):
            probe_hook.LLM("none", layers=layers, **options)


def config(folder: Path, **sections: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(sections))
    return path


def test_hook_reads(model: Path, reference: Any, tmp_path: Path) -> None:
    path = config(tmp_path, hidden_states={"layers": [1, 3], "mode": "all_tokens"})
    llm = HookLLM(str(model), hook_llm.PROBE, "hidden_states", path, **ENGINE)
    with pytest.raises(ValueError, match="nothing was read"):
        llm.analyze()
    outputs = llm.generate(PROMPTS, **GREEDY)
    found = llm.analyze()["hidden_states"]
    for reduce, made in (
        ("none", lambda rows: rows),
        ("mean", lambda rows: rows.mean(dim=0)),
        ("norm", lambda rows: rows.norm(dim=-1)),
    ):
        by_prompt = llm.analyze({"reduce": reduce})["hidden_states"]
        for states, output in zip(by_prompt, outputs, strict=True):
            want = streams(reference, fed(output), Call())
            prompt = slice(len(output.prompt_token_ids or ()))
            assert list(states) == ["model.layers.0", "model.layers.2"]
            for layer in (0, 2):
                rows = made(want["post_block", layer][prompt].float())
                assert relative(states[f"model.layers.{layer}"], rows) <= READ_TOLERANCE
    assert relative(found[0]["model.layers.0"], found[0]["model.layers.2"]) >= LEAST_MOVE
    llm.generate(["I"], use_hook=False, **GREEDY)
    assert len(llm.analyze()["hidden_states"]) == 2
    with pytest.raises(ValueError, match="analyzer_spec"):
        llm.analyze({"reduce": "max"})
    with pytest.raises(NotImplementedError, match=r"docs/attention\.md"):
        llm.analyze({"input_range": ((0, 1), (2, 3))})
    shut_down(llm.llm)


def test_hook_steers(model: Path, reference: Any, tmp_path: Path) -> None:
    """Both methods, of directions of length 1 and of others."""
    steering = {"method": "add_vector", "optimal_layer": LAYER, "coefficient": 0.5}
    torch.save({"dir": V.numpy(), "avg_proj": np.float32(6.0)}, tmp_path / "v.pt")
    torch.save({"dir": U, "avg_proj": 6.0}, tmp_path / "u.pt")

    def pinned(direction: torch.Tensor) -> Any:
        def edit(rows: Rows) -> Rows:
            return rows + (6.0 - along(rows, direction)) * direction.double()

        return edit

    def section(method: str, name: str) -> dict[str, Any]:
        return {**steering, "method": method, "vector_path": str(tmp_path / name)}

    def errors(output: Any, call: Call) -> list[float]:
        """Of the log-probabilities of the tokens that were generated."""
        rows = streams(reference, fed(output), call)["post_block", models.LAYERS - 1]
        with torch.no_grad():
            want = reference.lm_head(reference.model.norm(rows)).log_softmax(-1)[-4:]
        ids = output.outputs[0].token_ids
        return [
            abs(said[token].logprob - float(at[token]))
            for said, token, at in zip(output.outputs[0].logprobs, ids, want, strict=True)
        ]

    path = config(tmp_path, steering=section("add_vector", "v.pt"))
    llm = HookLLM(str(model), hook_llm.STEER, config_file=path, **ENGINE)
    assert llm.tokenizer is not None and llm.llm_engine is llm.llm.llm_engine
    (output,) = llm.generate([PROMPTS[0]], logprobs=1, **GREEDY)
    outputs = [(output, add(0.5))]
    for name, direction in (("v.pt", V), ("u.pt", U)):
        fields = steering_of({"steering": section("adjust_rs", name)})
        params = SamplingParams(logprobs=1, **GREEDY, **fields)
        (output,) = llm.generate([PROMPTS[0]], params, use_hook=False)
        outputs.append((output, pinned(direction)))
    for output, does in outputs:
        assert max(errors(output, Call(does={LAYER: does}))) <= 1e-3
        assert max(errors(output, Call())) >= 0.05
    shut_down(llm.llm)


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_what_hook_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("probe_hook_qk", "attn_tracker", "core_reranker"):
        with pytest.raises(NotImplementedError, match="attention"):
            HookLLM("none", analyzer_name=name)
    with pytest.raises(NotImplementedError, match="important_heads"):
        HookLLM("none", config_file=config(tmp_path, params={"important_heads": [[1, 2]]}))
    with pytest.raises(ValueError, match="worker_name"):
        HookLLM("none", "other")
    torch.save({"dir": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="vector_path"):
        read_vector(tmp_path / "evil.pt")
    assert "unpickled" not in capsys.readouterr().out
