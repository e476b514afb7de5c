# SPDX-License-Identifier: Apache-2.0
"""One start of an engine, measured in its own process; `benchmarks.startup` runs it.

    python -m benchmarks.one_start --model DIR --arm NAME [--eager]

Imports, then `LLM(...)`, then one token; where requests may steer, twice two steered ones: graphs
with taps are recorded when they are first needed. The engine core is in this process, so that
torch's counts of device memory are the engine's. Prints a `Start` as the last line of JSON; the
engine's log goes before it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GIB = 1 << 30

Options = Callable[[int, str], dict[str, Any]]
"""Of the number of layers and a folder."""


def _extraction(layers: int, folder: str) -> dict[str, Any]:
    from benchmarks.peers.extract_hidden_states import options

    return options(list(range(layers)), Path(folder))


@dataclass(frozen=True)
class Arm:
    """`tree`: "stock" or "ours"."""

    tree: str
    options: Options = lambda layers, folder: {}


HEADS: dict[str, Any] = {
    "enable_steering": True,
    "steering_families": ["add", "focus"],
    "capture_consumers": ["inline"],
    "capture_points": ["pre_attn", "post_attn", "post_block", "q", "z"],
}
"""Options of an engine that focuses, and reads attention."""


def _everything(layers: int, folder: str) -> dict[str, Any]:
    from vllm.config.points import CAPTURE_POINTS

    return {
        **HEADS,
        "steering_families": ["all", "focus"],
        "capture_points": [*CAPTURE_POINTS],
        "capture_consumers": ["inline", f"filesystem:root={folder}"],
    }


ARMS = {
    "stock": Arm("stock"),
    "off": Arm("ours"),
    "idle": Arm("ours", lambda layers, folder: {"enable_steering": True}),
    "steering + capture": Arm(
        "ours", lambda layers, folder: {"enable_steering": True, "capture_consumers": ["inline"]}
    ),
    "single variant": Arm(
        "ours",
        lambda layers, folder: {
            "enable_steering": True,
            "capture_consumers": ["inline"],
            "single_variant": True,
        },
    ),
    "attention + focus": Arm("ours", lambda layers, folder: HEADS),
    "everything": Arm("ours", _everything),
    "extract_hidden_states": Arm("stock", _extraction),
}
"""The last one keeps the streams after all layers."""

CASES = ("stock", "off", "attention + focus", "everything", "single variant")
"""The arms that are started unless others are named."""


@dataclass
class Start:
    """Seconds, and GiB."""

    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    def print(self) -> None:
        print("\n" + json.dumps(asdict(self)), flush=True)

    @classmethod
    def find(cls, printed: str) -> Start | None:
        for line in reversed(printed.splitlines()):
            if line.startswith('{"seconds":'):
                return cls(**json.loads(line))
        return None


class Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        before, self._last = self._last, time.perf_counter()
        return self._last - before


def device_used() -> float:
    """GiB of the device in use by anybody, as its driver says; 0 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    index = current_platform.visible_device_id_to_physical_device_id(0)
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB


def host_memory() -> dict[str, float]:
    """GiB of this process's memory: now, and at most."""
    status = Path("/proc/self/status").read_text()
    sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
    return {
        "host memory": int(sizes["VmRSS"]) / (1 << 20),
        "peak host memory": int(sizes["VmHWM"]) / (1 << 20),
    }


def start(args: argparse.Namespace) -> Start:
    clock, found = Clock(), Start()
    import torch

    from vllm import LLM, SamplingParams

    found.seconds["imports"] = clock.lap()
    need_tree(ARMS[args.arm].tree)
    before = device_used()
    config = json.loads((args.model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        options = ARMS[args.arm].options(layers, folder)
        clock.lap()
        llm = LLM(
            **engine_options(args),
            **options,
        )
        found.seconds["engine"] = clock.lap()
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": [1, 2, 3]}]
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        if len(output.outputs[0].token_ids) != 1:
            raise SystemExit("no token came")
        found.seconds["first token"] = clock.lap()
        if "enable_steering" in options:
            vectors = {"post_block": {layers // 2: torch.full([config["hidden_size"]], 0.1)}}
            params = SamplingParams(
                max_tokens=2, temperature=0.0, detokenize=False, steering_vectors=vectors
            )
            for name in ("first steered tokens", "next steered tokens"):
                llm.generate(prompts, params, use_tqdm=False)
                found.seconds[name] = clock.lap()
    if torch.cuda.is_available():
        found.memory |= {
            "allocated": torch.cuda.memory_allocated() / GIB,
            "peak allocated": torch.cuda.max_memory_allocated() / GIB,
            "peak reserved": torch.cuda.max_memory_reserved() / GIB,
            "device memory": device_used() - before,
        }
    found.memory |= host_memory()
    if ARMS[args.arm].tree == "ours":
        found.memory["arenas"] = arenas(llm)
    cache = llm.llm_engine.vllm_config.cache_config
    found.memory["KV cache tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
    return found


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of every engine that is started by `arguments`."""
    return {
        "model": str(args.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": args.max_model_len,
        "kv_cache_memory_bytes": args.kv_bytes,
        "gpu_memory_utilization": 0.1,  # others may start beside it; the line above decides
        "enforce_eager": args.eager,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


def need_tree(tree: str) -> None:
    import vllm

    at = Path(vllm.__file__).parent
    if (at / "v1/interventions/worker/runner.py").exists() != (tree == "ours"):
        raise SystemExit(f"vllm is {at}, which is not {tree}: see PYTHONPATH")


def arenas(llm: Any) -> float:
    """GiB of what our objects in the worker hold on the device."""
    from benchmarks.arenas import tensor_bytes

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return tensor_bytes(runner.interventions, runner.device) / GIB


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What a start and all of them share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kv-bytes", type=int, default=8 << 30)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--eager", action="store_true", help="no compilation, as on a CPU")
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--arm", required=True, choices=list(ARMS))
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    start(args).print()


if __name__ == "__main__":
    main()
