# SPDX-License-Identifier: Apache-2.0
"""Peer: nnsight's traces of transformers' own model. Extraction only.

python -m benchmarks.peers.nnsight_hf --model DIR --stock STOCK

The same model, batch and memory as in hf_hooks.py. It is not among our requirements:
`pip install nnsight`, or `pip install --target DIR` and DIR at the end of PYTHONPATH.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks.peers.hf_hooks import host_rows, ids, load, wait
from benchmarks.peers.workloads import PROMPT, Answer, Shape, Timer, arguments, installed, ready


def measure(args: argparse.Namespace, answer: Answer) -> None:
    import nnsight

    model, shape, timer = load(args, answer), Shape.of(args.model), Timer(args, answer)
    answer.versions["nnsight"] = nnsight.__version__
    traced = nnsight.NNsight(model)
    asked = ids(shape, args.extract_requests, args.extract_prompt, model.device)
    ready(args)
    few = shape.few(args.few)
    for name, layers in {
        f"{len(few)} layers": few,
        "all layers": list(range(shape.layers)),
    }.items():
        rows = host_rows(len(layers), asked, shape.hidden)
        work = partial(extract, traced, asked, layers, rows)
        work()
        facts: dict[str, Any] = {"row bytes": len(layers) * shape.hidden * 2}
        facts["mean |row|"] = rows[-1, 0].float().abs().mean().item()
        timer.time(PROMPT, f"nnsight, {name}", work, delivered="memory", **facts)


@torch.inference_mode()
def extract(traced: Any, asked: torch.Tensor, layers: list[int], rows: torch.Tensor) -> None:
    with traced.trace(asked, use_cache=False, logits_to_keep=1):
        for place, layer in zip(rows, layers, strict=True):
            place.copy_(traced.model.layers[layer].output, non_blocking=True)
    wait(asked.device)


def main() -> None:
    args = arguments(__doc__).parse_args()
    answer = Answer("nnsight_hf")
    if installed(answer, "transformers", "nnsight"):
        measure(args, answer)
    answer.print()


if __name__ == "__main__":
    main()
