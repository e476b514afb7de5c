# SPDX-License-Identifier: Apache-2.0
"""The formulas that GPU runs of GLM-5-Next and Qwen4-Exp are compared with (`tests.gpu.hyper`) are
transformers': every point of every layer, in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextModel

from tests.gpu.hyper_models import glm5_next, qwen4_exp
from tests.gpu.hyper_models.glm5_next import GLM5Next
from tests.gpu.hyper_models.plain import LAYERS, VOCAB, Plain, Site
from tests.gpu.hyper_models.qwen4_exp import Qwen4Exp

pytestmark = pytest.mark.full

LIMIT, APART = 1e-5, 1e-3
"""Relative L2 of the worst row of a lane: of the same formulas, and the least of others."""


def options_of(plain: Plain) -> dict[str, Any]:
    return {k: v for k, v in plain.config.items() if k not in ("architectures", "model_type")}


def glm_of(plain: GLM5Next) -> nn.Module:
    """Transformers' GLM-5-Next with the weights of `plain`."""
    config = transformers.Glm5NextTextConfig(**options_of(plain))
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


def qwen_of(plain: Qwen4Exp) -> nn.Module:
    """Transformers' Qwen4-Exp with the weights of `plain`, and an indexer that leaves no token out:
    it has no model without one."""
    indexer = {"n_heads": 2, "kv_heads": 1, "head_dim": 128, "budget": 256, "compress_ratio": 4}
    told = options_of(plain) | {f"indexer_{name}": value for name, value in indexer.items()}
    config = transformers.Qwen4ExpTextConfig(**told)
    weights = {name.removeprefix("model."): weight for name, weight in plain.weights.items()}
    del weights["lm_head.weight"]
    for layer in range(LAYERS):
        at = f"layers.{layer}.mlp.experts."
        each = [
            [weights.pop(f"{at}{i}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for i in range(qwen4_exp.EXPERTS)
        ]
        weights[f"{at}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        weights[f"{at}down_proj"] = torch.stack([down for *_, down in each])
    model = Qwen4ExpTextModel(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(".indexer." in name for name in missing)
    return model


@torch.no_grad()
def run(
    model: nn.Module, tokens: list[int], second_half: str, lanes: int
) -> tuple[dict[Site, Any], torch.Tensor]:
    """Rows of every site, [n, lanes, hidden], and what the head reads, [n, hidden].

    Args:
        second_half: the part of a block that reads the lanes after attention.
    """
    rows = dict[Site, Any]()

    def keep(site: Site, found: torch.Tensor) -> None:
        rows[site] = found[0].reshape(len(tokens), lanes, -1).clone()

    def before(site: Site, _: nn.Module, args: Any, named: dict[str, Any]) -> None:
        keep(site, args[0] if args else named["hidden_states"])

    def after(site: Site, _: nn.Module, args: Any, out: Any) -> None:
        keep(site, out[0] if isinstance(out, tuple) else out)

    for layer, block in enumerate(model.get_submodule("layers").children()):
        first = partial(before, ("pre_attn", layer))
        block.register_forward_pre_hook(first, with_kwargs=True)
        second = partial(before, ("post_attn", layer))
        block.get_submodule(second_half).register_forward_pre_hook(second, with_kwargs=True)
        block.register_forward_hook(partial(after, ("post_block", layer)))
    final = model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    return rows, final


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(9e9).max())


def mix_less(patch: pytest.MonkeyPatch) -> None:
    """GLM-5-Next mixes otherwise what skips a sub-layer."""
    patch.setattr(glm5_next, "ROUNDS", glm5_next.ROUNDS - 1)


def add_less(patch: pytest.MonkeyPatch) -> None:
    """Qwen4-Exp's lanes get less of a sub-layer's output."""
    around = Qwen4Exp.around

    def less(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        one, factors = around(*given)
        return one, 0.99 * factors

    patch.setattr(Qwen4Exp, "around", less)


@pytest.mark.parametrize(
    ("kind", "theirs", "second_half", "others"),
    [
        (GLM5Next, glm_of, "ffn_hc", mix_less),
        (Qwen4Exp, qwen_of, "mlp_hyper_connection", add_less),
    ],
)
def test_plain_formulas_are_those_of_transformers(
    kind: type[Plain],
    theirs: Callable[[Any], nn.Module],
    second_half: str,
    others: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind.save(tmp_path)
    plain = kind(tmp_path)
    tokens = torch.randint(0, VOCAB, (41,), generator=torch.Generator().manual_seed(0)).tolist()
    rows, final = run(theirs(plain), tokens, second_half, plain.lanes)
    mine, log_probs = plain.run(tokens)
    assert mine.keys() == rows.keys() and len(rows) == 3 * LAYERS
    assert max(worst(mine[site], rows[site]) for site in rows) < LIMIT
    assert worst(log_probs, plain.log_probs(final)) < LIMIT

    others(monkeypatch)
    mine, log_probs = plain.run(tokens)
    assert min(worst(mine[site], rows[site]) for site in rows if site != ("pre_attn", 0)) > APART
    assert worst(log_probs, plain.log_probs(final)) > APART
