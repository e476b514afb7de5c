# SPDX-License-Identifier: Apache-2.0
"""Engines that start one after another on one compile cache: what is compiled and what is loaded,
and that an engine whose taps nobody uses computes bit for bit what one without them does.

    python -m tests.gpu.starts [--stock DIR]

A process a start, FULL_AND_PIECEWISE. `--stock`: upstream's tree, compared too. An option that
changes the traced code changes the artifact of the form with taps only; the plain form's artifact
is the one of an engine without steering and capture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from patches.taps.rows import ALL_POINTS
from tests.gpu.model import HIDDEN, LAYERS, prompts, save_model

ENABLED = {"enable_steering": True, "capture_consumers": ["inline"]}
BATCHES = (1, 7, 13, 32)

Expected = tuple[int, int] | None
"""(artifacts compiled, artifacts loaded), None for not ours to say."""

STARTS: list[tuple[str, dict[str, Any], Expected]] = [
    ("off", {}, (1, 0)),
    ("enabled, first", ENABLED, (1, 1)),
    ("enabled, again", ENABLED, (0, 2)),
    ("one slot more", {**ENABLED, "max_steering_configs": 33}, (1, 1)),
    ("fewer points", {**ENABLED, "steering_points": ["post_block"]}, (1, 1)),
    ("steering only", {"enable_steering": True}, (1, 1)),
    ("steering only, again", {"enable_steering": True}, (0, 2)),
    ("off, again", {}, (0, 1)),
]


def serve(model: Path, options: dict[str, Any], steer: bool) -> dict[str, Any]:
    """In a process of its own: start, and digest tokens and log-probabilities."""
    import torch

    import vllm
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter

    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.05,
        disable_log_stats=True,
        enable_prefix_caching=False,
        seed=0,
        **options,
    )
    fields: dict[str, Any] = {}
    if steer:
        vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
        fields["steering_vectors"] = {p: {LAYERS // 2: vector} for p in ALL_POINTS}
    params = SamplingParams(
        max_tokens=16,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=3,
        prompt_logprobs=0,
        **fields,
    )
    digest = hashlib.sha256()
    for batch in BATCHES:
        fed: Any = [{"prompt_token_ids": t} for t in prompts(batch, seed=batch)]
        outputs: list[Any] = llm.generate(fed, params, use_tqdm=False)
        for output in outputs:
            [completion] = output.outputs
            at = [*output.prompt_logprobs[1:], *completion.logprobs]
            said = [(token, lp.logprob) for where in at for token, lp in where.items()]
            digest.update(repr((list(completion.token_ids), said)).encode())
    return {
        "tree": vllm.__file__,
        "compiled": compilation_counter.num_aot_compiles,
        "loaded": compilation_counter.num_aot_artifacts_loaded,
        "digest": digest.hexdigest()[:16],
    }


def start(
    model: Path, cache: Path, options: dict[str, Any], steer: bool = False, tree: str = ""
) -> dict[str, Any]:
    env = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if tree:
        path = [tree, os.environ.get("PYTHONPATH", ""), os.getcwd()]  # its dependencies are ours
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    work = json.dumps([str(model), options, steer])
    command = [sys.executable, "-m", "tests.gpu.starts", "--serve", work]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tree"')]
    if not lines:
        return {"tree": "", "digest": "", "log": done.stderr[-3000:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stock", default="")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        model, options, steer = args.serve
        print(json.dumps(serve(Path(model), options, steer)), flush=True)
        return
    good, digests = True, {}
    with tempfile.TemporaryDirectory() as folder:
        model, cache = Path(folder) / "model", Path(folder) / "cache"
        save_model(model)
        if args.stock:  # first: it is what the others are compared with
            tree = str(Path(args.stock).absolute())
            found = start(model, Path(folder) / "stock", {}, tree=tree)
            print(f"stock upstream: {found}", flush=True)
            assert found["tree"].startswith(tree), found
            digests["stock upstream"] = found["digest"]
        for name, options, expected in STARTS:
            found = start(model, cache, options)
            made = found.get("compiled"), found.get("loaded")
            digests[name] = found["digest"]
            ok = made == expected and bool(found["digest"])
            good &= ok
            seen = f"compiled, loaded = {made}, bits {found['digest']}"
            print(f"{'ok  ' if ok else 'FAIL'} {name:22} {seen}", flush=True)
            print(found.get("log", ""), end="")
        steered = start(model, cache, ENABLED, steer=True)
    same = len(set(digests.values())) == 1
    differs = steered["digest"] not in digests.values()
    print(f"{'ok  ' if same else 'FAIL'} the same bits without requests that steer: {digests}")
    print(f"{'ok  ' if differs else 'FAIL'} steered ones differ: {steered['digest']}")
    sys.exit(0 if good and same and differs else 1)


if __name__ == "__main__":
    main()
