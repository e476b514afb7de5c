# SPDX-License-Identifier: Apache-2.0
"""`output_qk` with `compat=["lens"]`: vLLM-Lens's own function, as it was published, makes of what
is answered the attention weights of transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.peers.packages import folder_of
from tests.support.serving import prompt_of
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = prompt_of(40, 9)
POINTS = ["post_block", "q", "k", "z"]
UNSAID = {
    "logits_soft_cap": 0.0,
    "sliding_window": [-1, -1],
    "alibi_slopes": None,
    "use_alibi_sqrt": False,
    "sinks": None,
}
"""What the metadata of a layer that has nothing of that say."""
SAYS = {
    "llama": set(),
    "gemma2": {"logits_soft_cap", "sliding_window"},
    "gpt_oss": {"sliding_window", "sinks"},
    "bloom": {"alibi_slopes"},
}
"""Model -> what those of one of its layers say at least."""


@pytest.fixture(scope="module")
def patterns() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LENS_DISABLE", "1")
        patch.syspath_prepend(str(folder_of("lens")))
        yield importlib.import_module("vllm_lens.attention").attention_patterns


@pytest.mark.parametrize("name", SAYS)
def test_patterns(tiny_models: TinyModels, patterns: Any, name: str) -> None:
    row, path = tiny_models.row(name), tiny_models.path(name)
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False,
        extra_args={"output_qk": True, "output_residual_stream": [1]},
    )  # fmt: skip
    llm = make_llm(path, compat=["lens"], capture_points=POINTS)
    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    shut_down(llm)
    given = output.activations
    assert given is not None
    token_ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
    assert given["residual_stream"].shape[:2] == (1, len(token_ids))
    metas = given["qk_meta"]
    said = [{key for key in UNSAID if meta[key] != UNSAID[key]} for meta in metas]
    assert set().union(*said) == SAYS[name]
    assert given["qk_layers"] == list(range(models.LAYERS))
    model = models.load(row, path)
    with torch.no_grad():
        weights = model(torch.tensor([token_ids]), output_attentions=True).attentions
    for layer in given["qk_layers"]:
        want = weights[layer][0]
        got = patterns(given, layer=layer)
        assert got.shape == want.shape == (len(want), len(token_ids), len(token_ids))
        assert (got - want).abs().max() <= 1e-4
        assert (got - weights[layer - 1][0]).abs().max() >= 1e-2  # the twin
        for key in said[layer]:  # the twin: each number that is said counts
            less = [{**meta, key: UNSAID[key]} for meta in metas]
            weighed = patterns({**given, "qk_meta": less}, layer=layer)
            assert (weighed - want).abs().max() >= 1e-3
