# SPDX-License-Identifier: Apache-2.0
"""What the models of `tests.gpu.hyper` share. Each is formulas in float32, one sequence at a time,
that take nothing from vLLM or transformers but the weights."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch.nn import functional as F

from vllm.config.points import STREAM_POINTS

LAYERS, VOCAB = 4, 251

Site = tuple[str, int]
Change = Callable[[torch.Tensor], torch.Tensor]
"""Rows [n, lanes, hidden] -> what steering makes of them."""
Weights = dict[str, torch.Tensor]


class Maker:
    """Random weights that leave the stream of order one."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def matrix(self, *shape: int) -> torch.Tensor:
        return (self.normal(*shape) * 1.5 * shape[1] ** -0.5).bfloat16()

    def around(self, middle: float, *shape: int) -> torch.Tensor:
        return middle + 0.3 * self.normal(*shape)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Plain(ABC):
    """A model as formulas, with the weights that `save` left in a folder."""

    lanes: ClassVar[int]
    hidden: ClassVar[int]
    eps: ClassVar[float]
    config: ClassVar[dict[str, Any]]
    """What its config.json says."""
    engine: ClassVar[dict[str, Any]] = {}
    """Options of an engine on a GPU."""

    def __init__(self, folder: Path) -> None:
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        self.weights = {name: tensor.float() for name, tensor in stored.items()}

    @classmethod
    def save(cls, folder: Path) -> None:
        """Write a random model, every norm, gate and bias random."""
        make = Maker()
        weights = {
            "model.embed_tokens.weight": make.normal(VOCAB, cls.hidden).bfloat16(),
            "lm_head.weight": make.matrix(VOCAB, cls.hidden),
            **cls.others(make),
        }
        safetensors.torch.save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(cls.config))

    @classmethod
    @abstractmethod
    def others(cls, make: Maker) -> Weights:
        """All weights but those of embedding and head."""

    @abstractmethod
    def attend(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The stream [n, lanes, hidden] after attention, of the one before."""

    @abstractmethod
    def feed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The stream after the MLP, of the one before."""

    @abstractmethod
    def final(self, x: torch.Tensor) -> torch.Tensor:
        """What the head reads, [n, hidden], of the last stream."""

    def w(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"model.layers.{layer}.{name}"]

    def linear(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w(layer, f"{name}.weight").T

    def half(self, x: torch.Tensor, layer: int, point: str) -> torch.Tensor:
        """The stream at the point after `point`, "pre_attn" or "post_attn", in the same block."""
        return (self.attend if point == "pre_attn" else self.feed)(layer, x)

    def log_probs(self, final: torch.Tensor) -> torch.Tensor:
        return (final @ self.weights["lm_head.weight"].T).log_softmax(-1)

    def run(
        self, tokens: list[int], changes: Mapping[Site, Change] | None = None
    ) -> tuple[dict[Site, torch.Tensor], torch.Tensor]:
        """Rows [n, lanes, hidden] of every site, after what changes it, and log-probabilities."""
        changes, rows = changes or {}, dict[Site, torch.Tensor]()
        x = self.weights["model.embed_tokens.weight"][tokens][:, None].expand(-1, self.lanes, -1)
        for layer in range(LAYERS):
            for i, point in enumerate(STREAM_POINTS):
                x = self.half(x, layer, STREAM_POINTS[i - 1]) if i else x
                x = rows[point, layer] = changes.get((point, layer), lambda rows: rows)(x)
        return rows, self.log_probs(self.final(x))


def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each channel of [n, channels] by its own causal taps [channels, 1, width], and SiLU."""
    padded = F.pad(x.T[None], (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, groups=len(weight))[0].T)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule, a token at a time.

    Args:
        q, k: [n, heads, width], normed here.
        v: [n, heads, value width].
        decay: [n, heads, width or 1], logarithms.
        beta: [n, heads].
    """
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, out = torch.zeros(*k.shape[1:], v.shape[-1]), []
    for i in range(len(q)):
        state = state * decay[i].exp()[..., None]
        missing = v[i] - torch.einsum("hkv,hk->hv", state, k[i])
        state = state + torch.einsum("hk,hv->hkv", k[i], beta[i][:, None] * missing)
        out.append(torch.einsum("hkv,hk->hv", state, q[i] * q.shape[-1] ** -0.5))
    return torch.stack(out)
