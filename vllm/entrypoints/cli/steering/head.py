# SPDX-License-Identifier: Apache-2.0
"""Runs a model's own final norm and head on rows, in the workers."""

from typing import Any

import torch
from torch import nn

from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.v1.interventions.worker.layers import find_layers


def head_log_probs(
    worker: Any, values: list[list[float]], next_ids: list[int]
) -> list[float] | str | None:
    """Compute log_softmax(head(norm(rows))) at the given tokens, one of each row.

    Args:
        worker: the worker of vLLM, as `collective_rpc` passes it.
        values: rows of `post_block` of the last layer, [n, hidden].
        next_ids: n token ids.

    Returns:
        n log-probabilities; or why it cannot be done; or None on ranks that have no logits.
    """
    if not get_pp_group().is_last_rank:
        return None
    runner = worker.model_runner
    model = runner.get_model()
    norm = final_norm(model)
    if isinstance(norm, str):
        return norm
    dtype = runner.vllm_config.model_config.dtype
    rows = torch.tensor(values, dtype=dtype, device=runner.device)
    with torch.inference_mode(), set_forward_context(None, runner.vllm_config):
        logits = model.compute_logits(norm(rows))
    if logits is None:
        return None
    table = logits.float().log_softmax(-1).cpu()
    found: list[float] = table[torch.arange(len(next_ids)), torch.tensor(next_ids)].tolist()
    return found


def final_norm(model: nn.Module) -> nn.Module | str:
    """Return the norm beside the list of decoder layers, or say why it is not known."""
    layers = set(map(id, find_layers(model).values()))
    for stack in model.modules():
        lists = [child for child in stack.children() if isinstance(child, nn.ModuleList)]
        if not any(id(layer) in layers for one in lists for layer in one):
            continue
        norms = [(n, m) for n, m in stack.named_children() if "Norm" in type(m).__name__]
        final = [m for n, m in norms if "emb" not in n or len(norms) == 1]
        if len(final) != 1:
            return f"{len(final)} norms beside the layers: {[name for name, _ in norms]}"
        return final[0]
    return "the decoder layers are in no list of modules"
