# SPDX-License-Identifier: Apache-2.0
"""What is steered in a write check: one site at a time, and all sites in all tiers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .reference import Forward, Site

TIERS = {
    "all": "steering_vectors",
    "prompt": "prefill_steering_vectors",
    "generated": "decode_steering_vectors",
}
"""Phase of the sequence -> the field of SamplingParams that steers it."""

Phase = str
"""A key of `TIERS`."""


def phase_mask(phase: Phase, length: int, num_prompt: int) -> torch.Tensor:
    """bool [length]: the positions that a phase means."""
    is_prompt = torch.arange(length) < num_prompt
    return {"all": torch.ones_like(is_prompt), "prompt": is_prompt, "generated": ~is_prompt}[phase]


@dataclass(frozen=True)
class SteeringCase:
    """One request's steering, as our engine takes it and as the reference does."""

    EVERY: ClassVar[str] = "every"
    """In place of a point: all sites at once."""

    point: str
    layer: int
    phase: Phase
    vectors: dict[tuple[Phase, Site], torch.Tensor]
    """(phase, site) -> float32 [hidden]."""
    scale: float = 1.0
    """Given beside each vector when it is not 1."""
    lanes: int = 1
    """How many lanes the engine takes each vector as."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of SamplingParams."""
        fields: dict[str, Any] = {}
        for (phase, (point, layer)), vector in self.vectors.items():
            if self.lanes > 1:
                vector = vector.unflatten(0, (self.lanes, -1))
            entry = vector if self.scale == 1.0 else {"vector": vector, "scale": self.scale}
            fields.setdefault(TIERS[phase], {}).setdefault(point, {})[layer] = entry
        return fields

    def deltas(self, length: int, num_prompt: int) -> dict[Site, torch.Tensor]:
        """What the reference adds: site -> float32 [length, hidden]."""
        deltas: dict[Site, torch.Tensor] = {}
        for (phase, site), vector in self.vectors.items():
            added = phase_mask(phase, length, num_prompt)[:, None] * (self.scale * vector)
            deltas[site] = deltas[site] + added if site in deltas else added
        return deltas


def steering_cases(forward: Forward, points: Sequence[str], lanes: int = 1) -> list[SteeringCase]:
    """Each point at the first, a middle and the last layer; each point of the middle layer for each
    phase; and every site in every tier at once, scaled.

    Args:
        forward: an unsteered run of the reference; vectors are as long as its stream is at the
            site, on average.
        points: the points the architecture has.
        lanes: of the stream.
    """
    generator = torch.Generator().manual_seed(7)
    layers = {point: sorted(layer for at, layer in forward.rows if at == point) for point in points}

    def vector(site: Site) -> torch.Tensor:
        stream = forward.rows[site]
        direction = torch.randn(stream.shape[1], generator=generator)
        length = float(stream.norm(dim=-1).mean())
        return direction.mul(length / float(direction.norm()))

    plan: list[tuple[Site, Phase]] = []
    for point, at in layers.items():
        middle = at[len(at) // 2]
        plan += [((point, layer), "all") for layer in sorted({at[0], middle, at[-1]})]
        plan += [((point, middle), phase) for phase in ("prompt", "generated")]
    cases = [
        SteeringCase(*site, phase, {(phase, site): vector(site)}, lanes=lanes)
        for site, phase in plan
    ]
    together = {(phase, site): vector(site) for site in forward.rows for phase in TIERS}
    # Many vectors add up: a smaller share of each keeps the sum comparable to the stream.
    return [*cases, SteeringCase(SteeringCase.EVERY, -1, "all", together, -0.2, lanes)]
