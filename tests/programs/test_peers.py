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
from examples.peers.mia_llm import MiaLLM
from tests.conformance import models
from tests.conformance.engine import shut_down
from tests.conformance.heads import recorded
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE
from tests.http.server import save_model
from tests.peers.call import Call, Rows, U, V, add, along, streams
from tests.support.serving import relative
from vllm import SamplingParams
from vllm.v1.capture import reader

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


def test_the_last_tokens_alone(model: Path, reference: Any) -> None:
    llm = probe_hook.LLM(
        str(model), layers=[LAYER], last_prefill_token=True, last_decode_token=True, **ENGINE
    )
    for output in llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False):
        rows = streams(reference, fed(output), Call())["post_block", LAYER].float()
        last = len(output.prompt_token_ids or ()) - 1
        for states, position in (
            (output.prefill_hidden_states[LAYER], last),
            (output.hidden_states[LAYER], len(rows) - 1),
        ):
            assert relative(states, rows[position][None]) <= READ_TOLERANCE
            assert relative(states, rows[position - 1][None]) >= LEAST_MOVE
    shut_down(llm.llm)


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
    with pytest.raises(ValueError, match="reduce"):
        llm.analyze({"reduce": "max"})
    with pytest.raises(ValueError, match="input_range"):
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


def attended(reference: Any, token_ids: list[int]) -> np.ndarray:
    """[layers, queries, heads, keys], of transformers' eager attention."""
    layers = list(reference.model.layers)
    reference.set_attn_implementation("eager")
    with recorded(reference, layers) as heads, torch.no_grad():
        reference(torch.tensor([token_ids]))
    return np.stack([heads["attn", layer].numpy() for layer in range(len(layers))])


def test_hook_tracks(model: Path, reference: Any, tmp_path: Path) -> None:
    """The attention tracker: ranges are slices, of all prompts or of each."""
    path = config(tmp_path, params={"important_heads": [[3, 1], [1, 2]]}, hookq={})
    llm = HookLLM(str(model), hook_llm.QK, "attn_tracker", path, **ENGINE)
    prompts = ["Today I went", "I love this place."]
    outputs = llm.generate(prompts, **GREEDY)
    ranges = [((1, 5), (-4, -1)), ((0, 6), (7, 12))]
    slices = [[slice(*one) for one in both] for both in ranges]
    for form in ("sum", "max", "sum_normalize", "max_normalize"):
        found = llm.analyze({"input_range": ranges, "attn_func": form})["score"]
        for score, output, both in zip(found, outputs, slices, strict=True):
            weights = attended(reference, list(output.prompt_token_ids or ()))[:, -1]
            scores = {}
            for heads in (((3, 1), (1, 2)), ((3, 2), (1, 1))):
                w = np.stack([weights[layer, head] for layer, head in heads])
                on, off = (w[:, one] for one in both)
                s = on.sum(-1) if form.startswith("sum") else on.max(-1)
                s = s / (on.sum(-1) + off.sum(-1) + 1e-8) if "_" in form else s
                scores[heads] = s.mean()
            want, other = scores.values()
            assert score == pytest.approx(want, abs=1e-5)
            assert abs(score - other) > 1e-3, "the twin: other heads"
    assert llm.analyze({"input_range": ranges[0]})["score"][0] == pytest.approx(
        llm.analyze({"input_range": ranges, "attn_func": "sum_normalize"})["score"][0]
    )
    for spec, named in (
        ({"input_range": ranges[0], "attn_func": "mean"}, "attn_func"),
        ({"input_range": ranges[:1]}, "has 1, of 2"),
        ({"reduce": "none"}, "input_range"),
        ({"input_range": ((3, 3), (0, 2))}, "positions"),
    ):
        with pytest.raises(ValueError, match=named):
            llm.analyze(spec)
    shut_down(llm.llm)


def test_hook_reranks(model: Path, reference: Any, tmp_path: Path) -> None:
    """All heads of the layers of the important ones; spans have their ends."""
    path = config(tmp_path, params={"important_heads": [[0, 1], [2, 3]]})
    llm = HookLLM(str(model), hook_llm.QK, "core_reranker", path, **ENGINE)
    documents, places = "Some went home. Some love this place. ", [(0, 14), (16, 36)]
    outputs = llm.generate([documents + "Who went?", documents + "N/A"], **GREEDY)
    specs = {"query_spec": (places, 38, 42, 46), "na_spec": (places, 38, 38, 40)}
    found = llm.analyze(specs)

    def received(output: Any, first: int, last: int, layers: list[int]) -> np.ndarray:
        weights = attended(reference, list(output.prompt_token_ids))
        made: np.ndarray = weights[layers, first : last + 1].sum((0, 2)).mean(0)
        return made

    def scores(layers: list[int], calibrated: bool = True) -> list[float]:
        c = received(outputs[0], 38, 46, layers)[:38].copy()
        if calibrated:
            c -= received(outputs[1], 38, 40, layers)[:38]
        parts = [torch.from_numpy(c[first : last + 1]) for first, last in places]
        return [float(p[p >= p.mean() - 2 * p.std()].sum()) for p in parts]

    np.testing.assert_allclose(found["scores"], scores([0, 2]), atol=1e-5)
    for twin in (scores([1, 2]), scores([0, 2], calibrated=False)):
        assert np.abs(np.array(found["scores"]) - twin).max() > 1e-3
    assert found["ranking"] == np.argsort(-np.array(found["scores"])).tolist()
    for wrong, named in (
        ({"query_spec": specs["query_spec"]}, "na_spec"),
        ({**specs, "na_spec": (places, 38, 41, 40)}, "after_instruction"),
        ({**specs, "na_spec": (places[:1], 38, 38, 40)}, "documents"),
    ):
        with pytest.raises(ValueError, match=named):
            llm.analyze(wrong)
    llm.generate(["I"], cleanup=False, **GREEDY)
    with pytest.raises(ValueError, match="3 were read"):
        llm.analyze(specs)
    shut_down(llm.llm)


def test_mia_has_probes(model: Path, reference: Any, tmp_path: Path) -> None:
    """q and k, as the points are; what is asked without the hook has none."""
    path = config(
        tmp_path, params={"important_heads": [[2, 3]]}, hookq={"hookq_mode": "last_token"}
    )
    llm = MiaLLM(str(model), "capture_qk", config_file=path, **ENGINE)
    for output in llm.generate(PROMPTS, **GREEDY):
        ids = list(output.prompt_token_ids or ())
        (name, rows), *rest = output.probes["qk"].items()
        assert (name, rest) == ("model.layers.2", [])
        assert rows["q"].shape == (1, 4, 32) and rows["k"].shape == (len(ids), 2, 32)
        keys = rows["k"].repeat_interleave(2, dim=1)
        weights = (torch.einsum("qhd,khd->hk", rows["q"], keys) / 32**0.5).softmax(-1)
        want = attended(reference, ids)
        assert np.abs(weights.numpy() - want[2, -1]).max() <= 1e-4
        assert len(ids) == 1 or np.abs(weights.numpy() - want[1, -1]).max() >= 0.01
    (output,) = llm.generate(["I"], use_hook=False, **GREEDY)
    assert output.probes == {}
    with pytest.raises(ValueError, match="q and k have no analyzer"):
        llm.analyze()
    with pytest.raises(ValueError, match="save_to_disk"):
        llm.generate(["I"], save_to_disk=True)
    shut_down(llm.llm)


def test_mia_writes(model: Path, reference: Any, tmp_path: Path) -> None:
    """What is on disk, by run and number of the prompt, is what is in memory."""
    path = config(tmp_path, hidden_states={"layers": [2, 4], "mode": "all_tokens"})
    llm = MiaLLM(
        str(model), "capture_hs", "hidden_states", path, hook_dir=tmp_path / "out", **ENGINE
    )
    inline = llm.generate(PROMPTS, **GREEDY)
    read = llm.analyze({"reduce": "norm"})["hidden_states"]
    stored = llm.generate(PROMPTS, save_to_disk=True, run_id="first", **GREEDY)
    assert [output.probes["request_id"] for output in stored] == ["0", "1"]
    captures = reader.open(str(tmp_path / "out"))
    for i, (one, other) in enumerate(zip(inline, stored, strict=True)):
        want = streams(reference, fed(one), Call())
        length = len(one.prompt_token_ids or ())
        assert other.probes["run_id"] == "first"
        assert all((tmp_path / "out" / name).is_file() for name in other.probes["paths"])
        for layer in (1, 3):
            rows = one.probes["hidden_states"][f"model.layers.{layer}"]
            assert relative(rows, want["post_block", layer][:length].float()) <= READ_TOLERANCE
            on_disk = captures.find(str(i), tag="first").rows("post_block", layer).values
            assert torch.equal(on_disk, rows) and on_disk.shape == (length, models.HIDDEN)
    again = llm.analyze({"reduce": "norm"})["hidden_states"]  # of what is on disk
    assert all(torch.equal(again[i][name], read[i][name]) for i in (0, 1) for name in read[i])
    with pytest.raises(ValueError, match="first/0 exists already"):
        llm.generate(["I"], save_to_disk=True, run_id="first", **GREEDY)
    with pytest.raises(ValueError, match="run_id"):
        llm.generate(["I"], run_id="first", **GREEDY)
    shut_down(llm.llm)


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_what_hook_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for worker, analyzer in (
        (None, "attn_tracker"), (hook_llm.PROBE, "core_reranker"), (hook_llm.QK, "hidden_states")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"analyzer_name: '{analyzer}' is not of"):
            HookLLM("none", worker, analyzer)
    for of in (HookLLM, MiaLLM):
        with pytest.raises(ValueError, match="worker_name"):
            of("none", "other")
    with pytest.raises(ValueError, match="hook_dir"):
        MiaLLM("none", "steer", hook_dir=tmp_path)
    for sections, named in (
        ({"params": {"important_heads": [[1, 2, 3]]}}, "important_heads"),
        ({"params": {"important_heads": []}}, "important_heads"),
        ({"hookq": {"hookq_mode": "first"}}, "hookq_mode"),
        ({"hookq": {"hookq_mode": "last_token"}}, "all_tokens"),
    ):
        with pytest.raises(ValueError, match=named):
            HookLLM("none", hook_llm.QK, "core_reranker", config(tmp_path, **sections))
    torch.save({"dir": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="vector_path"):
        read_vector(tmp_path / "evil.pt")
    assert "unpickled" not in capsys.readouterr().out
