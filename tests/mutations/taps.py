# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what is bound to the layers, which no reading of `forward` can see."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vllm.model_executor.layers.residual_taps import BoundTaps, PassTap, SiteTap

Pair = tuple[torch.Tensor, torch.Tensor | None]
Taps = dict[int, BoundTaps]
"""By layer."""


class _Mutant(SiteTap):
    """All calls of a SiteTap go through `steer` and `read`."""


class Negated(_Mutant):
    def steer(self, h: torch.Tensor) -> torch.Tensor:
        return 2 * h - super().steer(h)


class Doubled(_Mutant):
    def steer(self, h: torch.Tensor) -> torch.Tensor:
        return super().steer(super().steer(h))


class SteeredRowBefore(_Mutant):
    def steer(self, h: torch.Tensor) -> torch.Tensor:
        assert self.table is not None
        return h + self.table[self.slots[: h.shape[0]].roll(1)]


class ReadRowBefore(_Mutant):
    def read(self, h: torch.Tensor) -> None:
        super().read(h.roll(1, 0))


class ReadFirst(_Mutant):
    """Captures what came in, not what goes on."""

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        super().read(h)
        return self.steer(h)

    def steer_pair(self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False) -> Pair:
        super().read(h if r is None else h + r)
        return super().steer_pair(h, r, partial)

    def read(self, h: torch.Tensor) -> None:
        return None


def _each(kind: type[SiteTap]) -> Callable[[Taps], Taps]:
    def one(tap: PassTap | SiteTap) -> PassTap | SiteTap:
        if isinstance(tap, PassTap):
            return tap
        return kind(tap.table, tap.terms, tap.slots, tap.arena, tap.dest, tap.switch)

    def change(taps: Taps) -> Taps:
        return {
            layer: BoundTaps(one(t.pre_attn), one(t.post_attn), one(t.mlp_in), one(t.post_block))
            for layer, t in taps.items()
        }

    return change


def _next_layers(taps: Taps) -> Taps:
    """Layers of the same points pass theirs on to the next."""
    order = list(taps)
    return {layer: taps[order[(i + 1) % len(order)]] for i, layer in enumerate(order)}


BOUND: dict[str, Callable[[Taps], Taps]] = {
    "wrong layer": _next_layers,
    "sign": _each(Negated),
    "steering twice (added twice)": _each(Doubled),
    "steered row shifted by one": _each(SteeredRowBefore),
    "captured row shifted by one": _each(ReadRowBefore),
    "capture before steering": _each(ReadFirst),
}


def bound_taps(layers: dict[int, nn.Module]) -> Taps:
    found: Taps = {}
    for index, layer in layers.items():
        taps = layer.taps
        assert isinstance(taps, BoundTaps)
        found[index] = taps
    return found
