# SPDX-License-Identifier: Apache-2.0
"""The picture: layer x scale -> measured effect, and the chosen layer against random directions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from demo.experiment import Choice, Result, Sweep
from demo.subject import Subject


def draw(
    target: Path,
    name: str,
    subject: Subject,
    layers: Sequence[int],
    sweep: Sweep,
    choice: Choice,
    result: Result,
) -> None:
    """Writes a PNG to `target`; `name` is the model's, for the title."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.2), gridspec_kw={"width_ratios": [1.5, 1]}, layout="constrained"
    )
    effect = sweep.effect.numpy()
    bound = max(float(abs(effect).max()), 1e-9)
    image = left.imshow(
        effect, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", origin="lower"
    )
    labels = [f"{s:+g}" if s else "0" for s in subject.scales]
    left.set_xticks(range(len(labels)), labels)
    left.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    left.set_xlabel("scale (1: from between the two moods to the mean cheerful row)")
    left.set_ylabel("steered layer (post_block)")
    left.set_title(f"Effect on {len(subject.sweep)} sweep prompts", fontsize=11)
    for row, values in enumerate(effect):
        for column, value in enumerate(values):
            left.text(
                column,
                row,
                f"{value:+.1f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if abs(value) > 0.6 * bound else "black",
            )
    for scale in (-choice.scale, choice.scale):
        corner = (subject.scales.index(scale) - 0.5, list(layers).index(choice.layer) - 0.5)
        left.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=2.5, edgecolor="black"))
    figure.colorbar(image, ax=left, label=f"change, {subject.measure.unit}")

    right.axhline(0, color="grey", linewidth=0.8)
    right.axvline(0, color="grey", linewidth=0.8)
    right.plot(
        subject.scales,
        result.effect,
        marker="o",
        color="black",
        label=f"the direction, layer {choice.layer}",
    )
    # Random effects alternate: minus, plus the chosen scale.
    half = range(0, len(result.random), 2)
    right.scatter(
        [-choice.scale, choice.scale] * len(half),
        result.random,
        color="tab:orange",
        alpha=0.7,
        zorder=3,
        label=f"{len(half)} random directions, same length",
    )
    right.set_xlabel("scale")
    right.set_ylabel(f"change, {subject.measure.unit}")
    right.set_title(f"Effect on {len(subject.held_out)} held-out prompts", fontsize=11)
    right.legend(loc="upper left", fontsize=8)
    figure.suptitle(f"Steering {name} along a captured direction: cheerful (+), gloomy (-)")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    plt.close(figure)
