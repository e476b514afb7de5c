# SPDX-License-Identifier: Apache-2.0
"""What steering and capture cannot be combined with, and that nothing else is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError

from tests.config.test_config import BOTH, CAPTURE, STEERING, build
from tests.errors.page import PATTERNS
from vllm import envs
from vllm.config import VllmConfig, intervention_refusals
from vllm.config.intervention_refusals import refuse_unsupported

pytestmark = pytest.mark.quick


def refusal(config: VllmConfig) -> str | None:
    """The message; None if nothing is refused."""
    try:
        refuse_unsupported(config)
    except ValueError as error:
        return str(error)
    return None


REAL: list[tuple[dict[str, Any], str, bool]] = [
    # options, what the message names, whether steering alone is refused, too
    ({"runner": "pooling"}, "pooling models (--runner pooling)", True),
    ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill", True),
    (
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
        "pipeline parallelism of executors other than mp and RayExecutorV2",
        False,
    ),
    (
        {
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        },
        "pipeline parallelism with a KV connector (--kv-transfer-config)",
        False,
    ),
]


@pytest.mark.parametrize(("options", "what", "steering_too"), REAL, ids=[w for _, w, _ in REAL])
def test_refused_at_start_up(
    model: Path, options: dict[str, Any], what: str, steering_too: bool
) -> None:
    for features, name in (
        (BOTH, "steering and capture" if steering_too else "capture"),
        (CAPTURE, "capture"),
    ):
        with pytest.raises(
            ValidationError, match=re.escape(f"{name} cannot be combined with {what}")
        ):
            build(model, **features, **options)
    if steering_too:
        with pytest.raises(ValidationError, match=f"steering cannot .*{re.escape(what)}"):
            build(model, **STEERING, **options)
    else:
        build(model, **STEERING, **options)
    build(model, **options)  # without our features it is upstream's business


@pytest.mark.parametrize(
    ("connector", "steers"),
    [
        ({"kv_connector": "ExampleConnector"}, False),
        ({"kv_connector": "OffloadingConnector"}, True),
        ({"kv_connector": "MultiConnector"}, False),
    ],
)
def test_kv_connectors(model: Path, connector: dict[str, str], steers: bool) -> None:
    """Those that tell what acted on a block may steer; all go with capture."""
    transfer = {"kv_transfer_config": {**connector, "kv_role": "kv_both"}}
    assert refusal(build(model, **CAPTURE, **transfer)) is None
    if steers:
        config = build(model, **BOTH, **transfer)
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.kv_connector_module_path = "another.of.that.name"
        assert "KV connector" in (refusal(config) or "")
        return
    with pytest.raises(ValidationError, match=f"the KV connector {connector['kv_connector']}: "):
        build(model, **STEERING, **transfer)


def _moe(config: VllmConfig) -> None:
    parallel = config.parallel_config
    parallel.enable_expert_parallel = True
    parallel.tensor_parallel_size = parallel.data_parallel_size = 2
    parallel.all2all_backend = "allgather_reducescatter"


def _speculative(config: VllmConfig, adaptive: bool = True) -> None:
    stand_in: Any = SimpleNamespace(enable_adaptive_verification=adaptive)
    config.speculative_config = stand_in


# Upstream lets none of these through on a CPU, or needs another model: fields of a real config are
# set to what they would be.
CHANGED: list[tuple[Callable[[VllmConfig], object], str]] = [
    (lambda c: vars(c.model_config).update(is_encoder_decoder=True), "encoder-decoder models"),
    (lambda c: vars(c.model_config).update(is_diffusion=True), "diffusion language models"),
    (_moe, "sequence-parallel MoE rows"),
    (
        lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
        "decode context parallelism",
    ),
    (
        lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
        "prefill context parallelism",
    ),
    (
        lambda c: setattr(c.parallel_config, "enable_dbo", True),
        "micro-batching (--enable-dbo, --ubatch-size)",
    ),
    (
        lambda c: setattr(c.parallel_config, "ubatch_size", 2),
        "micro-batching (--enable-dbo, --ubatch-size)",
    ),
    (
        lambda c: setattr(c.parallel_config, "enable_elastic_ep", True),
        "elastic expert parallelism (--enable-elastic-ep)",
    ),
    (_speculative, "adaptive verification (speculative_config.enable_adaptive_verification)"),
]


@pytest.mark.parametrize("features", [BOTH, STEERING, CAPTURE, {}], ids=["both", "s", "c", "none"])
@pytest.mark.parametrize(("change", "what"), CHANGED, ids=[w for _, w in CHANGED])
def test_refused(
    model: Path, change: Callable[[VllmConfig], object], what: str, features: dict[str, Any]
) -> None:
    config = build(model, **features)
    assert refusal(config) is None
    change(config)
    message = refusal(config)
    if not features:
        assert message is None
        return
    assert message is not None
    name = {
        1: "steering" if "enable_steering" in features else "capture",
        2: "steering and capture",
    }
    assert message.startswith(f"{name[len(features)]} cannot be combined with {what}: ")
    assert any(pattern.fullmatch(message) for pattern in PATTERNS.values())


RUST = "the Rust front end (VLLM_USE_RUST_FRONTEND=1)"


def test_the_rust_front_end_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [build(model, **features) for features in (BOTH, STEERING, CAPTURE)]
    plain = build(model)
    assert [refusal(config) for config in configs] == [None] * 3
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", True)
    for config in configs:
        assert f" cannot be combined with {RUST}: " in (refusal(config) or "")
    assert refusal(plain) is None


def test_what_looks_alike_is_served(model: Path) -> None:
    for change in (
        lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2),
        lambda c: setattr(c.parallel_config, "data_parallel_size", 2),
        lambda c: setattr(c.parallel_config, "enable_expert_parallel", True),
        lambda c: _speculative(c, adaptive=False),
        lambda c: setattr(c.model_config, "enable_sleep_mode", True),
    ):
        config = build(model, **BOTH)
        change(config)
        assert refusal(config) is None


def _stages(config: VllmConfig) -> None:
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "mp"


@pytest.mark.parametrize(("today", "joins"), [("0", False), ("1", True)])
def test_stages_under_ray(
    model: Path, today: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the executor of today brings the rows of all stages."""
    config = build(model, **CAPTURE)
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "ray"
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", today)
    message = refusal(config)
    assert (message is None) == joins
    assert joins or "other than mp and RayExecutorV2" in (message or "")


@pytest.mark.parametrize("option", [{"features_root": "saes"}, {"features": ["a=b@mlp_in.0"]}])
def test_features_on_the_device_and_sleep(model: Path, option: dict[str, Any]) -> None:
    """What sleep takes away is not sent again; an engine that only steers holds none there."""
    configs = [build(model, **one, **option) for one in (BOTH, STEERING)]
    assert [refusal(config) for config in configs] == [None, None]
    for config in configs:
        config.model_config.enable_sleep_mode = True
    said = refusal(configs[0]) or ""
    assert said.startswith(f"{next(iter(option))} cannot be combined with sleep mode")
    assert refusal(configs[1]) is None


def test_places_for_reconstructions_and_sleep(model: Path) -> None:
    families = ["reconstruct"]
    option = {"features_root": "saes", "features_reconstruct": ["post_block.1=64"]}
    config = build(model, **STEERING, steering_families=families, **option)
    assert refusal(config) is None
    config.model_config.enable_sleep_mode = True
    said = refusal(config) or ""
    assert said.startswith("features_root cannot be combined with sleep mode")


WITH_LENSES: list[tuple[Callable[[VllmConfig], object], str]] = [
    (_stages, "pipeline parallelism"),
    (lambda c: setattr(c, "lora_config", SimpleNamespace()), "LoRA (--enable-lora)"),
    (
        lambda c: setattr(c.model_config, "enable_sleep_mode", True),
        "sleep mode, if a lens is of a file",
    ),
]


@pytest.mark.parametrize(("change", "what"), WITH_LENSES, ids=[w for _, w in WITH_LENSES])
def test_refused_with_lenses(
    model: Path, change: Callable[[VllmConfig], object], what: str
) -> None:
    configs = [build(model, **CAPTURE), build(model, **CAPTURE, capture_lens=["logit", "f=g"])]
    assert [refusal(config) for config in configs] == [None, None]
    for config in configs:
        change(config)
    without, message = (refusal(config) for config in configs)
    assert without is None
    assert message is not None
    assert message.startswith(f"capture_lens cannot be combined with {what}: ")
    assert any(pattern.fullmatch(message) for pattern in PATTERNS.values())


def test_every_refusal_has_a_case() -> None:
    source = Path(refuse_unsupported.__code__.co_filename).read_text()
    written = set(re.findall(r'^\s+"(.+)": ', source, re.MULTILINE))
    changed = {what for _, what in CHANGED + WITH_LENSES}
    assert written == {what for _, what, _ in REAL} | changed | {RUST}


@pytest.mark.parametrize(
    ("options", "dtype", "setting", "is_cuda", "said"),
    [
        (STEERING, torch.float32, None, True, ["steering"]),
        (BOTH, torch.float32, "tf32", True, ["steering and capture"]),
        (STEERING, torch.float32, "ieee", True, []),
        (STEERING, torch.float32, None, False, []),
        (STEERING, torch.bfloat16, None, True, []),
        ({}, torch.float32, None, True, []),
    ],
)
def test_rounding_of_float32_on_gpus_is_said(
    model: Path,
    options: dict[str, Any],
    dtype: torch.dtype,
    setting: str | None,
    is_cuda: bool,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, log = build(model, **options), Mock()
    config.model_config.dtype = dtype
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    if setting is not None:
        monkeypatch.setenv("TRITON_F32_DEFAULT", setting)
    platform = SimpleNamespace(is_cuda=lambda: is_cuda)
    monkeypatch.setattr(intervention_refusals, "current_platform", platform)
    monkeypatch.setattr(intervention_refusals, "logger", log)
    refuse_unsupported(config)
    assert [call.args[1] for call in log.warning_once.call_args_list] == said
