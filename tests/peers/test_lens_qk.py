# SPDX-License-Identifier: Apache-2.0
"""examples/peers/lens_qk.py: vLLM-Lens's own function, as it was published, makes transformers'
attention weights of queries and keys that were captured here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.peers.lens_qk import activations
from tests.conformance.engine import engine
from tests.peers.calls import GENERATED, PROMPT
from tests.peers.packages import folder_of
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

LAYERS = [1, 3]


def test_patterns(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LENS_DISABLE", "1")
    monkeypatch.syspath_prepend(str(folder_of("lens")))
    attention = importlib.import_module("vllm_lens.attention")
    path = tiny_models.path("llama")
    asked = {"inline": {"hooks": {"q": LAYERS, "k": LAYERS}, "positions": "all"}}
    params = SamplingParams(
        temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, capture=asked
    )
    with engine(path, capture_consumers=["inline"], capture_points=["q", "k"]) as llm:
        prompt = TokensPrompt(prompt_token_ids=PROMPT)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.capture_results is not None
    rows = output.capture_results["inline"].payload
    token_ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        want = model(torch.tensor([token_ids]), output_attentions=True).attentions
    made = activations(rows, scale=rows["q", LAYERS[0]].values.shape[-1] ** -0.5)
    for layer in LAYERS:
        got = attention.attention_patterns(made, layer=layer)
        assert got.shape == want[layer][0].shape == (got.shape[0], len(token_ids), len(token_ids))
        assert (got - want[layer][0]).abs().max() <= 1e-4
    other = attention.attention_patterns(made, layer=LAYERS[0])
    assert (other - want[LAYERS[1]][0]).abs().max() >= 1e-2  # the twin
