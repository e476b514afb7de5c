# SPDX-License-Identifier: Apache-2.0
"""What a pooling model makes of a prompt, read from the same checkpoint under the generate runner:
the way that docs/capture.md names where it says that pooling models are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance.engine import engine
from tests.serving.test_capture_serving import add_tokenizer
from tests.support.serving import capture, prompt_of

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

TOLERANCE = 1e-5
PROMPTS = [prompt_of(40, 90), prompt_of(7, 91)]


def test_an_embedding_is_a_row(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The last one of `final`, normed; the one before it, or of the last layer, is another."""
    from vllm import SamplingParams

    path = tmp_path / "model"
    shutil.copytree(tiny_models.path("llama"), path)
    add_tokenizer(path)  # which pooling renders by
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    options: Any = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    with engine(path, **options) as llm:
        embedded = [torch.tensor(o.outputs.embedding) for o in llm.embed(prompts, use_tqdm=False)]
    both = capture("all_prompt", ("final", "post_block"), [-1])
    params = SamplingParams(max_tokens=1, detokenize=False, **both)
    with engine(path, capture_consumers=["inline"]) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for embedding, output in zip(embedded, outputs, strict=True):
        assert output.capture_results is not None
        payload = output.capture_results["inline"].payload
        rows = {point: torch.nn.functional.normalize(r.values) for (point, _), r in payload.items()}
        assert (rows["final"][-1] - embedding).norm() <= TOLERANCE
        assert (rows["final"][-2] - embedding).norm() > 0.1
        assert (rows["post_block"][-1] - embedding).norm() > 0.1
