# SPDX-License-Identifier: Apache-2.0
"""Peer: upstream's own `extract_hidden_states`, in the tree --stock.

PYTHONPATH=STOCK:. python -m benchmarks.peers.extract_hidden_states --model DIR --stock STOCK

It takes the place of a speculative method and of a KV connector, for a list of layers given at
start-up (--layers few or all), and every request is extracted, so its calls are warmed up by one
that extracts. It writes a file a request; "memory" is its own `load_hidden_states` on these files,
in eight threads, as there is no other way to the rows. It syncs none, so it is at its best in a
folder in memory. It needs a GPU: the connector pins memory.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.disk import filesystem_of
from benchmarks.peers.engine import Asks, describe, need_stock, prepare, start, stop
from benchmarks.peers.workloads import Answer, Facts, Load, Timer, arguments, ready

if TYPE_CHECKING:
    import torch

    from vllm import LLM

CASE = "extract_hidden_states"
READERS = 8


def options(layers: list[int], root: Path) -> dict[str, Any]:
    """Engine options for the streams after `layers`."""
    ids = [layer + 1 for layer in layers]  # 1 is after the first block
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(root)},
        },
    }


class Extraction:
    def __init__(self, args: argparse.Namespace, answer: Answer) -> None:
        self._args, self._answer = args, answer
        self._asks, self._timer = Asks(args), Timer(args, answer)
        self._root = args.files / f"benchmark-extract-hidden-states-{args.layers}"
        self._readers = ThreadPoolExecutor(READERS)

    def run(self) -> None:
        args, shape = self._args, self._asks.shape
        layers = shape.few(args.few) if args.layers == "few" else list(range(shape.layers))
        name = f"{len(layers)} layers" if args.layers == "few" else "all layers"
        llm = start(args, **options(layers, self._root))
        files = f"one a request, not synced, in {args.files} ({filesystem_of(args.files)})"
        describe(self._answer, llm, files=files, readers=str(READERS))
        ready(args)
        self._clean()
        for load in args.extract:
            self._extract(llm, load, name, layers)
        outputs = self._asks.generate(llm)
        self._timer.generate(
            f"{CASE}, {name} of the prompt",
            partial(self._asks.generate, llm),
            self._clean,
            {"tokens like the one before": _repeated(outputs)},
        )
        stop(llm)

    def _extract(self, llm: LLM, load: Load, name: str, layers: list[int]) -> None:
        facts: Facts = {"row bytes": len(layers) * self._asks.shape.hidden * 2}
        self._written(llm, load)
        self._clean()
        self._timer.extract(
            load,
            f"{CASE}, {name}, files",
            partial(self._written, llm, load),
            clean=self._clean,
            facts={"delivered": "files", **facts},
        )
        self._timer.extract(
            load,
            f"{CASE}, {name}, loaded",
            partial(self._loaded, llm, load),
            check=partial(self._check, load, len(layers)),
            clean=self._clean,
            facts={"delivered": "memory", **facts},
        )

    def _paths(self, llm: LLM, load: Load) -> list[str]:
        outputs = self._asks.extract(llm, load)
        return [output.kv_transfer_params["hidden_states_path"] for output in outputs]

    def _written(self, llm: LLM, load: Load) -> list[str]:
        """Ends when every file is complete: its writer then releases a lock."""
        paths = self._paths(llm, load)
        for path in paths:
            with open(path + ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
        return paths

    def _loaded(self, llm: LLM, load: Load) -> list[torch.Tensor]:
        """The rows of each request, [tokens, layers, hidden], one number of each read."""
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            load_hidden_states,
        )

        files = self._readers.map(load_hidden_states, self._paths(llm, load))
        found = [file["hidden_states"] for file in files]
        for rows in found:
            rows[-1, -1, -1].item()
        return found

    def _check(self, load: Load, layers: int, found: list[torch.Tensor]) -> Facts:
        shape = (load.prompt, layers, self._asks.shape.hidden)
        for rows in found:
            if rows.shape != shape:
                raise SystemExit(f"hidden states {tuple(rows.shape)}, not {shape}")
        return {"mean |row|": found[0][:, -1].float().abs().mean().item()}

    def _clean(self) -> None:
        """The files of generation were written, too, but nobody waited for them."""
        shutil.rmtree(self._root, ignore_errors=True)


def _repeated(outputs: list[Any]) -> float:
    """The share of generated tokens that are like the one before: its drafts, so accepted."""
    same = total = 0
    for output in outputs:
        ids = output.outputs[0].token_ids
        same += sum(a == b for a, b in pairwise(ids))
        total += len(ids) - 1
    return same / total if total else 0.0


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", choices=("few", "all"), default="all")
    args = parser.parse_args()
    answer = Answer("extract_hidden_states")
    # In the asking process the engine would take its last step when the last request ends, and it
    # writes files in the step after that.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    prepare()
    need_stock(args.stock)
    Extraction(args, answer).run()
    answer.print()


if __name__ == "__main__":
    main()
