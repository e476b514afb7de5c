# SPDX-License-Identifier: Apache-2.0
"""The reference of rows within a branch: by hooks on modules of a Hugging Face block.

Routers of transformers return scores of other kinds, so the logits are computed again here, of what
the router gets and its own weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

ROUTERS = (
    "mlp.gate",
    "mlp.router.classifier",
    "mlp.router.gate",
    "mlp.router",
    "moe.gate",
    "block_sparse_moe.gate",
    "block_sparse_moe.router",
    "feed_forward.gate",
    "feed_forward.router",
    "ffn.router.layer",
    "mixer.gate",
    "router.proj",
)
"""Dotted paths from a block to what has the weight of its router, [experts, hidden]."""


DOWNS = (
    "mlp.down_proj",
    "mlp.c_proj",
    "mlp.fc2",
    "mlp.fc_out",
    "mlp.w2",
    "mlp.dense_4h_to_h",
    "feed_forward.down_proj",
    "feed_forward.w2",
    "ffn.down_proj",
    "mixer.down_proj",
)
"""Dotted paths from a block to the down projection of its MLP."""


def first_of(block: nn.Module, paths: Sequence[str]) -> nn.Module | None:
    """The first of some submodules that a block has; None when it has none of them."""
    names = {name for name, _ in block.named_modules()}
    path = next((path for path in paths if path in names), None)
    return None if path is None else block.get_submodule(path)


def hooked(
    block: nn.Module, layer: int, others: dict[tuple[str, int], torch.Tensor]
) -> list[RemovableHandle]:
    """Have a block leave the rows within its branches in `others` when it runs.

    Returns:
        The hooks, to be removed.
    """

    def at_router(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weight, bias = router.weight, getattr(router, "bias", None)
        assert isinstance(weight, torch.Tensor)
        logits = nn.functional.linear(_rows(args, kwargs), weight.float(), bias)
        others["router_logits", layer] = logits

    def at_down(_down: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others["mlp_act", layer] = _rows(args, kwargs)

    handles = []
    if (down := first_of(block, DOWNS)) is not None:
        handles.append(down.register_forward_pre_hook(at_down, with_kwargs=True))
    if (router := first_of(block, ROUTERS)) is not None:
        handles.append(router.register_forward_pre_hook(at_router, with_kwargs=True))
    return handles


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What a module gets, [n, width]."""
    given = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(given, torch.Tensor)
    return given.detach().flatten(0, -2).clone()
