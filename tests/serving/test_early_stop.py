# SPDX-License-Identifier: Apache-2.0
"""Engines that end after a layer: their rows are those of the whole model, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance.engine import engine
from tests.conformance.runner import prompts
from tests.http.server import save_model
from tests.pilot.test_dataset_capture import ENGINE_OPTIONS
from vllm import SamplingParams
from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.cli.capture import run
from vllm.entrypoints.cli.capture.main import CaptureSubcommand
from vllm.entrypoints.cli.steering.start import start_engine
from vllm.inputs import TokensPrompt
from vllm.pilot import dataset
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from vllm import LLM, RequestOutput
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.interventions.plan import Site

pytestmark = pytest.mark.full

STOP = 1
Rows = list[dict["Site", torch.Tensor]]


def ask(llm: LLM, last: int) -> list[RequestOutput]:
    """All points of the stream up to layer `last`, at all positions of some prompts."""
    shape = llm.llm_engine.vllm_config.tap_shape
    assert shape is not None
    hooks: dict[str, list[int]] = {}
    for layer in range(last + 1):
        for point in STREAM_POINTS:
            if point in shape.layers[layer].points:
                hooks.setdefault(point, []).append(layer)
    capture = {"inline": {"hooks": hooks, "positions": "all_prompt"}}
    params = SamplingParams(temperature=0, max_tokens=1, capture=capture)
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts()]
    return llm.generate(asked, params, use_tqdm=False)


def rows_of(outputs: list[RequestOutput]) -> Rows:
    results = [(output.capture_results or {})["inline"] for output in outputs]
    return [{site: rows.values for site, rows in r.payload.items()} for r in results]


def same(a: Rows, b: Rows) -> bool:
    """Tell whether all rows are equal bit for bit."""
    assert [set(one) for one in a] == [set(one) for one in b]
    return all(
        torch.equal(one[site], other[site]) for one, other in zip(a, b, strict=True) for site in one
    )


def held(llm: LLM) -> dict[str, Any]:
    """What the worker has: the layers that are attended, of the whole model's, and the head."""

    def look(model: torch.nn.Module) -> Mapping[str, Any]:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        modules = list(model.modules())
        return {
            "attentions": sum(isinstance(m, AttentionLayerBase) for m in modules),
            "heads": sum(isinstance(m, ParallelLMHead) for m in modules),
            "parameters": sum(p.numel() for p in model.parameters()),
        }

    config = llm.llm_engine.vllm_config
    caches = len(config.compilation_config.static_forward_context)
    return {**llm.apply_model(look)[0], "caches": caches}


@pytest.mark.parametrize(
    "name",
    [pytest.param("llama", marks=pytest.mark.v2), "gpt2", "gemma2", "cohere2", "deepseek_v2"],
)
def test_rows_are_the_whole_models(name: str, tiny_models: TinyModels) -> None:
    """Heads of their own and tied ones, fused and summed streams, pages and latent caches."""
    path, options = tiny_models.path(name), dict(tiny_models.row(name).engine)
    with engine(path, capture_consumers=["inline"], **options) as whole:
        expected, before = ask(whole, STOP), held(whole)
        later = rows_of(ask(whole, STOP + 1))
    stopped = {"capture_consumers": ["inline"], "capture_stop_after": STOP, **options}
    with engine(path, **stopped) as llm:
        outputs, after = ask(llm, STOP), held(llm)
    assert same(rows_of(outputs), rows_of(expected))
    assert ("post_block", STOP + 1) in later[0], "the whole model has more layers"
    assert after["caches"] < before["caches"] and after["attentions"] < before["attentions"]
    assert after["heads"] == 0 and after["parameters"] < before["parameters"]
    for output, other in zip(outputs, expected, strict=True):
        assert (output.outputs[0].token_ids, output.outputs[0].text) == ([], "")
        assert len(other.outputs[0].token_ids) == 1


def test_the_command_ends_early_by_itself(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is generated; its rows are those of the whole model."""
    model = save_model(tiny_models, tmp_path / "model")
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{i} apples"}}\n' for i in range(5)))
    started: list[int | None] = []

    def start(engine_args: EngineArgs) -> LLM:
        started.append(engine_args.capture_stop_after)
        return start_engine(engine_args)

    monkeypatch.setattr(run, "start_engine", start)

    def rows(name: str, *more: str) -> torch.Tensor:
        out = tmp_path / name
        asked = ["--data", str(tmp_path / "d.jsonl"), "--out", str(out), "--yes", *more]
        parser = FlexibleArgumentParser()
        CaptureSubcommand().subparser_init(parser.add_subparsers())
        hooks = ["--hooks", f"post_block:{STOP}", "--positions", "all_prompt"]
        args = parser.parse_args(["capture", "run", str(model), *asked, *hooks, *ENGINE_OPTIONS])
        with pytest.raises(SystemExit) as ended:
            CaptureSubcommand.cmd(args)
        assert ended.value.code == 0
        activations = dataset.Activations(str(out))
        texts = [line["text"] for line in activations.manifest()]
        assert any(texts) == ("--max-tokens" in more)
        return activations.rows("post_block", STOP).tensor()

    stopped = rows("stopped")
    assert torch.equal(stopped, rows("whole", "--whole-model"))
    assert len(rows("generated", "--max-tokens", "2")) == len(stopped)
    assert started == [STOP, None, None]
