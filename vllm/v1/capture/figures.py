# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib, which `pip install 'vllm[pilot]'` brings, and the one of attention."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Target = str | Path | Axes
    """A file, PNG or SVG by its suffix; or axes to draw on."""

_COLUMNS = 4
"""Most heads beside each other in a grid."""


def need_matplotlib() -> None:
    """Raise ImportError, with what to do, where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'vllm[pilot]'") from None
    matplotlib.use("Agg")


def save_figure(figure: Any, target: str | Path | StringIO) -> None:
    """Write a figure and let go of it: as PNG or SVG by the suffix, into a buffer as SVG."""
    from matplotlib import pyplot as plt

    kind = "svg" if isinstance(target, StringIO) else None
    if not isinstance(target, StringIO):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(target, dpi=130, format=kind)
    finally:
        plt.close(figure)


@contextmanager
def axes_of(
    target: "Target", width: float, height: float, count: int = 1, title: str = ""
) -> "Iterator[list[Axes]]":
    """Give axes to draw on: the user's, or those of a figure that is written when they are drawn.

    Args:
        width, height: inches of each axes.
        count: number of axes, in rows of a few.
        title: of the figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: several axes are needed, and one was given.
    """
    if not isinstance(target, str | Path):
        if count > 1:
            raise ValueError(f"target: axes have room for one head, not for {count}; name one")
        if title:
            target.set_title(title)
        yield [target]
        return
    need_matplotlib()
    from matplotlib import pyplot as plt

    columns = min(count, _COLUMNS)
    lines = -(-count // columns)
    size = (width * columns, height * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for empty in axes[count:]:
        empty.set_axis_off()
    if title:
        figure.suptitle(title, fontsize=11)
    yield axes[:count]
    save_figure(figure, target)


def attention_map(
    axes: "Axes", weights: np.ndarray, rows: Sequence[str], keys: Sequence[str]
) -> None:
    """Draw queries x keys, from 0 to the largest weight.

    Args:
        weights: [queries, keys]; NaN, behind a query, is left white.
        rows: names of the queries, from above.
        keys: names of the keys.
    """
    image = axes.imshow(weights, cmap="Purples", vmin=0, vmax=np.nanmax(weights), aspect="auto")
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks(range(len(keys)), keys, fontsize=7, rotation=90)
    axes.set(xlabel="key", ylabel="query")
    axes.figure.colorbar(image, ax=axes)
