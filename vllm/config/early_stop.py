# SPDX-License-Identifier: Apache-2.0
"""Refuses models that cannot end after one of their layers (`capture_stop_after`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NO_STAGES = ("GraniteMoeHybridForCausalLM",)
"""Architectures that upstream splits into stages, and whose loaders then fail."""


def refuse_stop(config: "VllmConfig") -> None:
    """Check `capture_stop_after` beside all else.

    Raises:
        ValueError: it is set, and the model is not as deep, cannot end early, or must not.
    """
    stop, model = config.capture_config.capture_stop_after, config.model_config
    if stop is None:
        return
    depth = model.get_total_num_hidden_layers()
    if stop >= depth:
        raise ValueError(
            f"capture_stop_after: must be below {depth}, the number of the model's layers, "
            f"got {stop}"
        )
    refused = {
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "LoRA (--enable-lora)": config.lora_config is not None,
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "sleep mode": model.enable_sleep_mode,
        "models on the Transformers backend": model.using_transformers_backend(),
        f"{model.architecture}, which vLLM does not split into pipeline stages": (
            model.architecture in NO_STAGES
            or not model.registry.is_pp_supported_model(model.architectures, model)
        ),
    }
    for what, present in refused.items():
        if present:
            raise ValueError(
                f"capture_stop_after: cannot be combined with {what}; leave it out, and the whole "
                "model is loaded"
            )
