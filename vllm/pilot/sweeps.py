# SPDX-License-Identifier: Apache-2.0
"""Layers x scales: how much steering changes a metric, and the picture of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from vllm.pilot.bench import Bench, LateBar, Steering, bench_of
from vllm.pilot.metrics import Metric, Written
from vllm.pilot.numbers import as_numbers
from vllm.pilot.picture import heat_map, subplots
from vllm.pilot.rows import need_layers
from vllm.v1.capture.figures import save_figure

if TYPE_CHECKING:
    from vllm import LLM

MOST_CELLS = 65_536
"""Layers x scales of one sweep, at most."""


@dataclass(frozen=True)
class Sweep:
    """The change of a metric by steering one layer with one scale."""

    layers: list[int]
    scales: list[float]
    values: np.ndarray
    """float64 [layers, scales, cases]: the metric, steered less plain."""
    plain: np.ndarray
    """float64 [cases]: the metric without steering."""
    unit: str
    point: str
    answers: dict[tuple[int, float], list[Written]]
    """Layer and scale -> the texts written under them; empty if the metric had no texts written."""
    plain_answers: list[Written] | None

    @property
    def effect(self) -> np.ndarray:
        """The mean over cases, float64 [layers, scales]."""
        mean: np.ndarray = self.values.mean(-1)
        return mean

    def __repr__(self) -> str:
        """Show the table."""
        head = "layer " + " ".join(f"{scale:>+8g}" for scale in self.scales)
        rows = [
            f"{layer:>5} " + " ".join(f"{value:>+8.3f}" for value in row)
            for layer, row in zip(self.layers, self.effect, strict=True)
        ]
        return "\n".join([f"Sweep of {self.point}, {self.unit}", head, *rows])

    def draw_on(self, axes: Any, chosen: Sequence[tuple[int, float]] = ()) -> None:
        """Draw the heat map on axes of matplotlib; chosen layers and scales get a frame."""
        heat_map(axes, self.effect, self.layers, self.scales, self.unit, self.point, chosen)

    def draw(self, target: str | Path, title: str = "") -> None:
        """Write the heat map as a picture, PNG or SVG by the name's suffix.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = subplots(1, width=2.5 + 0.8 * len(self.scales))
        self.draw_on(axes[0])
        axes[0].set_title(title or "Effect of steering", fontsize=11)
        save_figure(figure, target)


def sweep(
    llm: "LLM | Bench | str",
    vectors: torch.Tensor | np.ndarray | Mapping[int, Any],
    layers: Sequence[int] | Literal["all"],
    scales: Sequence[float],
    metric: Metric,
    point: str = "post_block",
) -> Sweep:
    """Steer one layer at a time with each scale, and see how the metric changes.

    Args:
        llm: an engine, or a server's URL.
        vectors: layer -> [hidden], or [all layers, hidden].
        scales: 0 is sent as a sum of zero, see `Steering.fields`.
        metric: such as `Odds(pairs)` or `Score(function, prompts)`.

    Raises:
        ValueError: a layer has no such point or no vector, a vector is of the wrong width, there is
            no scale, or there are more than `MOST_CELLS` cells.
    """
    bench = bench_of(llm)
    chosen = need_layers(bench, layers, point)
    if not len(scales):
        raise ValueError("scales: none are given")
    if len(chosen) * len(scales) > MOST_CELLS:
        raise ValueError(f"layers x scales: {len(chosen) * len(scales)} of {MOST_CELLS} cells")
    of_layer = {layer: _vector(vectors, layer, bench) for layer in chosen}
    plain = metric(bench, [None])
    values, answers = [], {}
    for layer in LateBar(chosen, "sweep", unit="layer"):
        steerings = [Steering(layer, of_layer[layer], scale, point) for scale in scales]
        scored = metric(bench, steerings)
        values.append(scored.values - plain.values)
        for scale, written in zip(scales, scored.answers or [], strict=False):
            answers[layer, scale] = written
    return Sweep(
        layers=chosen,
        scales=list(scales),
        values=np.stack(values),
        plain=plain.values[0],
        unit=metric.unit,
        point=point,
        answers=answers,
        plain_answers=plain.answers[0] if plain.answers else None,
    )


def _vector(
    vectors: torch.Tensor | np.ndarray | Mapping[int, Any], layer: int, bench: Bench
) -> torch.Tensor:
    if isinstance(vectors, Mapping):
        if layer not in vectors:
            raise ValueError(f"vectors: there is none for layer {layer}")
    elif len(vectors) != len(bench.layers):
        raise ValueError(f"vectors: {len(vectors)} of them for {len(bench.layers)} layers")
    vector = as_numbers(vectors[layer], f"vectors[{layer}]").float()
    if vector.shape != (bench.hidden,):
        raise ValueError(
            f"vectors[{layer}]: shape {list(vector.shape)}, the model has {bench.hidden} values"
        )
    return vector
