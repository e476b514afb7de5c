# SPDX-License-Identifier: Apache-2.0
"""Pictures of experiments, with matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm.v1.capture.figures import need_matplotlib


def subplots(count: int, width: float = 6.5, height: float = 5.2) -> tuple[Any, list[Any]]:
    """A figure with so many axes side by side, each of this size in inches."""
    need_matplotlib()
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width * count, height), layout="constrained")
    return figure, list(np.atleast_1d(axes))


def heat_map(
    axes: Any,
    effect: np.ndarray,
    layers: Sequence[int],
    scales: Sequence[float],
    unit: str,
    point: str,
    chosen: Sequence[tuple[int, float]] = (),
) -> None:
    """Draw layers x scales.

    Args:
        effect: [layers, scales].
        chosen: layers and scales that get a frame.
    """
    from matplotlib.patches import Rectangle

    bound = float(abs(effect).max()) or 1.0
    image = axes.imshow(
        effect, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", origin="lower"
    )
    axes.set_xticks(range(len(scales)), [f"{s:+g}" if s else "0" for s in scales])
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_xlabel("scale (1: from between the classes to the mean positive row)")
    axes.set_ylabel(f"steered layer ({point})")
    if effect.size <= 400:
        for row, values in enumerate(effect):
            for column, value in enumerate(values):
                colour = "white" if abs(value) > 0.6 * bound else "black"
                text = f"{value:+.1f}" if 1 <= bound < 1e4 else f"{value:+.2g}"
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    for layer, scale in chosen:
        corner = (scales.index(scale) - 0.5, layers.index(layer) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=2.5, edgecolor="black"))
    axes.figure.colorbar(image, ax=axes, label=f"change, {unit}")


def place_map(
    axes: Any,
    values: np.ndarray,
    layers: Sequence[int],
    names: Sequence[str],
    where: str,
    label: str,
) -> None:
    """Draw positions x layers.

    Args:
        values: [positions, layers]; NaN is left white.
        names: of the positions, from above.
        where: what a layer is, below the map.
    """
    found = values[np.isfinite(values)]
    bound = float(abs(found).max(initial=0.0)) or 1.0
    image = axes.imshow(values, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto")
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_yticks(range(len(names)), names, fontsize=8, family="monospace")
    axes.set_xlabel(where)
    axes.figure.colorbar(image, ax=axes, label=label)


def head_map(
    axes: Any,
    values: np.ndarray,
    layers: Sequence[int],
    label: str,
    chosen: Sequence[tuple[int, int]] = (),
) -> None:
    """Draw layers x heads, from 0 to 1.

    Args:
        values: [layers, heads]; NaN is left white.
        chosen: layers and heads that get a frame.
    """
    from matplotlib.patches import Rectangle

    image = axes.imshow(values, cmap="Purples", vmin=0, vmax=1, aspect="auto", origin="lower")
    axes.set_xticks(range(values.shape[1]))
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for layer, head in chosen:
        corner = (head - 0.5, layers.index(layer) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=2.5, edgecolor="black"))
    axes.figure.colorbar(image, ax=axes, label=label)


def curve(
    axes: Any,
    scales: Sequence[float],
    effect: Sequence[float],
    randoms: Sequence[tuple[float, float]],
    unit: str,
    label: str,
) -> None:
    """Draw the effect of each scale, and that of random directions.

    Args:
        randoms: scale and effect of each random direction.
    """
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.plot(scales, effect, marker="o", color="black", label=label)
    if randoms:
        axes.scatter(
            *zip(*randoms, strict=True),
            color="tab:orange",
            alpha=0.7,
            zorder=3,
            label=f"{len(randoms) // 2} random directions, same length",
        )
    axes.set_xlabel("scale")
    axes.set_ylabel(f"change, {unit}")
    axes.legend(loc="upper left", fontsize=8)


def named_bars(
    axes: Any, names: Sequence[str], values: np.ndarray, label: str, chosen: Sequence[int] = ()
) -> None:
    """Draw one number for each name, from above; those whose numbers are `chosen` are darker."""
    colours = ["tab:blue" if i in chosen else "lightsteelblue" for i in range(len(names))]
    axes.barh(range(len(names)), values, color=colours)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def histogram(
    axes: Any, sides: Mapping[str, np.ndarray], label: str, threshold: float | None = None
) -> None:
    """Draw how often scores of several classes are in each of the same ranges."""
    bins = np.histogram_bin_edges(np.concatenate(list(sides.values())), bins=30)
    for name, scores in sides.items():
        axes.hist(scores, bins=bins, alpha=0.6, label=f"{len(scores)} {name}")
    if threshold is not None:
        axes.axvline(threshold, color="black", linestyle="--", label="threshold")
    axes.set_xlabel(label)
    axes.set_ylabel("texts")
    axes.legend(fontsize=8)


def roc_curve(
    axes: Any,
    false: np.ndarray,
    true: np.ndarray,
    label: str,
    chosen: tuple[float, float] | None = None,
) -> None:
    """Draw an ROC curve beside chance.

    Args:
        false, true: rates at each threshold, from 0 to 1.
        chosen: the rates of one threshold, which gets a dot.
    """
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.plot(false, true, color="black", label=label)
    if chosen is not None:
        axes.plot(*chosen, marker="o", color="tab:orange", label="threshold", linestyle="none")
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate")
    axes.legend(loc="lower right", fontsize=8)
