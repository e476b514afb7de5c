# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake on a GPU: what steers is back afterwards, bit for bit.

    python -m tests.gpu.sleep [--eager]

Level 1 keeps the weights on the host, level 2 forgets them, so that they are loaded again. Either
way the tables of steering are gone, and the scheduler sends all of them again. Prints one JSON
object a check; exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.model import HIDDEN, VOCAB, save_model
from tests.gpu.steering import FAMILIES

Rows = dict[tuple[str, int], torch.Tensor]


class Report:
    """Prints checks, one JSON object each; `status` is 1 once one has failed."""

    status = 0

    def __call__(self, check: str, value: Any, ok: bool) -> None:
        self.status |= not ok
        print(json.dumps({"check": check, "value": value, "ok": ok}), flush=True)


def random_vector(seed: int, norm: float = 40.0) -> torch.Tensor:
    values = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))
    return norm * values / values.norm()


def asks() -> list[dict[str, Any]]:
    """Vectors, a module, positions, an op, globals alone, and nothing at all."""
    vectors = {"post_block": {2: random_vector(1)}}
    entry = {"vector": random_vector(2), "positions": [3, "last_prompt", 45]}
    ablate = {"op": "ablate", "point": "post_attn", "layers": [4], "direction": random_vector(3)}
    return [
        {"steering_vectors": vectors},
        {"steering_modules": [("mood", 0.5)]},
        {"steering_vectors": {"pre_attn": {5: entry}}},
        {"steering": [ablate]},
        {},
        {"steering_inherit_global": False},
    ]


def served(llm: Any) -> list[tuple[list[int], Rows]]:
    """Tokens and rows of every ask, one at a time, so that batches are the same each time."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, VOCAB, (40,), generator=generator).tolist()
    capture = {"inline": {"hooks": {"post_block": "all"}, "positions": "all"}}
    answers = []
    for fields in asks():
        params = SamplingParams(
            max_tokens=12,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            capture=capture,
            **fields,
        )
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        payload = output.outputs[0].capture_results["inline"].payload
        rows = {site: captured.values for site, captured in payload.items()}
        answers.append((list(output.outputs[0].token_ids), rows))
    return answers


def same(one: tuple[list[int], Rows], other: tuple[list[int], Rows]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][s], other[1][s]) for s in one[1])


def moved(one: Rows, other: Rows) -> float:
    """Largest relative L2 distance of a site's prompt rows."""
    return max(
        float((one[s][:40].float() - other[s][:40].float()).norm() / one[s][:40].float().norm())
        for s in one
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true", help="without compilation and graphs")
    eager = parser.parse_args().eager
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model")
        llm = LLM(
            str(Path(folder) / "model"),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=256,
            gpu_memory_utilization=0.3,
            enforce_eager=eager,
            enable_sleep_mode=True,
            enable_steering=True,
            steering_families=FAMILIES,
            capture_consumers=["inline"],
        )
        llm.steering.register_module("mood", {"post_block": {6: random_vector(4)}})
        llm.steering.set({"pre_attn": {1: random_vector(5)}})
        llm.steering.set({"post_attn": {3: random_vector(6)}}, tier="decode")
        state = llm.steering.state()
        before = served(llm)
        report = Report()
        repeated = [same(a, b) for a, b in zip(before, served(llm), strict=True)]
        report("the same twice, without sleep", repeated, all(repeated))
        # The twin: each ask but the last differs from nothing at all.
        distances = [round(moved(before[-1][1], rows), 3) for _, rows in before[:-1]]
        report("steering moves the rows", distances, min(distances) >= 0.05)
        for level in (1, 2):
            llm.sleep(level=level)
            if level == 1:
                llm.wake_up()
            else:
                llm.wake_up(tags=["weights"])
                llm.collective_rpc("reload_weights")
                llm.wake_up(tags=["kv_cache"])
            after = served(llm)
            equal = [same(a, b) for a, b in zip(before, after, strict=True)]
            report(f"after sleep level {level}", equal, all(equal))
            report(f"state after level {level}", "", llm.steering.state() == state)
        llm.steering.clear()
        cleared = served(llm)
        report("cleared after waking", "", same(cleared[4], before[-1]))
        llm.llm_engine.engine_core.shutdown()
    return report.status


if __name__ == "__main__":
    sys.exit(main())
