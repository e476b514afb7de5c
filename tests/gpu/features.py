# SPDX-License-Identifier: Apache-2.0
"""Features of a sparse autoencoder on a GPU, in graphs: read against float64, written by name.

    python -m tests.gpu.features [--tp 2]

Activations are made of the rows that the same request captured, with the bfloat16 matrices in
float64. A line a check, exit status 1 if one fails.
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
from safetensors.torch import save_file

from tests.gpu.model import HIDDEN, prompts, save_model

LAYER, FEATURES, TOP = 5, 16_384, 32
LIMIT, APART = 2e-3, 0.05
"""Most error of an activation, which are of order one, and least difference of another's."""


def save(folder: Path) -> dict[str, torch.Tensor]:
    """Write a JumpReLU autoencoder as SAELens does, in bfloat16; return its tensors."""
    generator = torch.Generator().manual_seed(3)
    encoder = torch.randn(HIDDEN, FEATURES, generator=generator) / HIDDEN**0.5
    tensors = {
        "W_enc": encoder.bfloat16(),
        "W_dec": encoder.T.contiguous().bfloat16(),
        "b_enc": torch.randn(FEATURES, generator=generator) / 4,
        "b_dec": torch.zeros(HIDDEN),
        "threshold": torch.full((FEATURES,), 1.0),
    }
    folder.mkdir()
    save_file(tensors, folder / "sae_weights.safetensors")
    config = {"architecture": "jumprelu", "apply_b_dec_to_input": False}
    (folder / "cfg.json").write_text(json.dumps(config))
    return tensors


def report(check: str, value: float, ok: bool) -> bool:
    """Print a line."""
    print(f"{'ok  ' if ok else 'FAIL'} {check:55} {value:.2g}", flush=True)
    return ok


def read(rows: Any, made: Any, tensors: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """Return the worst error of the top activations, the mean of neighbours', and the worst of what
    the decoder leaves, relative."""
    encoder, decoder = (tensors[name].double() for name in ("W_enc", "W_dec"))
    x = rows.values.double()
    z = x @ encoder + tensors["b_enc"].double()
    f = z.where(z > 1.0, 0.0)
    sure = (z - 1.0).abs().min(1).values > 1e-5
    best = f.topk(TOP).values
    own = f.gather(1, made.top_ids.long().clamp(min=0))
    error = float((own - made.top_values).abs()[sure].max())
    error = max(error, float((best - made.top_values).abs().max()))
    neighbours = f.gather(1, (made.top_ids.long() + 1) % FEATURES)
    other = float((neighbours - made.top_values).abs().mean())
    left = (x - f @ decoder).norm(dim=1)
    return error, other, float(((made.error - left) / left).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    # A fork of a process whose threads have computed hangs where the engine computes on the CPU.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.pilot import Autoencoder

    with tempfile.TemporaryDirectory() as folder:
        model, sae = Path(folder) / "model", Path(folder) / "sae"
        save_model(model)
        tensors = save(sae)
        llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            tensor_parallel_size=args.tp,
            gpu_memory_utilization=0.3,
            max_model_len=256,
            enable_steering=True,
            steering_families=["add", "feature", "gate"],
            capture_consumers=["inline"],
            features=[f"sae={sae}@post_block.{LAYER}"],
        )
        hooks = {"post_block": [LAYER]}
        asked: list[dict[str, Any]] = [
            {"hooks": hooks, "positions": "all"},
            {"features": {"name": "sae", "top": TOP, "error": True}, "positions": "all"},
        ]
        named = {"op": "feature", "features": "sae", "id": 77, "value": 9.0}
        written = Autoencoder.load(sae).op(77, "post_block", LAYER, value=9.0)
        cases: dict[str, list[dict[str, Any]]] = {
            "plain": [],
            "named": [named],
            "written": [written],
        }
        good, by_case = True, dict[str, torch.Tensor]()
        for case, ops in cases.items():
            fields: dict[str, Any] = {"capture": {"inline": asked}}
            if ops:
                fields["steering"] = ops
            params = SamplingParams(
                max_tokens=24, temperature=0, ignore_eos=True, detokenize=False, **fields
            )
            ids = [TokensPrompt(prompt_token_ids=each) for each in prompts(16)]
            outputs: list[Any] = llm.generate(ids, params, use_tqdm=False)
            results = [output.outputs[0].capture_results for output in outputs]
            pairs = [
                [next(iter(r[f"inline[{i}]"].payload.values())) for i in range(2)] for r in results
            ]
            found = torch.tensor([read(rows, made, tensors) for rows, made in pairs])
            error, other, left = found.max(0).values.tolist()
            good &= report(f"{case}: activations against float64", error, error <= LIMIT)
            good &= report(f"{case}: another feature's", other, other >= APART)
            good &= report(f"{case}: what the decoder leaves", left, left <= 5e-3)
            by_case[case] = torch.cat([rows.values for rows, _ in pairs]).float()
        same = float((by_case["named"] - by_case["written"]).abs().max())
        good &= report("by name as by vectors", same, same == 0)
        moved = float((by_case["named"] - by_case["plain"]).norm(dim=1).min())
        good &= report("each row moves", moved, moved > 0.1)
        z = by_case["named"].double() @ tensors["W_enc"][:, 77].double() + float(
            tensors["b_enc"][77]
        )
        gain = float(tensors["W_enc"][:, 77].double() @ tensors["W_dec"][77].double())
        before = by_case["plain"][:1].double() @ tensors["W_enc"][:, 77].double()
        was = float(before[0] + tensors["b_enc"][77])
        want = was + (9.0 - (was if was > 1 else 0.0)) * gain
        off = abs(float(z[0]) - want) / 9
        good &= report("the activation of the first row is as wanted", off, off < 0.02)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
