# SPDX-License-Identifier: Apache-2.0
"""The reference of q, k, v and z: what the attention of a Hugging Face model gets and returns.

Every attention of transformers that has heads of this kind calls a function of its module,
`eager_attention_forward(module, query, key, value, ...)`; it is wrapped while a sequence runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from .reference import Adapter, Site

_NAME = "eager_attention_forward"


@torch.inference_mode()
def read_heads(
    model: nn.Module, adapter: Adapter, token_ids: Sequence[int]
) -> dict[Site, torch.Tensor]:
    """Run the model over one sequence: (point, layer) -> float32 [n, heads, width] of q, k, v, z.

    Layers whose attention is called not once, or does without that function, are left out.
    """
    calls: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    layer_of = {
        module: layer
        for layer, block in enumerate(model.get_submodule(adapter.blocks).children())
        for module in block.modules()
    }
    with _recorded(model, calls, layer_of):
        model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    return {
        (point, layer): value
        for layer, made in calls.items()
        if len(made) == 1
        for point, value in zip("qkvz", made[0], strict=True)
    }


@contextmanager
def _recorded(
    model: nn.Module,
    calls: dict[int, list[tuple[torch.Tensor, ...]]],
    layer_of: dict[nn.Module, int],
) -> Iterator[None]:
    def wrapped(attend: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            out = attend(module, query, key, value, *args, **kwargs)
            # [1, heads, n, width], and of the output [1, n, heads, width]
            rows = [x[0].transpose(0, 1).clone() for x in (query, key, value)]
            if module in layer_of:
                calls.setdefault(layer_of[module], []).append((*rows, out[0][0].clone()))
            return out

        return call

    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    patches = [
        mock.patch.object(module, _NAME, wrapped(getattr(module, _NAME)))
        for module in modules
        if hasattr(module, _NAME)
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
