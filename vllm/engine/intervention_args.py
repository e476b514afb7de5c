# SPDX-License-Identifier: Apache-2.0
"""Steering and capture among the engine arguments and on the command line."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config.capture import CaptureConfig
from vllm.config.steering import SteeringConfig
from vllm.v1.capture.registry import ConsumerText, shown

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from vllm.engine.arg_utils import EngineArgs


def hide_secrets(args: dict[str, Any]) -> None:
    """Put what may be logged of consumers in place of their options, in arguments to be logged."""
    if "capture_consumers" in args:
        args["capture_consumers"] = list(map(shown, args["capture_consumers"]))


def steering_config_of(args: "EngineArgs") -> SteeringConfig:
    """Make the steering config of the engine arguments."""
    if args.compat:
        from vllm.config.compat import open_doors

        open_doors(args)
    return SteeringConfig(
        enable_steering=args.enable_steering,
        max_steering_configs=args.max_steering_configs,
        steering_points=args.steering_points,
        steering_families=args.steering_families,
        max_steering_rows=args.max_steering_rows,
        max_steering_ops=args.max_steering_ops,
        max_request_work=args.max_request_work,
        single_variant=args.single_variant,
        steering_modules=args.steering_modules,
        default_steering_modules=args.default_steering_modules,
        compat=args.compat,
    )


def capture_config_of(args: "EngineArgs") -> CaptureConfig:
    """Make the capture config of the engine arguments."""
    return CaptureConfig(
        capture_consumers=args.capture_consumers,
        capture_points=args.capture_points,
        capture_buffer_bytes=args.capture_buffer_bytes,
        capture_landing_bytes=args.capture_landing_bytes,
        capture_inline_max_bytes=args.capture_inline_max_bytes,
        capture_overload_policy=args.capture_overload_policy,
        capture_lens=args.capture_lens,
        capture_lens_rows=args.capture_lens_rows,
        rules=args.rules,
    )


def add_intervention_args(
    parser: "ArgumentParser", get_kwargs: Callable[[type[Any]], dict[str, dict[str, Any]]]
) -> None:
    """Add one flag per field of the two configs, in groups of their own.

    Args:
        get_kwargs: a config class -> each field's arguments for argparse.
    """
    for config in (SteeringConfig, CaptureConfig):
        group = parser.add_argument_group(title=config.__name__, description=config.__doc__)
        for name, kwargs in get_kwargs(config).items():
            if name == "capture_consumers":
                # Specs are text here; the flag may be repeated or take several.
                kwargs |= {"type": ConsumerText, "nargs": "+", "action": "extend"}
            group.add_argument(f"--{name.replace('_', '-')}", **kwargs)
