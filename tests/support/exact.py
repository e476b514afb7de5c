# SPDX-License-Identifier: Apache-2.0
"""A Llama of transformers that computes in float64 throughout, for finite differences."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from vllm.pilot.learn import TorchModel


class Norm(nn.Module):
    """LlamaRMSNorm, which transformers computes in float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        size = (rows.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        made: torch.Tensor = self.weight * rows / size
        return made


def in_float64(model: TorchModel) -> TorchModel:
    """The same weights in float64; its eager attention would have a softmax in float32."""
    module: Any = copy.deepcopy(model.module).double()
    module.set_attn_implementation("sdpa")
    for name, one in list(module.named_modules()):
        if type(one).__name__ == "LlamaRMSNorm":
            module.set_submodule(name, Norm(one))
    return TorchModel(module, model.tokenizer, model.name)
