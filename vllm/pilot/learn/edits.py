# SPDX-License-Identifier: Apache-2.0
"""Changes of the stream that are learned by gradients, and what the engine serves of them.

An edit takes a stream [n, tokens, hidden] and which tokens are real, bool [n, tokens]. Its numbers
are in units of the stream: `size` is a usual entry of a row, so that one learning rate does for all
layers of all models.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vllm.pilot.learn.model import Site

TOP = 5
"""Tokens of a text whose activations ReFT-r1 takes the mean of."""
_SPARSE = 0.005
"""Weight of the activations of all others, in units of the stream."""


class Edit(nn.Module):
    """A change of rows that can be learned."""

    strength: float = 1.0
    """Multiple of the change, in what is served too."""
    sign: float = 1.0
    """The multiple while it is learned: BiPO's direction."""
    size: float

    def forward(self, stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the stream that goes on, in a dtype that may be wider."""
        return stream + self.sign * self.strength * self.change(stream, real)

    def change(self, stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return what is added at strength 1, of the stream's shape or [hidden]."""
        raise NotImplementedError

    def penalty(self) -> torch.Tensor | float:
        """Return what the last stream adds to the loss."""
        return 0.0

    def put(self, module: dict[str, Any], site: Site) -> None:
        """Put the edit into the fields of a module for `register_module`."""
        raise NotImplementedError


class Added(Edit):
    """A vector that is added at every token, from zero."""

    def __init__(self, hidden: int, size: float, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.size = size
        self.units = nn.Parameter(torch.zeros(hidden))

    def change(self, stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the vector, [hidden]."""
        return self.size * self.units

    def put(self, module: dict[str, Any], site: Site) -> None:
        """Put it among the vectors."""
        _put_vector(module, site, self.strength * self.size * self.units)


class LoReft(Edit):
    """`h + R^T (W h + b - R h)`, the rows of R orthonormal, from W = R and b = 0.

    Wu et al. 2024 (arXiv 2404.03592), at every token.
    """

    def __init__(self, hidden: int, size: float, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("start", _orthonormal(torch.randn(hidden, rank, generator=generator)))
        self.turned = nn.Parameter(torch.zeros(hidden, rank))
        self.weight = nn.Parameter(torch.zeros(hidden, rank))
        self.bias = nn.Parameter(torch.zeros(rank))

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return A [rank, hidden], B [hidden, rank] and c [rank] of `h + B (A h + c)`."""
        start: Any = self.start
        root = len(start) ** 0.5
        up = _orthonormal(start + self.turned / root)
        return (start + self.weight / root - up).T, up, self.size * self.bias

    def change(self, stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return `B (A h + c)` of every row."""
        down, up, shift = (one.to(stream.dtype) for one in self.matrices())
        return (stream @ down.T + shift) @ up.T

    def put(self, module: dict[str, Any], site: Site) -> None:
        """Put it among the operations."""
        down, up, shift = (one.detach().float().cpu() for one in self.matrices())
        point, layer = site
        ops = module.setdefault("ops", [])
        ops.append(
            {"op": "low_rank", "point": point, "layers": [layer], "A": down, "B": up, "c": shift}
            | ({"strength": self.strength} if self.strength != 1.0 else {})
        )


class ReftR1(Edit):
    """One direction w of length 1 that finds a concept and adds it.

    ReFT-r1 (Wu et al. 2025, arXiv 2501.17148): while it is learned, the mean of a text's `TOP`
    largest activations relu(h.w) times w is added at every token, and the sum of the others
    weighs on the loss. Served is the mean of these over the texts, times w: a vector. The first
    token's row, which in many models is far longer than all others, does not count.
    """

    def __init__(self, hidden: int, size: float, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.size = size
        self.units = nn.Parameter(torch.randn(hidden, generator=generator))
        self.register_buffer("seen", torch.zeros(2))
        self._others: torch.Tensor | float = 0.0

    def train(self, mode: bool = True) -> "ReftR1":
        """Begin a pass over the texts, or end it."""
        seen: Any = self.seen
        if mode:
            seen.zero_()
        return super().train(mode)

    def change(self, stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the vector of every text, [n, 1, hidden], or the served one."""
        w = self.units / self.units.norm()
        seen: Any = self.seen
        if not self.training:
            self._others = 0.0
            return seen[0] / seen[1].clamp(min=1) * w
        counted = real.clone()
        counted[:, 0] = False
        active = (stream @ w.to(stream.dtype)).relu() * counted
        top = active.topk(min(TOP, active.shape[1]), dim=1).values
        mean = top.mean(1)
        self._others = _SPARSE * (active.sum(1) - top.sum(1)).mean() / self.size
        with torch.no_grad():
            seen += torch.stack([mean.sum(), mean.new_tensor(float(len(mean)))]).to(seen.dtype)
        return mean[:, None, None] * w

    def penalty(self) -> torch.Tensor | float:
        """Return the weighted sum of the other activations."""
        return self._others

    def put(self, module: dict[str, Any], site: Site) -> None:
        """Put the served vector among the vectors."""
        seen: Any = self.seen
        unit = self.units / self.units.norm()
        _put_vector(module, site, self.strength * seen[0] / seen[1].clamp(min=1) * unit)


def module_of(edits: Mapping[Site, Edit]) -> dict[str, Any]:
    """Return the fields of a module for `register_module` that does what the edits do."""
    module: dict[str, Any] = {}
    for site, edit in edits.items():
        edit.put(module, site)
    return module


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns, [hidden, rank], each on its column's side."""
    basis, upper = torch.linalg.qr(columns)
    return basis * upper.diagonal().sign()


def _put_vector(module: dict[str, Any], site: Site, vector: torch.Tensor) -> None:
    point, layer = site
    of_point = module.setdefault("vectors", {}).setdefault(point, {})
    of_point[layer] = vector.detach().float().cpu()
