# SPDX-License-Identifier: Apache-2.0
"""Straight from captures: a vector as a module's file; rows as one array, with prompts and tokens
beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from vllm.pilot.directions import mean_difference
from vllm.v1.capture import CapturedRows, stack
from vllm.v1.steering.files import save

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


@dataclass(frozen=True)
class RowTable:
    """Rows of several outputs, one below the other; what is beside them is as long."""

    values: np.ndarray
    """[n, layers, width], of q, k, v and z [n, layers, heads, width]; bfloat16 is float32 here."""
    layers: list[int]
    output: np.ndarray
    """int64 [n]: which of the outputs a row is of; of several completions each counts."""
    prompts: list[str | None]
    """The prompt of each row's output; None where it was given as token ids."""
    positions: np.ndarray
    """int64 [n]."""
    token_ids: np.ndarray
    """int64 [n]: the token that each row has read."""
    tokens: list[str]
    """Its text; the number where there is nothing to tell it by."""

    def __repr__(self) -> str:
        """Say how much there is, not what."""
        outputs = len(np.unique(self.output))
        return f"RowTable({list(self.values.shape)} of {outputs} outputs, layers {self.layers})"

    def __len__(self) -> int:
        return len(self.values)


def row_table(
    outputs: "Sequence[RequestOutput]",
    point: str = "post_block",
    layers: Sequence[int] | Literal["all"] = "all",
    decode: Callable[[int], str] = str,
) -> RowTable:
    """Put all captured rows of outputs into one array, with prompts and tokens beside it.

    Args:
        outputs: of `LLM.generate` with the consumer `inline`.
        layers: "all" are those that the first output has at the point.
        decode: the text of a token, such as `tokenizer.decode`; not needed where the capture says
            `"tokens": true`.

    Raises:
        ValueError: there are no outputs, or one lacks the rows.
    """
    if not outputs:
        raise ValueError("outputs: there are none")
    layers = _layers_of(outputs, point) if layers == "all" else list(layers)
    values: list[np.ndarray] = []
    sites: list[CapturedRows] = []
    prompts: list[str | None] = []
    tokens: list[str] = []
    for output in outputs:
        for completion in output.outputs:
            rows = stack(completion, point, layers, position=None)[0].transpose(0, 1)
            values.append((rows.float() if rows.dtype == torch.bfloat16 else rows).numpy())
            assert completion.capture_results is not None
            site = completion.capture_results["inline"].payload[point, layers[0]]
            sites.append(site)
            prompts += [output.prompt] * len(site)
            tokens += site.tokens or map(decode, site.token_ids.tolist())
    return RowTable(
        values=np.concatenate(values),
        layers=layers,
        output=np.repeat(np.arange(len(sites)), [len(site) for site in sites]),
        prompts=prompts,
        positions=np.concatenate([site.positions for site in sites]),
        token_ids=np.concatenate([site.token_ids for site in sites]),
        tokens=tokens,
    )


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
        layers = _layers_of(positive, point)
    rows = [stack(outputs, point, layers) for outputs in (positive, negative)]
    vectors = dict(zip(layers, mean_difference(*rows), strict=True))
    save(path, {point: vectors}, model_hint)
    return vectors


def _layers_of(outputs: "Sequence[RequestOutput]", point: str) -> list[int]:
    """The layers that the first output has at a point."""
    results = outputs[0].outputs[0].capture_results if outputs else None
    payload = results["inline"].payload if results and "inline" in results else {}
    found = sorted(layer for at, layer in payload if at == point)
    if not found:
        raise ValueError(f"outputs: the first has no rows at {point}")
    return found
