# SPDX-License-Identifier: Apache-2.0
"""LongCat Flash: two attentions a block (MLA), experts that hand their input on, and embeddings of
n-grams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from ..longcat_ngram import LongcatNgram
from ..tiny import HALF_STD, INNER, LAYERS, PARALLEL, VOCAB, Tensors, TinyModel, sizes
from .latent import MLA, MLA_ENGINE, MLA_NOTE


def _no_idle_experts(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Without weights that transformers keeps for experts that hand their input on."""
    kept = {name: re.search(r"experts\.(\d+)\.", name) for name in tensors}
    return {
        name: tensors[name]
        for name, found in kept.items()
        if found is None or int(found[1]) < config.n_routed_experts
    }


def _chosen_with_bias(*, hidden_states: Any, gating_output: torch.Tensor, topk: int,
    e_score_correction_bias: torch.Tensor, indices_type: torch.dtype | None, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    scores = gating_output.float().softmax(-1)
    chosen = (scores + e_score_correction_bias).topk(topk, dim=-1).indices
    return scores.gather(-1, chosen), chosen.to(indices_type or torch.int32)


def _of_idle_experts(*, expert_indices: torch.Tensor, expert_scales: torch.Tensor, num_experts: int,
    hidden_states: torch.Tensor, **_: Any,
) -> torch.Tensor:  # fmt: skip
    return (expert_scales * (expert_indices >= num_experts)).sum(-1, keepdim=True) * hidden_states


@contextmanager
def _routed_by_torch() -> Iterator[None]:
    """Upstream has kernels of GPUs alone for experts that hand their input on, and for the choice
    of experts with a bias where they are in no groups."""
    import pytest

    from vllm.model_executor.layers.fused_moe.router import zero_expert_router
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            patch.setattr(zero_expert_router, "fused_topk_bias", _chosen_with_bias)
            patch.setattr(zero_expert_router, "zero_experts_compute_triton", _of_idle_experts)
        yield


def _ids_of_ngrams(n: int, k: int, weights: torch.Tensor, mods: torch.Tensor,
    offsets: torch.Tensor, starts: torch.Tensor, table: torch.Tensor, _rows: torch.Tensor,
    columns: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    row = 0
    for request, (first, end) in enumerate(pairwise(starts)):
        for column in range(int(columns[request]), int(columns[request] + end - first)):
            for number in range((n - 1) * k):
                i, j = divmod(number, k)
                total = 0
                # A negative token is one before the request, or ends a text.
                for back in range(i + 2):
                    if (token := int(table[request, column - back])) < 0:
                        break
                    total += token * int(weights[i, j, back])
                out[row, number] = total % int(mods[i, j]) + int(offsets[number])
            row += 1


@contextmanager
def _embedded_by_torch() -> Iterator[None]:
    """Upstream's kernel for the ids of n-grams is for GPUs alone."""
    import pytest

    from vllm.model_executor.models import longcat_flash_ngram
    from vllm.platforms import current_platform

    with _routed_by_torch(), pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            patch.setattr(longcat_flash_ngram.ops, "ngram_compute_n_gram_ids", _ids_of_ngrams)
        yield


_EXPERTS = 4


def _config(**fields: Any) -> PretrainedConfig:
    return transformers.LongcatFlashConfig(
        **sizes(
            head_dim=None,
            num_key_value_heads=None,
            intermediate_size=None,
            num_hidden_layers=None,
        ),
        **MLA,
        num_layers=LAYERS,
        ffn_hidden_size=INNER,
        expert_ffn_hidden_size=64,
        n_routed_experts=_EXPERTS,
        zero_expert_num=2,
        moe_topk=3,
        routed_scaling_factor=1.6,
        **fields,
    )


_JSON: dict[str, Any] = {
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_NOTE = (
    f"two attentions a block, so no heads; {MLA_NOTE}; upstream routes to experts that hand their "
    "input on by kernels of GPUs alone: run with torch's"
)

LONGCAT = (
    TinyModel(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        _config,
        PARALLEL,
        checkpoint=_no_idle_experts,
        config_json=_JSON,
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        upstream=_routed_by_torch,
        note=_NOTE,
    ),
    TinyModel(
        "longcat_flash_ngram",
        "LongcatFlashNgramForCausalLM",
        lambda: _config(ngram_vocab_size_ratio=2, emb_split_num=2, emb_neighbor_num=3),
        PARALLEL,
        model=LongcatNgram,
        checkpoint=_no_idle_experts,
        # No token ends a text.
        config_json={**_JSON, "eos_token_id": VOCAB},
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        upstream=_embedded_by_torch,
        note=f"{_NOTE}; so are the ids of n-grams; transformers lacks the embeddings: in plain "
        "PyTorch, conformance/longcat_ngram.py",
    ),
)
