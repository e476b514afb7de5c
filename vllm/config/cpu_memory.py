# SPDX-License-Identifier: Apache-2.0
"""Memory for keys and values on a CPU whose other programs run too."""

from typing import TYPE_CHECKING

from vllm.config.cache import CacheConfig
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

MOST_BYTES = 4 << 30
"""Most bytes for keys and values that an engine takes by itself."""

PARTS = 4
"""The workers take one part in so many of the free memory: weights and the rest take theirs."""


def settle_kv_space(config: "VllmConfig") -> None:
    """Choose the bytes for keys and values where upstream's default, most of all the memory, is not
    free.

    An engine without steering and capture is left alone, and so is one whose user said a size or
    another share.
    """
    cache, share = config.cache_config, CacheConfig.gpu_memory_utilization
    if not (config.steering_config.enable_steering or config.capture_config.enabled):
        return
    if cache.kv_cache_memory_bytes is not None or cache.gpu_memory_utilization != share:
        return
    nodes = [get_memory_node_info(node) for node in get_visible_memory_node()]
    if all(node.total_memory * share <= node.available_memory for node in nodes):
        return
    free = min(node.available_memory for node in nodes)
    chosen = min(free // PARTS // config.parallel_config.world_size, MOST_BYTES)
    cache.kv_cache_memory_bytes = chosen
    logger.warning(
        "keys and values get %.1f GiB, since %.0f %% of the memory is not free; set "
        "VLLM_CPU_KVCACHE_SPACE (GiB, a whole number) or kv_cache_memory_bytes "
        "(--kv-cache-memory-bytes) for more or less",
        chosen / (1 << 30),
        100 * share,
    )
