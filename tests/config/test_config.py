# SPDX-License-Identifier: Apache-2.0
"""Engine options: how they reach the config, and what the cache key covers."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vllm.config import VllmConfig
from vllm.config.capture import CaptureConfig
from vllm.config.points import STREAM_POINTS
from vllm.config.steering import SteeringConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

pytestmark = pytest.mark.quick

BOTH: dict[str, Any] = {"enable_steering": True, "capture_consumers": ["inline"]}
STEERING: dict[str, Any] = {"enable_steering": True}
CAPTURE: dict[str, Any] = {"capture_consumers": ["inline"]}


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
    "steering_points": list(STREAM_POINTS),
    "steering_families": ["add"],
    "max_steering_rows": 1024,
    "max_steering_ops": 4,
    "max_request_work": 1 << 23,
    "single_variant": False,
    "steering_modules": [],
    "default_steering_modules": [],
    "compat": [],
    "features": [],
    "features_root": None,
    "features_reconstruct": [],
    "features_memory_bytes": 1 << 30,
    "capture_consumers": [],
    "capture_points": [*STREAM_POINTS, "final"],
    "capture_buffer_bytes": 1 << 30,
    "capture_landing_bytes": None,
    "capture_inline_max_bytes": 64 << 20,
    "capture_overload_policy": "block",
    "capture_lens": [],
    "capture_lens_rows": 512,
    "capture_stop_after": None,
    "capture_keep_bytes": 0,
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
        *("--steering-families", "add", "gate", "pin", "reconstruct"),
        *("--max-steering-rows", "16"),
        *("--max-steering-ops", "2"),
        *("--steering-modules", "calm=calm.safetensors", "m=n=o.npz"),
        *("--default-steering-modules", "calm", "later"),
        *("--capture-consumers", "inline", "logging"),
        *("--capture-consumers", "logging:instance_name=log,timeout=3"),
        *("--max-request-work", "4096"),
        "--single-variant",
        *("--compat", "lens"),
        *("--features", "mood=sae@post_block.1", "a=b@mlp_in.0"),
        *("--features-root", "saes"),
        *("--features-reconstruct", "post_block.1=64", "pre_attn.2=64,k=8"),
        *("--features-memory-bytes", "2048"),
        *("--capture-points", "post_block"),
        *("--capture-buffer-bytes", "4096"),
        *("--capture-landing-bytes", "8192"),
        *("--capture-inline-max-bytes", "1024"),
        *("--capture-overload-policy", "drop"),
        *("--capture-lens", "logit", "big=lens.safetensors"),
        *("--capture-lens-rows", "64"),
        *("--capture-stop-after", "3"),
        *("--capture-keep-bytes", "1048576"),
        *("--rules", "rules.json"),
    ]
    asked = options_of(parse(model, *flags))
    assert asked == {
        "enable_steering": True,
        "max_steering_configs": 8,
        "steering_points": ["post_block", "pre_attn"],
        "steering_families": ["add", "gate", "pin", "reconstruct"],
        "max_steering_rows": 16,
        "max_steering_ops": 2,
        "max_request_work": 4096,
        "single_variant": True,
        "compat": ["lens"],
        "features": ["mood=sae@post_block.1", "a=b@mlp_in.0"],
        "features_root": "saes",
        "features_reconstruct": ["post_block.1=64", "pre_attn.2=64,k=8"],
        "features_memory_bytes": 2048,
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
        "capture_stop_after": 3,
        "capture_keep_bytes": 1 << 20,
        "rules": "rules.json",
    }
    # Every option has a flag, and every flag was told apart from its default.
    assert all(asked[name] != default for name, default in DEFAULTS.items())


def test_options_reach_the_config(model: Path) -> None:
    asked = {
        "enable_steering": True,
        "max_steering_configs": 3,
        "steering_points": ["post_block"],
        "steering_families": ["replace", "reconstruct"],
        "max_steering_rows": 5,
        "max_steering_ops": 1,
        "max_request_work": 2048,
        "single_variant": True,
        "compat": [],
        "features": ["mood=sae@post_block.1"],
        "features_root": "saes",
        "features_reconstruct": ["post_block.1=64"],
        "features_memory_bytes": 4096,
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
        "capture_stop_after": None,  # which lenses exclude
        "capture_keep_bytes": 4096,
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
    with pytest.raises(ValueError, match=re.escape(names)) as raised:
        build(model, **options)
    said = str(raised.value)
    assert "pydantic" not in said and "ArgsKwargs" not in said and len(said) < 300


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("enable_steer", "enable_steering"),
        ("steering", "enable_steering"),
        ("capture_consumer", "capture_consumers"),
        ("capture", "capture_consumers"),
        ("steering_family", "steering_families"),
        ("points", "capture_points"),
    ],
)
@pytest.mark.parametrize("args", [EngineArgs, AsyncEngineArgs])
def test_an_option_that_is_none_names_ours(args: type[EngineArgs], option: str, meant: str) -> None:
    wrong: dict[str, Any] = {option: True}
    with pytest.raises(TypeError, match=rf"^{option}: is not an option .* mean '{meant}'\?\)$"):
        args(model="m", **wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'zebra'"):
        args(model="m", zebra=True)  # type: ignore[call-arg]


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
    CAPTURE | {"capture_stop_after": 1},
    BOTH,
    BOTH | {"max_steering_configs": 31},
]
"""What changes the traced code or the shape of a buffer in it."""

SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_steering_configs": 31, "capture_buffer_bytes": 4096}),  # nothing is on
    (CAPTURE, CAPTURE | {"capture_inline_max_bytes": 1}),
    (CAPTURE, CAPTURE | {"capture_overload_policy": "drop"}),
    (CAPTURE, CAPTURE | {"capture_keep_bytes": 1 << 20}),
    (CAPTURE, {"capture_consumers": ["logging", print]}),
    (CAPTURE, CAPTURE | {"capture_points": list(STREAM_POINTS)[::-1]}),
    (STEERING, STEERING | {"capture_points": ["post_block"]}),
    (STEERING, STEERING | {"steering_points": list(STREAM_POINTS)[::-1]}),
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


def test_plain_code_of_a_model_that_ends_early_is_its_own(model: Path) -> None:
    """Steps that capture nothing run code without taps, which calls layers that are not there in
    one that ends before them; else it is upstream's."""

    def plain(**options: Any) -> str:
        config = build(model, **options)
        config.capture_config = config.capture_config.without_captures()
        return config.compute_hash()

    whole, *cut = [plain(**CAPTURE, capture_stop_after=n) for n in (None, 0, 1)]
    assert whole == build(model).compute_hash()
    assert len({whole, *cut}) == 3


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_cache_key_covers_nothing_else(
    model: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert build(model, **one).compute_hash() == build(model, **other).compute_hash()


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_file_in_place_of_another_is_a_new_key(tmp_path: Path, in_folder: bool) -> None:
    """Compiled code has sizes of the autoencoders that rows are reconstructed by; of others, which
    is the twin, it has nothing."""
    given = tmp_path / "sae"
    if in_folder:
        given.mkdir()
    file = given / "cfg.json" if in_folder else given
    file.write_text("one")
    option: dict[str, Any] = {"enable_steering": True, "features": [f"mood={given}@post_block.1"]}
    reading = SteeringConfig(**option)
    writing = SteeringConfig(**option, steering_families=["reconstruct"])
    before, unread = writing.compute_hash(), reading.compute_hash()
    assert writing.compute_hash() == before
    file.write_text("another")
    assert writing.compute_hash() != before
    assert reading.compute_hash() == unread


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
