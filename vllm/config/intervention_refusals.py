# SPDX-License-Identifier: Apache-2.0
"""Refuses options with which rows would not be whole, or not be where the contract says."""

import os
from typing import TYPE_CHECKING

import torch

from vllm import envs
from vllm.config.early_stop import refuse_stop
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger(__name__)

CONTENT_KEYED = ("OffloadingConnector",)
"""The KV connectors that find blocks by `Request.block_hashes`, in which steering is."""


def refuse_unsupported(config: "VllmConfig") -> None:
    """Check a finished config at start-up.

    Raises:
        ValueError: steering or capture is on together with something it does not support.
    """
    steering = config.steering_config.enable_steering
    capture = config.capture_config.enabled
    if not (steering or capture):
        if config.steering_config.features:
            raise ValueError(
                "features: needs enable_steering (--enable-steering), to steer by them, or "
                "capture_consumers (--capture-consumers inline), to read them"
            )
        return
    feature = " and ".join(
        name for name, on in (("steering", steering), ("capture", capture)) if on
    )
    model, parallel = config.model_config, config.parallel_config
    speculative = config.speculative_config
    refused = {
        "pooling models (--runner pooling)": model.runner_type == "pooling",
        "encoder-decoder models": model.is_encoder_decoder,
        "diffusion language models": model.is_diffusion,
        "sequence-parallel MoE rows": parallel.use_sequence_parallel_moe,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "micro-batching (--enable-dbo, --ubatch-size)": parallel.use_ubatching,
        "elastic expert parallelism (--enable-elastic-ep)": parallel.enable_elastic_ep,
        "--kv-sharing-fast-prefill": config.cache_config.kv_sharing_fast_prefill,
        "the Rust front end (VLLM_USE_RUST_FRONTEND=1)": envs.VLLM_USE_RUST_FRONTEND,
        "adaptive verification (speculative_config.enable_adaptive_verification)": (
            speculative is not None and speculative.enable_adaptive_verification
        ),
    }
    _refuse(feature, refused)
    if capture:
        refused = {
            "pipeline parallelism of executors other than mp and RayExecutorV2": (
                parallel.pipeline_parallel_size > 1 and not _joins_stages(parallel)
            ),
            "pipeline parallelism with a KV connector (--kv-transfer-config)": (
                parallel.pipeline_parallel_size > 1 and config.kv_transfer_config is not None
            ),
        }
        _refuse("capture", refused)
    refuse_connector(config)
    if config.steering_config.focuses and not config.capture_config.reads_attention:
        raise ValueError(
            "steering_families: 'focus' needs q and z among capture_points, and a consumer, such "
            "as capture_consumers=['inline']: by them is proved at start-up of which layers keys "
            "can be read"
        )
    if config.capture_config.capture_lens:
        refused = {
            "pipeline parallelism": parallel.pipeline_parallel_size > 1,
            "LoRA (--enable-lora)": config.lora_config is not None,
            "sleep mode, if a lens is of a file": (
                model.enable_sleep_mode and bool(config.capture_config.lens_files)
            ),
        }
        _refuse("capture_lens", refused)
    refuse_keeping(config)
    refuse_stop(config)
    ours = config.steering_config
    for option, held in (
        ("features", ours.features and (capture or ours.reconstructs)),
        ("features_root", ours.features_root and (capture or ours.feature_places)),
    ):
        sleeps = model.enable_sleep_mode and bool(held)
        _refuse(option, {"sleep mode, with capture or reconstruct": sleeps})
    rounds = os.environ.get("TRITON_F32_DEFAULT", "tf32") != "ieee"
    if model.dtype == torch.float32 and rounds and current_platform.is_cuda():
        logger.warning_once(
            "%s in float32: Triton kernels round to TF32, some three digits; set "
            "TRITON_F32_DEFAULT=ieee to have rows in full precision",
            feature,
        )


def _joins_stages(parallel: "ParallelConfig") -> bool:
    """Tell whether all stages' replies come to the engine core, where `StageRows` joins their
    rows."""
    backend = parallel.distributed_executor_backend
    return backend == "mp" or (backend == "ray" and envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND)


def refuse_connector(config: "VllmConfig") -> None:
    """Raise ValueError for steering with a KV connector that does not tell what acted on blocks.

    Capture goes with any on one stage: what a request wants to see is computed and not loaded.
    """
    transfer = config.kv_transfer_config
    if transfer is None or not config.steering_config.enable_steering:
        return
    own = transfer.kv_connector_module_path is not None
    if own or transfer.kv_connector not in CONTENT_KEYED:
        raise ValueError(
            f"steering cannot be combined with the KV connector {transfer.kv_connector}: what it "
            "stores or fetches is found by tokens or by request, so blocks computed under "
            "steering would be taken for those of plain requests, and plain ones for steered. "
            f"Use {' or '.join(CONTENT_KEYED)}, or capture alone."
        )


def refuse_keeping(config: "VllmConfig") -> None:
    """Raise ValueError for `capture_keep_bytes` without blocks of the engine's own to keep rows
    of."""
    if not config.capture_config.capture_keep_bytes:
        return
    if not config.cache_config.enable_prefix_caching:
        raise ValueError(
            "capture_keep_bytes: rows are kept of the blocks of the prefix cache, which is off; "
            "turn it on (--enable-prefix-caching), or leave this option out"
        )
    if config.kv_transfer_config is not None:
        raise ValueError(
            "capture_keep_bytes: cannot be combined with a KV connector (--kv-transfer-config), "
            "whose blocks come without rows; leave one of them out"
        )


def _refuse(feature: str, refused: dict[str, bool]) -> None:
    for what, present in refused.items():
        if present:
            raise ValueError(
                f"{feature} cannot be combined with {what}: rows would be incomplete or in "
                "the wrong place. Turn one of them off."
            )
