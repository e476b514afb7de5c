# SPDX-License-Identifier: Apache-2.0
"""The reference: residual-stream values and steered logits of a Hugging Face model, by plain hooks.

Nothing here knows our engine. An `Adapter` says where a transformers model keeps its blocks and
which module's output is the attention branch as it enters the sum; everything else is the
definition of the three points in docs: `pre_attn[l]` is the input of block `l`, `post_attn[l]` that
input plus the branch, `post_block[l]` the output of the block.

All functions take one sequence of token ids, run it without a cache, and speak float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .heads import recorded
from .inner import first_of, hooked

Site = tuple[str, int]
"""(point, global decoder layer index from 0)."""

Hooked = torch.Tensor | tuple[Any, ...]
"""What a transformers module returns: the tensor, or a tuple that starts with it."""


@dataclass(frozen=True)
class Adapter:
    """Where one transformers architecture keeps what the hook contract names."""

    blocks: str
    """Dotted path from the causal LM to the `ModuleList` of decoder blocks."""
    branch: tuple[str, ...]
    """Dotted paths from a block to the module whose output is the attention branch as it enters the
    sum; the first that the block has. A block that has none of them has no `post_attn`, and the
    tuple is empty for an architecture without the point."""
    branch_multiplier: str = ""
    """Name of the config field that multiplies the branch between that module and the sum."""
    second_norm: str = ""
    """In place of `branch`, where more than one module makes the branch: dotted path from a block
    to the norm before its MLP. What enters it is the stream, and the skip reads the same tensor."""

    mlp: tuple[str, ...] = ("mlp", "ffn", "feed_forward", "block_sparse_moe")
    """Dotted paths from a block to its MLP, whose input is `mlp_in`; the first that the block
    has."""

    ends_later: bool = False
    """Whether upstream makes a block's last sum in the next block, so that there is no
    `post_block`."""

    more_blocks: tuple[str, ...] = ()
    """Of a model with several lists of blocks, the others."""
    loops: bool = False
    """Whether blocks run several times for a token. A layer's number then counts what runs."""

    lanes: int = 1
    """How many lanes the stream has: blocks then take and return [lanes, 1, n, hidden], and rows
    and deltas here are [n, lanes * hidden], one lane after the other."""
    lanes_second: bool = False
    """Whether blocks take and return [1, n, lanes, hidden] instead."""

    @property
    def points(self) -> tuple[str, ...]:
        """The points this architecture has, in the order of the stream."""
        middle = ("post_attn",) if self.branch or self.second_norm else ()
        return ("pre_attn", *middle, *(() if self.ends_later else ("post_block",)))

    def find_branch(self, block: nn.Module) -> nn.Module | None:
        """The module whose output is the attention branch; None when this block has none."""
        return first_of(block, self.branch)

    def find_mlp(self, block: nn.Module) -> nn.Module | None:
        """The module that is the MLP; None when this block has none of that name."""
        return first_of(block, self.mlp)


@dataclass(frozen=True)
class Forward:
    """One forward pass of the reference."""

    logits: torch.Tensor
    """float32 [n, vocab]."""
    rows: dict[Site, torch.Tensor]
    """(point, layer) -> float32 [n, hidden], after that site's own steering."""
    heads: dict[Site, torch.Tensor]
    """(point, layer) -> float32 [n, heads, width] of q, k, v and z, where the model shows them."""
    others: dict[Site, torch.Tensor]
    """(point, layer) -> float32 [n, hidden] of embed, final, branches and what the MLP reads, and
    [n, width] of the points within a branch."""


class _Hooks:
    """Hooks on one block: add the site's delta, then record the value."""

    def __init__(
        self,
        layer: int,
        branch_multiplier: float,
        deltas: Mapping[Site, torch.Tensor],
        rows: dict[Site, torch.Tensor],
        others: dict[Site, torch.Tensor],
        counted: Iterator[int] | None = None,
        lanes: int = 1,
        lanes_second: bool = False,
    ) -> None:
        self.lanes = lanes
        self.lanes_second = lanes_second
        self.others = others
        self.layer = layer
        self.counted = counted
        self.branch_multiplier = branch_multiplier
        self.deltas = deltas
        self.rows = rows

    def before_block(
        self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.counted is not None:
            self.layer = next(self.counted)
        # transformers feeds some blocks by keyword; a hook that looks at args only misses those.
        stream = args[0] if args else kwargs["hidden_states"]
        stream = self._steer("pre_attn", stream)
        self._record("pre_attn", stream)
        if args:
            return (stream, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream}

    def after_branch(self, _module: nn.Module, _args: tuple[Any, ...], output: Hooked) -> Hooked:
        branch = _first(output)
        # The stream gets multiplier * branch, so a vector v on the stream is v / multiplier here.
        branch = self._steer("post_attn", branch, 1.0 / self.branch_multiplier)
        stream = self.rows[("pre_attn", self.layer)] + self.branch_multiplier * branch[0]
        self._record("post_attn", stream[None])
        self.others["attn_out", self.layer] = (self.branch_multiplier * branch[0]).clone()
        return _replace_first(output, branch)

    def before_second_norm(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        stream = args[0]
        # In place: the skip reads the same tensor, and the hook cannot reach it otherwise.
        stream.copy_(self._steer("post_attn", stream))
        self._record("post_attn", stream)

    def before_mlp(
        self, _mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        read = self._steer("mlp_in", args[0] if args else kwargs["hidden_states"])
        self.others["mlp_in", self.layer] = read.reshape(-1, read.shape[-1]).clone()
        if args:
            return (read, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": read}

    def after_block(self, _block: nn.Module, _args: tuple[Any, ...], output: Hooked) -> Hooked:
        stream = _first(output)
        stream = self._steer("post_block", stream)
        self._record("post_block", stream)
        pre, post = (self.rows.get((point, self.layer)) for point in ("pre_attn", "post_attn"))
        if pre is not None and post is not None and self.lanes == 1:
            self.others.setdefault(("attn_out", self.layer), post - pre)
            self.others["mlp_out", self.layer] = stream[0] - post
        return _replace_first(output, stream)

    def _steer(self, point: str, value: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        delta = self.deltas.get((point, self.layer))
        if delta is None:
            return value
        if self.lanes > 1:
            delta = delta.unflatten(1, (self.lanes, -1))
            delta = delta[None] if self.lanes_second else delta.transpose(0, 1)[:, None]
        return value + scale * delta

    def _record(self, point: str, value: torch.Tensor) -> None:
        row = value[0] if self.lanes == 1 or self.lanes_second else value[:, 0].transpose(0, 1)
        row = row.flatten(1)
        self.rows[(point, self.layer)] = row.detach().clone()


def _first(output: Hooked) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _replace_first(output: Hooked, value: torch.Tensor) -> Hooked:
    return value if isinstance(output, torch.Tensor) else (value, *output[1:])


@torch.inference_mode()
def run(
    model: nn.Module,
    adapter: Adapter,
    token_ids: Sequence[int],
    deltas: Mapping[Site, torch.Tensor] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Forward:
    """Run the model over one sequence, adding `deltas` to the stream, and record every site.

    Args:
        model: a transformers causal LM on the CPU, eager attention, in eval mode.
        token_ids: n token ids.
        deltas: (point, layer) -> float32 [n, hidden], of z [n, heads * width], added at every
            position of that site.
        inputs: what the model takes beside token ids: its images, as the processor made them.

    Raises:
        KeyError: a delta at a site the model does not have.
    """
    deltas = dict(deltas or {})
    multiplier = (
        float(getattr(model.config, adapter.branch_multiplier))
        if adapter.branch_multiplier
        else 1.0
    )
    rows: dict[Site, torch.Tensor] = {}
    others: dict[Site, torch.Tensor] = {}
    sites: set[Site] = set()
    with ExitStack() as stack:
        lists = (adapter.blocks, *adapter.more_blocks)
        blocks = [block for path in lists for block in model.get_submodule(path).children()]
        counted = itertools.count() if adapter.loops else None
        heads = stack.enter_context(recorded(model, blocks, deltas))
        sites |= {site for site in deltas if site[0] == "z"}
        in_lanes = adapter.lanes, adapter.lanes_second
        for layer, block in enumerate(blocks):
            hooks = _Hooks(layer, multiplier, deltas, rows, others, counted, *in_lanes)
            sites.add(("pre_attn", layer))
            handles = [block.register_forward_pre_hook(hooks.before_block, with_kwargs=True)]
            if not adapter.ends_later:
                sites.add(("post_block", layer))
                handles.append(block.register_forward_hook(hooks.after_block))
            if adapter.second_norm:
                norm = block.get_submodule(adapter.second_norm)
                handles.append(norm.register_forward_pre_hook(hooks.before_second_norm))
                sites.add(("post_attn", layer))
            elif (branch := adapter.find_branch(block)) is not None:
                handles.append(branch.register_forward_hook(hooks.after_branch))
                sites.add(("post_attn", layer))
            if adapter.lanes == 1 and (mlp := adapter.find_mlp(block)) is not None:
                handles.append(mlp.register_forward_pre_hook(hooks.before_mlp, with_kwargs=True))
            handles += [] if adapter.loops else hooked(block, layer, others)
            for handle in handles:
                stack.callback(handle.remove)

        def before_head(_head: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            last = len(blocks) - 1 if counted is None else next(counted) - 1
            others["final", last] = args[0][0].clone()

        head = model.get_output_embeddings()  # type: ignore[operator]
        stack.callback(head.register_forward_pre_hook(before_head).remove)
        output = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, **(inputs or {}))
    sites |= {site for site in others if site[0] == "mlp_in"}
    if adapter.loops:
        sites |= set(rows)
    if unknown := set(deltas) - sites:
        raise KeyError(f"no such site in the reference model: {sorted(unknown)}")
    if missing := sites - set(rows) - set(heads) - set(others):
        raise RuntimeError(
            f"hooks of the reference never ran for {sorted(missing)}: "
            f"the adapter {adapter} does not describe {type(model).__name__}"
        )
    others["embed", 0] = rows["pre_attn", 0]
    return Forward(logits=output.logits[0].float(), rows=rows, heads=heads, others=others)


def read(model: nn.Module, adapter: Adapter, token_ids: Sequence[int]) -> dict[Site, torch.Tensor]:
    """The unsteered residual stream: (point, layer) -> float32 [n, hidden]."""
    return run(model, adapter, token_ids).rows


def write(
    model: nn.Module,
    adapter: Adapter,
    token_ids: Sequence[int],
    site: Site,
    vector: torch.Tensor,
    positions: torch.Tensor,
) -> Forward:
    """Steer one site and return what the model then computes.

    Args:
        vector: float32 [hidden], added to the stream at `site`.
        positions: bool [n], the positions that get it.
    """
    delta = positions[:, None].to(vector.dtype) * vector[None, :]
    return run(model, adapter, token_ids, {site: delta})
