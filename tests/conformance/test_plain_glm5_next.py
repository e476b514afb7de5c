# SPDX-License-Identifier: Apache-2.0
"""The formulas that a GPU run of GLM-5-Next is compared with (`tests.gpu.hyper`) are transformers':
every point of every layer, in float32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

from tests.gpu.hyper_models import glm5_next
from tests.gpu.hyper_models.glm5_next import GLM5Next
from tests.gpu.hyper_models.plain import LAYERS, VOCAB, Site

pytestmark = pytest.mark.full

LIMIT, APART = 1e-5, 1e-3
"""Relative L2 of the worst row of a lane: of the same formulas, and the least of others."""


def model_of(plain: GLM5Next) -> Glm5NextTextModel:
    """Transformers' model with the weights of `plain`."""
    told = {k: v for k, v in plain.config.items() if k not in ("architectures", "model_type")}
    config = transformers.Glm5NextTextConfig(**told)
    weights = dict[str, torch.Tensor]()
    for name, weight in plain.weights.items():
        name = re.sub(r"hc_(attn|ffn)_(fn|base|scale)", r"\1_hc.\2", name.removeprefix("model."))
        name = re.sub(r"self_attn\.(f_|A_log|dt_bias)", r"self_attn.forget_gate.\1", name)
        weights[name] = weight
    for layer in range(LAYERS):
        at = f"layers.{layer}.self_attn."
        each = [weights.pop(f"{at}{name}_conv1d.weight") for name in "qkv"]
        weights[f"{at}conv1d.weight"] = torch.cat(each)
    del weights["lm_head.weight"]
    model = Glm5NextTextModel(config).float().eval()
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def run(model: Glm5NextTextModel, tokens: list[int]) -> tuple[dict[Site, Any], torch.Tensor]:
    """Rows of every site, [n, lanes, hidden], and what the head reads, [n, hidden]."""
    rows = dict[Site, Any]()

    def before(site: Site, _: nn.Module, args: Any, named: dict[str, Any]) -> None:
        rows[site] = (args[0] if args else named["hidden_states"])[0].clone()

    def after(site: Site, _: nn.Module, args: Any, out: Any) -> None:
        rows[site] = (out[0] if isinstance(out, tuple) else out)[0].clone()

    for layer, block in enumerate(model.layers):
        first = partial(before, ("pre_attn", layer))
        block.register_forward_pre_hook(first, with_kwargs=True)
        second = partial(before, ("post_attn", layer))
        block.get_submodule("ffn_hc").register_forward_pre_hook(second, with_kwargs=True)
        block.register_forward_hook(partial(after, ("post_block", layer)))
    final = model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    return rows, final


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(9e9).max())


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[GLM5Next]:
    GLM5Next.save(tmp_path)
    yield GLM5Next(tmp_path)


def test_plain_formulas_are_those_of_transformers(
    plain: GLM5Next, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, VOCAB, (41,), generator=torch.Generator().manual_seed(0)).tolist()
    rows, final = run(model_of(plain), tokens)
    mine, log_probs = plain.run(tokens)
    assert mine.keys() == rows.keys() and len(rows) == 3 * LAYERS
    assert max(worst(mine[site], rows[site]) for site in rows) < LIMIT
    assert worst(log_probs, plain.log_probs(final)) < LIMIT

    # Formulas that mix otherwise what skips a sub-layer are others.
    monkeypatch.setattr(glm5_next, "ROUNDS", glm5_next.ROUNDS - 1)
    mine, log_probs = plain.run(tokens)
    assert min(worst(mine[site], rows[site]) for site in rows if site != ("pre_attn", 0)) > APART
    assert worst(log_probs, plain.log_probs(final)) > APART
