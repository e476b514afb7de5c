# SPDX-License-Identifier: Apache-2.0
"""Layers x heads: which attention head is what the next token depends on?

Each head is multiplied by a factor, 0 to ablate it, or gets what it gives in another prompt's run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm.pilot.patching import Prompt, patch_sweep
from vllm.pilot.picture import place_map
from vllm.v1.capture.figures import axes_of

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.entrypoints.serve.steering.client import SteeringClient
    from vllm.v1.capture.figures import Target


@dataclass(frozen=True)
class HeadSweep:
    """Effect of each head on the next token."""

    metric: str
    """"logprob": log P(answer); "diff": less log P(other)."""
    layers: list[int]
    values: np.ndarray
    """float64 [layers, heads], nats: the metric with this head changed. NaN where a layer has fewer
    heads."""
    plain: float
    """The metric of the prompt as it is."""
    clean: float | None
    """The metric of the clean prompt."""

    @property
    def change(self) -> np.ndarray:
        """The change of the metric by each head, float64 [layers, heads], nats."""
        return self.values - self.plain

    @property
    def strongest(self) -> tuple[int, int]:
        """Layer and head of the largest change, up or down."""
        largest = int(np.nan_to_num(abs(self.change)).argmax())
        at, head = divmod(largest, self.values.shape[1])
        return self.layers[at], head

    def __repr__(self) -> str:
        """Show the strongest heads."""
        size = np.nan_to_num(abs(self.change))
        lines = [f"HeadSweep: {self.metric}, {np.isfinite(self.values).sum()} heads"]
        for flat in np.argsort(-size, axis=None)[:5]:
            at, head = np.unravel_index(flat, size.shape)
            lines.append(f"  layer {self.layers[at]} head {head}: {self.change[at, head]:+.3f}")
        return "\n".join(lines)

    def draw(self, target: "Target", title: str = "") -> None:
        """Draw layers x heads.

        Args:
            target: a file, PNG or SVG by its suffix; or axes of matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
        """
        layers, heads = self.values.shape
        with axes_of(target, 2.5 + 0.45 * heads, 1.6 + 0.3 * layers, title=title) as (axes,):
            names = list(map(str, self.layers))
            label = f"change of {self.metric}, nats"
            place_map(axes, self.change, range(heads), names, "head", label)
            axes.set_ylabel("layer")
            axes.invert_yaxis()


def head_sweep(
    llm: "LLM | SteeringClient | str",
    prompt: Prompt,
    clean: Prompt | None = None,
    *,
    answer: str | int,
    other: str | int | None = None,
    factor: float = 0.0,
    layers: Sequence[int] | Literal["all"] = "all",
    positions: Any = "all_prompt",
) -> HeadSweep:
    """Change one head at a time, and see what it does to the next token: `patch_sweep` at z.

    Args:
        llm: an engine with `z` in `steering_points` and `scale` in `steering_families`, or the URL
            or client of a server with these.
        clean: a prompt of as many tokens, whose run gives each head's rows (activation patching);
            then `z` is in `capture_points` too, and each position takes one of
            `max_steering_configs`. With None, heads are multiplied by `factor`.
        answer, other: a text of one token, or its id.
        factor: 0 ablates a head.
        positions: where the head is changed, as in a capture request.

    Raises:
        ValueError: a field is wrong, or the engine refuses it; the message has the field's path.
    """
    op = None if clean is not None else {"op": "scale", "factor": factor}
    found = patch_sweep(
        llm, prompt, clean, answer=answer, other=other, points="z", op=op,
        layers=layers, positions=positions,
    )  # fmt: skip
    values = found.values[0]
    return HeadSweep(found.metric, found.layers, values, found.corrupt, found.clean)
