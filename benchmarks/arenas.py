# SPDX-License-Identifier: Apache-2.0
"""Device memory that steering and capture set aside: a table of shapes and options.

    python -m benchmarks.arenas [--tokens 8192] [--json FILE]

Computed here from the options, and checked: `WorkerInterventions` allocates the same, and
`check` (on a GPU also torch's count of allocated bytes) says how much that came to. A
difference above 1 % ends the script with status 1. On a GPU rows leave from a second capture
buffer. Capture's map of tokens is kept on the host a second time.

The cases of upstream's `extract_hidden_states` are computed alone (`benchmarks.startup` measures
them): it stages a step's hidden states, and keeps those of all tokens in the key-value cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.results import Row, Run, add_arguments, publish, setup
from vllm.config import ParallelConfig
from vllm.config.capture import PROJECTION_ROWS, CaptureConfig
from vllm.config.points import STREAM_POINTS
from vllm.config.steering import FAMILIES, SteeringConfig
from vllm.v1.interventions.messages import num_table_rows
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.worker.runner import WorkerInterventions
from vllm.v1.steering_formula import Scalars

MIB, WORD, DTYPE = 1 << 20, 4, torch.bfloat16
_NAME = str(DTYPE).removeprefix("torch.")

Facts = dict[str, float | int | str | bool]

SHAPES = {"1B": (16, 2048), "8B": (32, 4096), "70B": (80, 8192)}
"""(layers, hidden size) of Llama 3."""

KV_WIDTH = {"1B": 8 * 64, "8B": 8 * 128, "70B": 8 * 128}
"""Of keys, and of values, of a layer: heads x their size."""


@dataclass(frozen=True)
class Options:
    """None where the feature is off."""

    steering: dict[str, Any] | None = None
    capture: dict[str, Any] | None = None


@dataclass
class Parts:
    """Bytes on the device, of one worker that has all layers."""

    of: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.of.values())


INLINE = {"capture_consumers": ["inline"]}

CASES = {
    "steering, 1 config": Options({"max_steering_configs": 1}),
    "steering, 32 configs (default)": Options({}),
    "steering, 256 configs": Options({"max_steering_configs": 256}),
    "steering, 32 configs, post_block alone": Options({"steering_points": ["post_block"]}),
    "steering, 32 configs, all families": Options({"steering_families": [*FAMILIES]}),
    "capture (default, 1 GiB)": Options(None, INLINE),
    "capture, 2 GiB": Options(None, {**INLINE, "capture_buffer_bytes": 2 << 30}),
    "steering and capture (defaults)": Options({}, INLINE),
}


def configs(options: Options) -> tuple[SteeringConfig, CaptureConfig]:
    steering = SteeringConfig(enable_steering=options.steering is not None)
    if options.steering is not None:
        steering = SteeringConfig(enable_steering=True, **options.steering)
    return steering, CaptureConfig(**(options.capture or {}))


def computed(options: Options, layers: int, hidden: int, tokens: int, gpu: bool) -> Parts:
    """What the options come to, `tokens` being max_num_batched_tokens."""
    steering, capture = configs(options)
    parts = Parts({"what each token does": 6 * tokens * WORD})
    if steering.enable_steering:
        sites = layers * len(set(steering.steering_points))
        rows = num_table_rows(steering.max_steering_configs)
        parts.of["table"] = sites * rows * hidden * DTYPE.itemsize
        if steering.has_ops:
            rows, lists = steering.max_steering_rows + 1, steering.max_steering_ops
            gated = "gate" in steering.steering_families
            parts.of["vectors of ops"] = rows * (hidden + len(Scalars._fields) + 2) * WORD
            parts.of["programs"] = sites * rows * lists * WORD * (2 if gated else 1)
    if capture.enabled:
        row = hidden * DTYPE.itemsize
        parts.of["capture buffer"] = capture.capture_buffer_bytes // row * row
        if gpu:
            parts.of["rows on their way to the host"] = parts.of["capture buffer"] // 2
        parts.of["map of captured tokens"] = layers * len(STREAM_POINTS) * tokens * WORD
        parts.of["projections"] = PROJECTION_ROWS * hidden * WORD
    return parts


def upstream(
    layers: int, extracted: int, hidden: int, kv_width: int, tokens: int
) -> tuple[float, Facts]:
    """MiB on the device, and what else is to be known, of `extracted` layers."""
    row = extracted * hidden * DTYPE.itemsize
    kv = layers * 2 * kv_width * DTYPE.itemsize
    return tokens * row / MIB, {
        "key-value cache, KiB a token": (kv + row) / 1024,
        "without it": kv / 1024,
    }


def allocated(
    options: Options, layers: int, hidden: int, tokens: int, device: torch.device
) -> dict[str, int]:
    """What a worker allocates: the bytes of its tensors, on a GPU also by torch's count."""
    steering, capture = configs(options)
    config: Any = SimpleNamespace(
        steering_config=steering,
        capture_config=capture,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens),
        parallel_config=ParallelConfig(),
        speculative_config=None,
        kv_transfer_config=None,
    )
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    made = WorkerInterventions(config, device)
    shape = TapShape(hidden, _NAME, dict.fromkeys(range(layers), LayerShape(STREAM_POINTS)))
    made._allocate(shape)
    found = {"tensors": tensor_bytes(made, device)}
    if device.type == "cuda":
        found["torch"] = torch.cuda.memory_allocated() - before
    return found


def tensor_bytes(owner: object, device: torch.device) -> int:
    """Of all tensors on `device` that `owner` holds, in whatever objects of ours; views once."""
    storages = {}
    for tensor in _tensors(owner, set()):
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(owner: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, torch.Tensor):
        yield owner
    elif isinstance(owner, dict):
        for value in owner.values():
            yield from _tensors(value, seen)
    elif isinstance(owner, list | tuple):
        for value in owner:
            yield from _tensors(value, seen)
    elif type(owner).__module__.startswith(("vllm.v1.interventions.worker.", _LAYERS)):
        yield from _tensors(vars(owner), seen)


_LAYERS = "vllm.model_executor.layers.steering_terms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192, help="max_num_batched_tokens")
    add_arguments(parser)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, wrong = [], 0
    for name, (layers, hidden) in SHAPES.items():
        at = {"model": f"{name}, {layers} x {hidden}"}
        for case, options in CASES.items():
            parts = computed(options, layers, hidden, args.tokens, device.type == "cuda")
            check = allocated(options, layers, hidden, args.tokens, device)
            wrong += any(abs(n - parts.total) > 0.01 * parts.total for n in check.values())
            facts: Facts = {part: size / MIB for part, size in parts.of.items()}
            facts |= {f"check, {by}": size / MIB for by, size in check.items()}
            rows.append(Row(case, "device memory", "MiB", [parts.total / MIB], at, facts))
        for extracted in (4, layers):
            case = f"extract_hidden_states, {extracted} layers"
            size, facts = upstream(layers, extracted, hidden, KV_WIDTH[name], args.tokens)
            rows.append(Row(case, "device memory", "MiB", [size], at, facts))
    told = setup(args, dtype=str(DTYPE), device=str(device))
    publish(Run("arenas", told, rows, baselines=(), paired=False), args.json)
    if wrong:
        sys.exit(f"{wrong} of {len(rows)} differ from what is allocated")


if __name__ == "__main__":
    main()
