# SPDX-License-Identifier: Apache-2.0
"""The reference of focus: the attention of a Hugging Face model with a bias in its mask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

_NAME = "eager_attention_forward"

ENGINE: dict[str, Any] = {
    "enable_steering": True,
    "steering_families": ["add", "focus"],
    "capture_consumers": ["inline"],
    "capture_points": ["q", "z", "post_block"],
}
"""What an engine needs for focus, and for all that says whether it is right."""


@dataclass(frozen=True)
class Focusing:
    """One `focus`, of a sequence whose length is known."""

    heads: Mapping[int, Sequence[int]]
    """Layer -> heads."""
    span: Sequence[int]
    queries: Sequence[int] | range = field(default_factory=lambda: range(1 << 20))
    factor: float | None = None
    share: float = 0.0
    ratio: bool = False

    def request(self, last: int) -> dict[str, Any]:
        """The entry of `steering` of a request whose last row is at position `last`."""
        entry: dict[str, Any] = {
            "op": "focus",
            "heads": {layer: list(heads) for layer, heads in self.heads.items()},
            "span": [p for p in self.span if p <= last],
        }
        if self.queries != range(1 << 20):
            entry["positions"] = [p for p in self.queries if p <= last]
        if self.factor is not None:
            return entry | {"factor": self.factor}
        return entry | {"share": self.share} | ({"rule": "ratio"} if self.ratio else {})

    def bias(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """What is added to logits: float [heads, n, n].

        Args:
            weights: [heads, n, n], without it.
        """
        heads, n, _ = weights.shape
        inside = torch.tensor([p in self.span for p in range(n)])
        acts = torch.zeros(heads, n, dtype=torch.bool)
        acts[list(self.heads.get(layer, ()))] = torch.tensor([p in self.queries for p in range(n)])
        if self.factor is not None:
            factor = torch.full((heads, n), self.factor, dtype=torch.float64)
        else:
            mass, a = (weights.double() * inside).sum(-1), self.share
            factor = a / mass if self.ratio else a * (1 - mass) / (mass * (1 - a))
            factor = torch.where(mass > 0, factor.clamp_min(1), 1.0)
        bias = torch.where(acts, factor.log(), 0.0)[..., None]
        return torch.where(inside, bias, 0.0).to(weights.dtype)


@contextmanager
def focused(
    model: nn.Module, blocks: Sequence[nn.Module], entries: Sequence[Focusing]
) -> Iterator[None]:
    """Within, one sequence at a time runs with these."""
    layer_of = {module: layer for layer, block in enumerate(blocks) for module in block.modules()}

    def biased(layer: int, weights: torch.Tensor) -> torch.Tensor:
        return sum((e.bias(layer, weights) for e in entries), torch.zeros_like(weights))

    def focusing(attend: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            plain = attend(module, query, key, value, attention_mask, *args, **kwargs)
            bias = biased(layer_of[module], plain[1][0])
            n = bias.shape[-1]
            mask = attention_mask[..., :n] + bias
            return attend(module, query, key, value, mask, *args, **kwargs)

        return call

    with ExitStack() as stack:
        files = {sys.modules[type(module).__module__] for module in model.modules()}
        for file in (file for file in files if hasattr(file, _NAME)):
            stack.enter_context(mock.patch.object(file, _NAME, focusing(getattr(file, _NAME))))
        if not any(hasattr(file, _NAME) for file in files):
            config: Any = model.config
            heads = dict.fromkeys(layer_of.values(), config.num_attention_heads)
            stack.enter_context(masked(blocks, entries, heads))
        yield


class Unmasked(Exception):
    """A block gets no mask of float."""


@contextmanager
def masked(
    blocks: Sequence[nn.Module], entries: Sequence[Focusing], heads: Mapping[int, int]
) -> Iterator[None]:
    """Within, one sequence at a time runs with these factors, in the masks that blocks get: of any
    architecture.

    Args:
        heads: how many each layer that is focused has.

    Raises:
        Unmasked: one of these gets none.
    """

    def hook(layer: int) -> Callable[..., Any]:
        def mask(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            given = kwargs | dict(enumerate(args))
            found = [name for name, x in given.items() if _is_mask(x)]
            if len(found) != 1:
                raise Unmasked(f"block {layer}: {found} of {list(given)}")
            [name] = found
            without = given[name].new_zeros(heads[layer], *given[name].shape[-2:])
            given[name] = given[name] + sum(e.bias(layer, without) for e in entries)
            return (
                tuple(given[i] for i in range(len(args))),
                {key: given[key] for key in kwargs},
            )

        return mask

    with ExitStack() as stack:
        for layer in heads:
            handle = blocks[layer].register_forward_pre_hook(hook(layer), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _is_mask(given: Any) -> bool:
    """Whether this is added to products of queries with keys: float [.., n, n]."""
    return (
        isinstance(given, torch.Tensor)
        and given.is_floating_point()
        and given.ndim == 4
        and given.shape[-1] == given.shape[-2]
    )
