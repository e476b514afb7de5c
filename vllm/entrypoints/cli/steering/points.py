# SPDX-License-Identifier: Apache-2.0
"""The verb `vllm steering points`: what a model offers, from its config alone.

The model is built without memory for its weights, as the engine would build it, and its layers are
asked what they are wired for. Nothing is loaded and nothing runs.
"""

import argparse
import tempfile

import torch

from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.interventions.worker.attention.layers import attention_of
from vllm.v1.interventions.worker.inner import inner_rows
from vllm.v1.interventions.worker.layers import (
    find_layers,
    head_reads_rows,
    num_lanes,
    own_layers,
    refuse_layers,
    unbound_taps,
)


def list_points(args: argparse.Namespace) -> None:
    """Print what a model offers.

    Args:
        args: the options of `vllm serve`; ranks are not looked at, all offer the same.

    Raises:
        ValueError: the model cannot be steered or captured; the message says why.
    """
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.enable_steering = True
    engine_args.skip_tokenizer_init = True
    for size in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        setattr(engine_args, size, 1)
    config = engine_args.create_engine_config()
    dtype = config.model_config.dtype
    # A process that has an engine has groups already, and keeps them.
    alone = not torch.distributed.is_initialized()
    with tempfile.TemporaryDirectory() as meeting, set_current_vllm_config(config):
        if alone:
            init_distributed_environment(1, 0, f"file://{meeting}/store", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        try:
            with torch.device("meta"), set_default_torch_dtype(dtype):
                model = initialize_model(config)
            heads, inner = attention_of(find_layers(model)), inner_rows(find_layers(model))
        finally:
            if alone:
                cleanup_dist_env_and_memory()
    depth = config.model_config.get_total_num_hidden_layers()
    layers = own_layers(find_layers(model), depth)
    refuse_layers(layers, dtype)
    if missing := sorted(set(range(depth)) - set(layers)):
        raise ValueError(
            f"decoder layers {missing} of {config.model_config.architecture} are of a class that "
            "is not wired for steering or capture"
        )
    taps = {index: unbound_taps(layers[index]) for index in sorted(layers)}
    offered = {index: (*t.points, *t.branches) for index, t in taps.items()}
    width = config.model_config.get_hidden_size()
    name = str(dtype).removeprefix("torch.")
    lanes = num_lanes(layers, config)
    depth, size = len(layers), lanes * width * dtype.itemsize
    of = f"{lanes} lanes of {width}" if lanes > 1 else f"{width}"
    print(f"{config.model_config.architecture}: {depth} layers of {of}, {name}, {size} B a row")
    for first, last, points in runs(offered):
        kind = type(layers[first]).__name__
        print(f"  {_where(first, last)}: {', '.join(points)}  ({kind})")
    ends = ["embed at layer 0"] * (lanes == 1)
    ends += [f"final at layer {depth - 1}"] * head_reads_rows(model, width)
    branches = dict.fromkeys(branch for t in taps.values() for branch in t.branches)
    print(f"  captured, not steered: {', '.join([*ends, *branches])}")
    sizes = {
        index: tuple(f"{point} {number} x {size}" for point, (number, size) in of.points.items())
        for index, of in heads.items()
        if index in layers
    }
    for first, last, points in runs(sizes):
        where = _where(first, last)
        print(f"  heads of {where}, where --capture-points has them: {', '.join(points)}")
    widths = {
        index: tuple(f"{point} {rows.width}" for point, rows in of.items())
        for index, of in inner.items()
        if index in layers and not taps[index].loops
    }
    for first, last, points in runs(widths):
        where = _where(first, last)
        print(f"  within branches of {where}, where --capture-points has them: {', '.join(points)}")
    for first, last, points in runs({n: t.inputs for n, t in taps.items() if t.inputs}):
        where, named = _where(first, last), "--capture-points or --steering-points"
        print(f"  read by branches in {where}, where {named} has it: {', '.join(points)}")


def _where(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def runs(offered: dict[int, tuple[str, ...]]) -> list[tuple[int, int, tuple[str, ...]]]:
    """First and last layer, and the points, of each run of layers that offer the same."""
    made: list[tuple[int, int, tuple[str, ...]]] = []
    for layer, points in offered.items():
        if made and made[-1][1] == layer - 1 and made[-1][2] == points:
            made[-1] = (made[-1][0], layer, points)
        else:
            made.append((layer, layer, points))
    return made
