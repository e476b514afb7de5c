# SPDX-License-Identifier: Apache-2.0
"""Experts in torch, where upstream's kernel for CPUs lacks the activation."""

from __future__ import annotations

from typing import Any

import torch

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class Experts(CPUUnquantizedExperts):
    """All of them for all tokens."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """They stay as they are."""

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor,
        w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        """By their weights: those of the chosen, else zero."""
        output.zero_()
        for number, (inner, outer) in enumerate(zip(w1, w2, strict=True)):
            made = self.activated(*(hidden_states @ inner.T).chunk(2, dim=-1))
            weight = (topk_weights * (topk_ids == number)).sum(-1, keepdim=True)
            output += weight * (made @ outer.T)

    def activated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What the second matrix gets."""
        raise NotImplementedError
