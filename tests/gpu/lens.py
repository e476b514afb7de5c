# SPDX-License-Identifier: Apache-2.0
"""vLLM-Lens's own tests of steering and capture on a GPU host: CUDA graphs, both model runners, one
GPU or two. A line each test, exit status 1 if one fails that is not listed as impossible.

    python3 -m tests.gpu.lens --prepare build/gpu/lens     # where there is a network, with any pip
    python -m tests.gpu.lens --theirs build/gpu/lens       # on the GPU host
    python -m tests.gpu.lens --theirs build/gpu/lens --gpus 2 [--only test_steering ...]

`--prepare` leaves their wheel in the folder, and what of its tests' needs a GPU host may lack, for
CPython 3.12. With two GPUs every engine has two ranks: tensor parallel ones where a test of theirs
does not ask for two stages, which the V1 runner does not have. Several processes run at a time, so
none may take more than a share of the memory, and few batch sizes get a graph, which saves a minute
each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODULES = {
    1: [
        ["test_steering_offline", "test_activations_offline"],
        ["test_steering", "test_activations_match", "test_activations_chunked_prefill"],
    ],
    # An engine of two ranks takes a minute or two to start, and a module has up to four.
    2: [
        ["test_activations_offline"],
        ["test_steering"],
        ["test_activations_pp"],
        ["test_activations_match"],
        ["test_steering_offline"],
        ["test_activations_chunked_prefill"],
    ],
}
"""GPUs -> which modules of theirs share a process, those with most engines first."""
ENGINE = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2 << 30,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
}
PACKAGES = ("pytest", "pluggy", "iniconfig", "Pygments", "zstandard", "cloudpickle")
"""Of the repository's own pins: what a GPU host may lack."""


def prepare(folder: Path) -> None:
    """Install into `folder` for CPython 3.12 on Linux."""
    pins = Path("requirements")
    ours = [
        line.partition("#")[0].strip()
        for name in ("cpu.txt", "dev.txt")
        for line in (pins / name).read_text().splitlines()
        if line.partition("==")[0] in PACKAGES
    ]
    command = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps"]
    command += ["--ignore-requires-python", "--only-binary", ":all:", "--no-compile"]
    command += ["--target", str(folder), "--python-version", "3.12", "--implementation", "cp"]
    for platform in ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "any"):
        command += ["--platform", platform]
    subprocess.run([*command, *ours], check=True)
    subprocess.run([*command, "-r", str(pins / "lens.txt")], check=True)


def count_tokens() -> int:
    """Tokens of the tests' tokenizer."""
    from transformers import AutoTokenizer

    from tests.http.server import save_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        return len(AutoTokenizer.from_pretrained(folder))


def run_modules(
    theirs: Path, runner: str, gpus: int, modules: list[str], timeout: float, tokens: int
) -> bool:
    """Run modules of theirs in a process, and print how each test ended; whether all is well.

    Args:
        tokens: how many the model is to have: all of them have a text, for texts are compared.
    """
    from tests.gpu.model import save_model
    from tests.http.server import save_tokenizer
    from tests.peers.lens_runs import LAYERS, MODEL, OFFLINE, judged, run

    engine = {**ENGINE, **({"tensor_parallel_size": 2} if gpus == 2 else {})}
    settings = {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # an engine that has ended leaves no memory taken
        "LENS_ENGINE": json.dumps(engine),
        # What waits for ever says where.
        "PYTEST_ADDOPTS": f"-v -o faulthandler_timeout={timeout // 2:g}",
        "PYTHONUNBUFFERED": "1",
    }
    good = True
    with tempfile.TemporaryDirectory() as working:
        model = Path(working) / MODEL
        save_tokenizer(model)
        save_model(model, LAYERS, tokens)
        try:
            chosen = "not pp2" if runner == "v1" else ""
            found = run(Path(working), theirs.resolve(), modules, settings, timeout, chosen)
        except RuntimeError as error:
            print(f"FAIL {runner} {' '.join(modules)}: {error}", flush=True)
            return False
    for module, cases in found.items():
        impossible = OFFLINE.get(module, (0, {}))[1]
        passed, failed = judged(cases)
        print(f"{runner} on {gpus}: {module}: {passed} passed of {len(cases)}", flush=True)
        for name, why in failed.items():
            is_ours = name in impossible and impossible[name] in why
            good &= is_ours
            print(f"  {'refused' if is_ours else 'FAIL'} {name}")
            if not is_ours:
                print(why[-2500:], flush=True)
        good &= passed > 0 or all(c.find("skipped") is not None for c in cases)
    return good


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--theirs", type=Path, default=Path("build/gpu/lens"))
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=1)
    parser.add_argument("--runners", nargs="*", default=["v2", "v1"])
    known = sorted({m for sets in MODULES.values() for modules in sets for m in modules})
    parser.add_argument("--only", nargs="*", choices=known, default=known, help="modules of theirs")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=550)
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare)
        return
    sys.path.insert(0, str(args.theirs.resolve()))  # zstandard, for who lacks it
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    chosen = [[m for m in modules if m in args.only] for modules in MODULES[args.gpus]]
    jobs = [
        (runner, modules)
        for modules in filter(None, chosen)
        for runner in args.runners
        if runner == "v2" or modules != ["test_activations_pp"]
    ]
    # Not in a thread: two at once may not be the first to import what transformers loads late.
    tokens = count_tokens()
    with ThreadPoolExecutor(args.jobs) as pool:
        ran = [
            pool.submit(run_modules, args.theirs, runner, args.gpus, modules, args.timeout, tokens)
            for runner, modules in jobs
        ]
        good = [each.result() for each in ran]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
