# SPDX-License-Identifier: Apache-2.0
"""Rows of a model that ends after a layer, in graphs: bit for bit those of the whole.

    python -m tests.gpu.early_stop [--tp 2]

The engines share one compile cache, the whole model's first: code of layers that are not there
must not be found in it. A line a check, exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.features import report
from tests.gpu.model import prompts, save_model

LAST = 3
HOOKS = {"pre_attn": [0, LAST], "post_attn": [2], "post_block": [1, LAST]}


def captured(model: Path, tp: int, seed: int = 1, **options: Any) -> dict[Any, torch.Tensor]:
    """Site -> rows of all prompts, from an engine of its own."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        gpu_memory_utilization=0.3,
        max_model_len=256,
        enable_prefix_caching=False,
        capture_consumers=["inline"],
        **options,
    )
    asked = {"inline": {"hooks": HOOKS, "positions": "all_prompt"}}
    params = SamplingParams(max_tokens=1, detokenize=False, capture=asked)
    ids = [TokensPrompt(prompt_token_ids=each) for each in prompts(16, seed)]
    outputs = llm.generate(ids, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    found: list[Any] = [output.outputs[0].capture_results for output in outputs]
    parts = [results["inline"].payload for results in found]
    return {site: torch.cat([part[site].values for part in parts]) for site in parts[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    # A fork of a process whose threads have computed hangs where the engine computes on the CPU.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(model)
        whole = captured(model, args.tp)
        stopped = captured(model, args.tp, capture_stop_after=LAST)
        other = captured(model, args.tp, seed=2, capture_stop_after=LAST)
    good = True
    for site, rows in whole.items():
        apart = float((rows - stopped[site]).abs().max())
        good &= report(f"{site}: apart from the whole model's", apart, apart == 0)
        count = min(len(rows), len(other[site]))
        moved = float((rows[:count] - other[site][:count]).float().norm(dim=1).mean())
        good &= report(f"{site}: apart from other prompts'", moved, moved > 0.1)
    sys.exit(not good)


if __name__ == "__main__":
    main()
