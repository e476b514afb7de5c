# SPDX-License-Identifier: Apache-2.0
"""Modules within the branches of decoder layers whose rows can be captured: routers, and the down
projections of dense MLPs.

Each has the class attribute `taps`, which does nothing, and reads with it what it computes from.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm.config.points import NEURONS, ROUTER
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear

logger = init_logger(__name__)


class InnerRows(NamedTuple):
    """The rows of a point within a branch."""

    module: nn.Module
    """The module that has the tap."""
    width: int
    """Width of a row, of all tensor-parallel ranks."""
    gathers: bool
    """True if each rank has a part of it."""


def inner_rows(
    layers: Mapping[int, nn.Module], proved: torch.dtype | None = None
) -> dict[int, dict[str, InnerRows]]:
    """The points within the branches of each layer that has some.

    Args:
        proved: the model's dtype, if each MLP is to prove that it is what it looks like; what does
            not has no such point.
    """
    found: dict[int, dict[str, InnerRows]] = {}
    for index, layer in layers.items():
        if (router := router_of(layer)) is not None:
            found.setdefault(index, {})[ROUTER] = router
        if (mlp := dense_mlp_of(layer)) is None:
            continue
        if proved is None or proves(mlp, proved):
            found.setdefault(index, {})[NEURONS] = mlp.neurons
        else:
            kind = type(mlp.module).__name__
            logger.warning_once("%s does more than its projections, so it has no mlp_act", kind)
    return found


def router_of(layer: nn.Module) -> InnerRows | None:
    """The router of a layer with one block of experts; None of other layers.

    All such blocks run upstream's `MoERunner`, which gets the logits or computes them itself. A
    subclass may get something else in their place.
    """
    blocks = [m for m in layer.modules() if isinstance(m, MoERunner)]
    if len(blocks) != 1 or type(blocks[0]) is not MoERunner:
        return None
    [block] = blocks
    if block.gate is not None and block.shared_expert_gate is not None:
        return None  # another logit lies beside those of experts
    width = block.moe_config.num_logical_experts
    if isinstance(block.router, ZeroExpertRouter):  # which has logits of experts that do nothing
        width = block.router.e_score_correction_bias.numel()
    return InnerRows(block, width, gathers=False)


class DenseMlp(NamedTuple):
    """The MLP of a layer that has one, and no experts."""

    module: nn.Module
    down: RowParallelLinear

    @property
    def neurons(self) -> InnerRows:
        """Rows that its down projection reads."""
        parts = self.down.input_is_parallel and self.down.tp_size > 1
        return InnerRows(self.down, self.down.input_size, gathers=parts)


def dense_mlp_of(layer: nn.Module) -> DenseMlp | None:
    """The dense MLP of a layer, by its form: a module apart from attention and other mixers, with a
    projection from the stream to its neurons (of gated ones twice as wide) and one back; None of
    layers that have several, or experts."""
    if any(isinstance(m, MoERunner) for m in layer.modules()):
        return None
    found = [
        DenseMlp(parent, down)
        for parent in _apart(layer)
        for down in parent.children()
        if isinstance(down, RowParallelLinear) and type(down).forward is RowParallelLinear.forward
        if any(_leads_to(up, down) for up in parent.children())
    ]
    return found[0] if len(found) == 1 else None


def _apart(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules below one that neither are a mixer nor have one."""
    for child in module.children():
        if not any(isinstance(m, AttentionLayerBase) for m in child.modules()):
            yield child
            yield from _apart(child)


def _leads_to(up: nn.Module, down: RowParallelLinear) -> bool:
    """Tell whether a projection is from the stream to what another projects back."""
    neurons = down.input_size
    return (
        isinstance(up, LinearBase)
        and not isinstance(up, QKVParallelLinear)
        and up is not down
        and up.input_size == down.output_size
        and up.output_size in (neurons, 2 * neurons)
    )


@torch.inference_mode()
def proves(mlp: DenseMlp, dtype: torch.dtype) -> bool:
    """Run the MLP of a layer on rows that are drawn, and tell whether all that leaves it goes
    through its down projection: what the MLP returns is decided by what that one returns.

    Ranks run it together. The projection is asked once, with its own part of the neurons.
    """
    if not _takes_rows(mlp.module):
        return False
    down, device = mlp.down, next(mlp.module.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(2, down.output_size, generator=generator).to(device, dtype)

    one, other = drawn(), drawn()
    first, same, moved = (_replaced(mlp, drawn(), given) for given in (one, one, other))
    if first is None or same is None or moved is None:
        return False
    return torch.equal(first, same) and not torch.equal(first, moved)


def _takes_rows(module: nn.Module) -> bool:
    needed = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 1


def _replaced(mlp: DenseMlp, rows: torch.Tensor, given: torch.Tensor) -> torch.Tensor | None:
    """Rows that an MLP returns if its down projection gives others than it computes, [2, hidden];
    None if the projection is not asked once for its neurons, or gives something else."""
    asked: list[tuple[int, ...]] = []

    def replace(down: RowParallelLinear, args: tuple[Any, ...], made: Any) -> Any:
        asked.append(tuple(args[0].shape))
        return (given.clone(), *made[1:]) if isinstance(made, tuple) else given.clone()

    hook = mlp.down.register_forward_hook(replace)
    try:
        made = mlp.module(rows)
    finally:
        hook.remove()
    made = made[0] if isinstance(made, tuple) else made
    parts = mlp.down.tp_size if mlp.down.input_is_parallel else 1
    width = mlp.down.input_size // parts
    return made if asked == [(2, width)] and made.shape == given.shape else None
