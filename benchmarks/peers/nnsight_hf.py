# SPDX-License-Identifier: Apache-2.0
"""Peer: nnsight's traces of transformers' own model. Extraction only.

python -m benchmarks.peers.nnsight_hf --model DIR --stock STOCK

The same model, chunks and pinned memory as in hf_hooks.py. It is not among our requirements:
`pip install nnsight`, or `pip install --target DIR` and DIR at the end of PYTHONPATH.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.hf_hooks import (
    Part,
    Pinned,
    chunks,
    ids,
    load_model,
    mean_size,
    prefill,
    read_one_each,
    wait,
)
from benchmarks.peers.workloads import Answer, Facts, Shape, Timer, arguments, installed, ready

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure(args: argparse.Namespace, answer: Answer) -> None:
    import nnsight

    model, shape, timer = load_model(args, answer), Shape.of(args.model), Timer(args, answer)
    answer.versions["nnsight"] = nnsight.__version__
    traced, pinned = nnsight.NNsight(model), Pinned(args, model.device)
    ready(args)
    few, every = shape.few(args.few), list(range(shape.layers))
    for load in args.extract:
        asked = ids(shape, load.requests, load.prompt, model.device)
        parts = [(part, asked[part]) for part in chunks(args, load)]
        warm_up(model, parts)
        for name, layers in {"all layers": every, f"{len(few)} layers": few}.items():
            work = partial(extract, traced, parts, layers, pinned.rows(len(layers), load))
            facts: Facts = {"delivered": "memory", "row bytes": len(layers) * shape.hidden * 2}
            timer.extract(load, f"nnsight, {name}", work, check=mean_size, facts=facts)


@torch.inference_mode()
def warm_up(model: PreTrainedModel, parts: list[Part]) -> None:
    for _, chunk in parts:
        prefill(model, chunk)


@torch.inference_mode()
def extract(traced: Any, parts: list[Part], layers: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Copy the rows of `layers` to `rows`, [layers, requests, prompt, hidden]; return them."""
    for part, chunk in parts:
        with traced.trace(chunk, use_cache=False, logits_to_keep=1):
            for places, layer in zip(rows, layers, strict=True):
                places[part].copy_(traced.model.layers[layer].output, non_blocking=True)
    wait(chunk.device)
    return read_one_each(rows)


def main() -> None:
    args = arguments(__doc__).parse_args()
    answer = Answer("nnsight_hf")
    if installed(answer, "transformers", "nnsight"):
        measure(args, answer)
    answer.print()


if __name__ == "__main__":
    main()
