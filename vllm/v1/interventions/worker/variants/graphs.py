# SPDX-License-Identifier: Apache-2.0
"""State that upstream's owners of CUDA graphs keep, and the graphs that they record, and when."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm.envs as envs
from vllm.compilation import breakable_cudagraph
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager


def graphs_of(graph_owner: Any) -> tuple[str, ...]:
    """The attributes in which a graph owner keeps the graphs of whole forwards, and which sizes it
    has; none if it keeps none. Graphs of pieces hang off the compiled code."""
    if isinstance(graph_owner, CUDAGraphWrapper):
        return ("concrete_cudagraph_entries",)
    if isinstance(graph_owner, CudaGraphManager):
        return ("graphs", "_candidates", "_capture_descs")
    return ()


def no_graphs(graph_owner: Any, thinned: bool, of_pieces: bool) -> dict[str, Any]:
    """Return the attributes by name that a graph owner has before any graph is recorded.

    Args:
        thinned: whether its graphs are to have the sizes that `coarse` leaves.
        of_pieces: whether it is to have graphs of pieces.
    """
    state: dict[str, Any] = {name: {} for name in graphs_of(graph_owner)}
    if isinstance(graph_owner, CudaGraphManager):
        planned = copy.copy(graph_owner)
        vars(planned).update(state)
        compilation = planned.compilation_config = copy.copy(graph_owner.compilation_config)
        if thinned and compilation.cudagraph_capture_sizes:
            compilation.cudagraph_capture_sizes = coarse(compilation.cudagraph_capture_sizes)
        planned._init_candidates()
        if not of_pieces:
            state["_capture_descs"].pop(CUDAGraphMode.PIECEWISE, None)
    return state


@contextmanager
def planning(
    manager: CudaGraphManager,
    descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]],
    warms_up: bool = True,
    records: bool = True,
) -> Iterator[None]:
    """Within, a manager `warms_up` and `records` the graphs of these sizes alone."""
    planned, manager._capture_descs = manager._capture_descs, descs
    manager.warms_up, manager.records = warms_up, records
    try:
        yield
    finally:
        manager._capture_descs = planned
        manager.warms_up = manager.records = True


def coarse(sizes: Iterable[int]) -> list[int]:
    """Return those of the graphs' sizes that code with taps has, ascending: four between a power of
    two and the next, so that recording takes half the time, and no batch runs a graph of more than
    5/4 of the size that it would have had."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        quarter = max(1, 1 << max(0, (size - 1).bit_length() - 3))
        if size % quarter == 0 or not kept or 4 * kept[-1] > 5 * size:
            kept.append(size)
    return kept[::-1]


def can_record_late(config: VllmConfig) -> bool:
    """Tell whether graphs with taps may be recorded between steps of requests."""
    # Data-parallel ranks would have to record together; tensor-parallel ones do, as they run the
    # same steps. Recording leaves dummy adapters, a connector's state and draft models' graphs as
    # they are at start-up, not as requests need them.
    return (
        config.parallel_config.data_parallel_size == 1
        and config.lora_config is None
        and config.kv_transfer_config is None
        and config.speculative_config is None
    )


def refuse_late_breaks(config: VllmConfig) -> None:
    """Refuse breakable CUDA graphs in which attention is recorded like any other kernel.

    They are to end before it. Upstream's attention decides that when it is imported, and a config
    turns them on for some architectures: too late in a process that had imported it by then, or was
    forked from one. Graphs are recorded without requests, so that prompts would get no attention.

    Raises:
        ValueError: they were turned on too late.
    """
    breaks = unified_attention_with_output.__globals__ is vars(breakable_cudagraph)
    records = config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH and records and not breaks:
        raise ValueError(
            "this model's breakable CUDA graphs were turned on after attention had been imported, "
            "and would not end before it; set VLLM_USE_BREAKABLE_CUDAGRAPH=1 in the environment "
            "in which Python starts, or 0 to do without them"
        )
