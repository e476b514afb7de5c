# SPDX-License-Identifier: Apache-2.0
"""Upstream's offloading connector on a GPU: what is loaded is what acts on it, and rows that are
wanted are computed.

    python -m tests.gpu.offload

The prefix cache is emptied between requests, so that blocks come from the host or are computed.
Prints one JSON object a check; exit status 1 if one fails.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu.model import VOCAB, save_model
from tests.gpu.sleep import Report, random_vector

LENGTH, LAST = 200, 199
PATIENCE = 30.0
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steered": {"steering_vectors": {"post_block": {2: random_vector(1)}}},
    "module": {"steering_modules": [("mood", 1.0)]},
}


def main() -> int:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, VOCAB, (LENGTH,), generator=generator).tolist()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model")
        llm = LLM(
            str(Path(folder) / "model"),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=256,
            gpu_memory_utilization=0.3,
            enforce_eager=True,
            enable_prefix_caching=True,
            enable_steering=True,
            capture_consumers=["inline"],
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"cpu_bytes_to_use": 1 << 30},
            ),
        )
        llm.steering.register_module("mood", {"post_block": {3: random_vector(2)}})

        def ask(positions: Any, fields: dict[str, Any]) -> tuple[int, torch.Tensor]:
            """Tokens that were not computed, and rows of the layer before the last."""
            hooks = {"hooks": {"post_block": [-2]}, "positions": positions}
            params = SamplingParams(
                max_tokens=2, temperature=0, detokenize=False, capture={"inline": hooks}, **fields
            )
            prompts: list[Any] = [{"prompt_token_ids": prompt}]
            (output,) = llm.generate(prompts, params, use_tqdm=False)
            results: Any = output.capture_results
            (rows,) = results["inline"].payload.values()
            # Blocks are stored in the steps that follow, and kept until then.
            until = time.monotonic() + PATIENCE
            while not llm.reset_prefix_cache() and time.monotonic() < until:
                llm.llm_engine.step()
            return output.num_cached_tokens or 0, rows.values.float()

        first = {name: ask("all_prompt", fields) for name, fields in FIELDS.items()}
        for name, (cached, _) in first.items():
            report(f"{name}: nobody else's blocks are loaded", cached, cached == 0)
        plain = first["plain"][1]
        for name in ("steered", "module"):
            moved = float((first[name][1] - plain).norm() / plain.norm())
            report(f"{name}: the rows moved", round(moved, 3), moved > 0.1)
        for name, fields in FIELDS.items():
            cached, row = ask([LAST], fields)
            want = first[name][1][LAST:]
            error = float((row - want).norm() / want.norm())
            report(f"{name}: its own blocks are loaded", cached, LENGTH // 2 < cached <= LAST)
            report(f"{name}: and the last row is the same", error, error <= 0.03)
            cached, rows = ask("all_prompt", fields)
            error = float((rows - first[name][1]).norm() / rows.norm())
            report(f"{name}: wanted rows are computed", cached, cached == 0)
            report(f"{name}: and are the same", error, error <= 0.01)
        try:
            llm.steering.set({"pre_attn": {1: random_vector(5)}})
        except ValueError as error:
            report("global vectors are refused", str(error)[:60], "kv-transfer" in str(error))
        else:
            report("global vectors are refused", None, False)
        llm.llm_engine.engine_core.shutdown()
    return report.status


if __name__ == "__main__":
    sys.exit(main())
