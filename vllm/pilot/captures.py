# SPDX-License-Identifier: Apache-2.0
"""A vector straight from captures: two lists of outputs become a module's file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from vllm.pilot.directions import mean_difference
from vllm.v1.capture import stack
from vllm.v1.steering.files import save

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


def save_direction(
    path: str | Path,
    positive: "Sequence[RequestOutput]",
    negative: "Sequence[RequestOutput]",
    point: str = "post_block",
    layers: Sequence[int] | Literal["all"] = "all",
    model_hint: str = "",
) -> dict[int, torch.Tensor]:
    """Write half the difference of the means of the last captured rows, as safetensors.

    Args:
        path: `llm.steering.register_module` and `--steering-modules` read it.
        positive, negative: outputs of `LLM.generate` with the consumer `inline`.
        layers: "all" are those that the first output has at the point.
        model_hint: the model's name, for readers.

    Returns:
        Layer -> float32 [hidden], what is in the file.

    Raises:
        ValueError: an output lacks the rows, or the two do not differ.
        OSError: the file cannot be written.
    """
    if layers == "all":
        results = positive[0].outputs[0].capture_results if positive else None
        payload = results["inline"].payload if results and "inline" in results else {}
        layers = sorted(layer for at, layer in payload if at == point)
    rows = [stack(outputs, point, layers) for outputs in (positive, negative)]
    vectors = dict(zip(layers, mean_difference(*rows), strict=True))
    save(path, {point: vectors}, model_hint)
    return vectors
