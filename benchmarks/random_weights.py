# SPDX-License-Identifier: Apache-2.0
"""Load format "benchmark": random weights with which activations are of order one.

vLLM's own dummy weights are so small, and so alike, that what is computed with them is nearly
uniform, and a GPU multiplies uniform data faster than real data. A parameter's values depend on its
name only, so that all engines have the same.
"""

from __future__ import annotations

import zlib

import torch
from torch import nn

from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


class RandomLoader(DummyModelLoader):
    """As the dummy loader, and then other values."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        for name, parameter in model.named_parameters():
            fill(name, parameter.data)


def fill(name: str, values: torch.Tensor) -> None:
    """Random values of the scale that a parameter of this name and shape has after training."""
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
    if values.dim() == 1 and name.endswith("weight"):  # of a norm
        values.uniform_(0.5, 1.5, generator=generator)
    elif values.dim() == 1:
        values.normal_(0.0, 0.1, generator=generator)
    else:
        fan_in = 1 if "embed_tokens" in name else values.shape[1]
        values.normal_(0.0, fan_in**-0.5, generator=generator)


def register() -> None:
    register_model_loader("benchmark")(RandomLoader)
