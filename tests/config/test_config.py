# SPDX-License-Identifier: Apache-2.0
"""Engine options: how they reach the config, what is refused, what the cache key covers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError

from tests.errors.page import PATTERNS
from vllm import envs
from vllm.config import VllmConfig, intervention_refusals
from vllm.config.capture import CaptureConfig
from vllm.config.intervention_refusals import refuse_unsupported
from vllm.config.steering import POINTS, SteeringConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

BOTH: dict[str, Any] = {"enable_steering": True, "capture_consumers": ["inline"]}
STEERING: dict[str, Any] = {"enable_steering": True}
CAPTURE: dict[str, Any] = {"capture_consumers": ["inline"]}


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Path:
    return tiny_models.path("llama")


def build(model: Path, **options: Any) -> VllmConfig:
    """A finished config, as `LLM(model, **options)` makes it."""
    args = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=96, dtype="float32", **options
    )
    return args.create_engine_config()


# -- options ------------------------------------------------------------------------------------


def parse(model: Path, *argv: str) -> EngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(model), *argv]))


def options_of(args: Any) -> dict[str, Any]:
    names = [
        *SteeringConfig.__dataclass_fields__,
        *CaptureConfig.__dataclass_fields__,
    ]
    return {name: vars(args)[name] for name in names}


DEFAULTS = {
    "enable_steering": False,
    "max_steering_configs": 32,
    "steering_points": list(POINTS),
    "steering_families": ["add"],
    "max_steering_rows": 1024,
    "max_steering_ops": 4,
    "max_request_work": 1 << 23,
    "single_variant": False,
    "steering_modules": [],
    "default_steering_modules": [],
    "compat": [],
    "capture_consumers": [],
    "capture_points": [*POINTS, "final"],
    "capture_buffer_bytes": 512 << 20,
    "capture_landing_bytes": None,
    "capture_inline_max_bytes": 64 << 20,
    "capture_overload_policy": "block",
    "capture_lens": [],
    "capture_lens_rows": 512,
    "rules": None,
}


def test_defaults(model: Path) -> None:
    assert options_of(parse(model)) == DEFAULTS
    assert options_of(EngineArgs(model=str(model))) == DEFAULTS
    assert asdict(SteeringConfig()) | asdict(CaptureConfig()) == DEFAULTS


def test_flags_are_the_options(model: Path) -> None:
    flags = [
        "--enable-steering",
        *("--max-steering-configs", "8"),
        *("--steering-points", "post_block", "pre_attn"),
        *("--steering-families", "add", "gate", "pin"),
        *("--max-steering-rows", "16"),
        *("--max-steering-ops", "2"),
        *("--steering-modules", "calm=calm.safetensors", "m=n=o.npz"),
        *("--default-steering-modules", "calm", "later"),
        *("--capture-consumers", "inline", "logging"),
        *("--capture-consumers", "logging:instance_name=log,timeout=3"),
        *("--max-request-work", "4096"),
        "--single-variant",
        *("--compat", "lens"),
        *("--capture-points", "post_block"),
        *("--capture-buffer-bytes", "4096"),
        *("--capture-landing-bytes", "8192"),
        *("--capture-inline-max-bytes", "1024"),
        *("--capture-overload-policy", "drop"),
        *("--capture-lens", "logit", "big=lens.safetensors"),
        *("--capture-lens-rows", "64"),
        *("--rules", "rules.json"),
    ]
    asked = options_of(parse(model, *flags))
    assert asked == {
        "enable_steering": True,
        "max_steering_configs": 8,
        "steering_points": ["post_block", "pre_attn"],
        "steering_families": ["add", "gate", "pin"],
        "max_steering_rows": 16,
        "max_steering_ops": 2,
        "max_request_work": 4096,
        "single_variant": True,
        "compat": ["lens"],
        "steering_modules": ["calm=calm.safetensors", "m=n=o.npz"],
        "default_steering_modules": ["calm", "later"],
        "capture_consumers": ["inline", "logging", "logging:instance_name=log,timeout=3"],
        "capture_points": ["post_block"],
        "capture_buffer_bytes": 4096,
        "capture_landing_bytes": 8192,
        "capture_inline_max_bytes": 1024,
        "capture_overload_policy": "drop",
        "capture_lens": ["logit", "big=lens.safetensors"],
        "capture_lens_rows": 64,
        "rules": "rules.json",
    }
    # Every option has a flag, and every flag was told apart from its default.
    assert all(asked[name] != default for name, default in DEFAULTS.items())


def test_options_reach_the_config(model: Path) -> None:
    asked = {
        "enable_steering": True,
        "max_steering_configs": 3,
        "steering_points": ["post_block"],
        "steering_families": ["replace"],
        "max_steering_rows": 5,
        "max_steering_ops": 1,
        "max_request_work": 2048,
        "single_variant": True,
        "compat": [],
        "steering_modules": ["m=file.npz"],
        "default_steering_modules": ["m"],
        "capture_consumers": ["inline"],
        "capture_points": ["post_attn"],
        "capture_buffer_bytes": 8192,
        "capture_landing_bytes": 4096,
        "capture_inline_max_bytes": 512,
        "capture_overload_policy": "drop",
        "capture_lens": ["logit"],
        "capture_lens_rows": 9,
        "rules": "rules.json",
    }
    config = build(model, **asked)
    assert asdict(config.steering_config) | asdict(config.capture_config) == asked
    assert config.tap_shape is None  # known once the model is loaded
    plain = build(model)
    assert asdict(plain.steering_config) | asdict(plain.capture_config) == DEFAULTS
    assert not plain.capture_config.enabled


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_steering_configs": 0}, "max_steering_configs"),
        ({"max_steering_configs": 65537}, "max_steering_configs"),
        ({"steering_points": []}, "steering_points"),
        ({"steering_points": ["mlp"]}, "steering_points: unknown ['mlp']"),
        ({"steering_families": []}, "steering_families"),
        ({"steering_families": ["add", "twist"]}, "steering_families: unknown ['twist']"),
        ({"max_steering_rows": 0}, "max_steering_rows"),
        ({"max_steering_rows": (1 << 20) + 1}, "max_steering_rows"),
        ({"max_steering_ops": 0}, "max_steering_ops"),
        ({"max_request_work": 0}, "max_request_work"),
        ({"max_steering_ops": 65}, "max_steering_ops"),
        ({"steering_modules": ["a=b"]}, "steering_modules: needs enable_steering"),
        ({"default_steering_modules": ["a"]}, "default_steering_modules: needs enable_steering"),
        ({"default_steering_modules": ["a"] * 65}, "default_steering_modules"),
        ({"capture_points": []}, "capture_points"),
        ({"capture_points": ["mlp"]}, "capture_points: unknown ['mlp']"),
        ({"capture_buffer_bytes": 0}, "capture_buffer_bytes"),
        ({"capture_landing_bytes": -1}, "capture_landing_bytes"),
        ({"capture_inline_max_bytes": 0}, "capture_inline_max_bytes"),
        ({"capture_consumers": ["disk"]}, "capture_consumers: unknown 'disk'"),
        ({"capture_consumers": ["inline"] * 2}, "capture_consumers: two are named 'inline'"),
        ({"capture_overload_policy": "wait"}, "capture_overload_policy"),
    ],
)
def test_an_option_out_of_range_is_named(model: Path, options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(names)):
        build(model, **options)


# -- refused combinations -----------------------------------------------------------------------


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


# -- the key of the compile cache ---------------------------------------------------------------

OPS: dict[str, Any] = {"steering_families": ["add", "pin"]}

TRACED: list[dict[str, Any]] = [
    {},
    STEERING,
    STEERING | {"max_steering_configs": 31},
    STEERING | {"steering_points": ["post_block"]},
    STEERING | {"steering_points": ["pre_attn"]},
    STEERING | OPS,
    STEERING | {"steering_families": ["add", "pin", "gate"]},
    STEERING | OPS | {"max_steering_rows": 1023},
    STEERING | OPS | {"max_steering_ops": 3},
    CAPTURE,
    CAPTURE | {"capture_buffer_bytes": 4096},
    CAPTURE | {"capture_points": ["post_block"]},
    BOTH,
    BOTH | {"max_steering_configs": 31},
]
"""What changes the traced code or the shape of a buffer in it."""

SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_steering_configs": 31, "capture_buffer_bytes": 4096}),  # nothing is on
    (CAPTURE, CAPTURE | {"capture_inline_max_bytes": 1}),
    (CAPTURE, CAPTURE | {"capture_overload_policy": "drop"}),
    (CAPTURE, {"capture_consumers": ["logging", print]}),
    (CAPTURE, CAPTURE | {"capture_points": list(POINTS)[::-1]}),
    (STEERING, STEERING | {"capture_points": ["post_block"]}),
    (STEERING, STEERING | {"steering_points": list(POINTS)[::-1]}),
    (STEERING, STEERING | {"capture_inline_max_bytes": 1}),
    (STEERING, STEERING | {"steering_modules": ["m=file.npz"]}),
    (STEERING, STEERING | {"default_steering_modules": ["m"]}),
    (STEERING | OPS, STEERING | {"steering_families": ["pin", "add"]}),
    (STEERING, STEERING | {"max_request_work": 1 << 20}),
    (STEERING, STEERING | {"max_steering_rows": 5, "max_steering_ops": 1}),  # no ops, no rows
]


def test_the_cache_key_covers_what_is_traced(model: Path) -> None:
    keys = [build(model, **options).compute_hash() for options in TRACED]
    assert len(set(keys)) == len(keys)
    assert keys == [build(model, **options).compute_hash() for options in TRACED]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_cache_key_covers_nothing_else(
    model: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert build(model, **one).compute_hash() == build(model, **other).compute_hash()


@pytest.mark.parametrize(
    ("module", "options"),
    [("steering", STEERING), ("capture", CAPTURE)],
    ids=["steering", "capture"],
)
def test_a_new_meaning_of_traced_code_is_a_new_key(
    model: Path, module: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plain = build(model, **options).compute_hash(), build(model).compute_hash()
    monkeypatch.setattr(f"vllm.config.{module}.SCHEMA", 99)
    assert build(model, **options).compute_hash() != before
    assert build(model).compute_hash() == plain
