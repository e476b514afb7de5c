# SPDX-License-Identifier: Apache-2.0
"""Steering and capture among the engine arguments and on the command line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from vllm.config.capture import CaptureConfig
from vllm.config.steering import SteeringConfig
from vllm.v1.capture.registry import ConsumerText, shown
from vllm.v1.interventions.errors import show
from vllm.v1.interventions.likely import likely

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from vllm.engine.arg_utils import EngineArgs


_A = TypeVar("_A", bound=type)

_OPTIONS = [each.name for each in (*fields(SteeringConfig), *fields(CaptureConfig))]
_ELSEWHERE = {
    "capture": "capture_consumers",
    "consumers": "capture_consumers",
    "enable_capture": "capture_consumers",
    "families": "steering_families",
    "lens": "capture_lens",
    "points": "capture_points",
    "steering": "enable_steering",
    "steering_ops": "steering_families",
}
"""Word for an option, in other tools or by guess -> the option."""


def names_options(args: _A) -> _A:
    """Decorate the engine arguments: a keyword that they do not have, and that is nearly one of
    ours, is refused with ours."""
    make: Callable[..., None] = args.__init__  # type: ignore[misc]
    known = signature(make).parameters.keys()

    @wraps(make)
    def explained(self: Any, *given: Any, **options: Any) -> None:
        for name in options.keys() - known:
            if guess := likely(name, _OPTIONS, _ELSEWHERE):
                raise TypeError(f"{name}: is not an option of the engine{guess}")
        make(self, *given, **options)

    args.__init__ = explained  # type: ignore[misc]
    return args


@contextmanager
def _named() -> Iterator[None]:
    """Raise a ValueError that names each wrong option and what it may be, in place of pydantic's,
    whose text has all options and a link."""
    try:
        yield
    except ValidationError as error:
        wrong = []
        for one in error.errors():
            said = one["msg"].removeprefix("Value error, ")
            path = ".".join(map(str, one["loc"]))
            wrong.append(f"{path}: {said}, got {show(one['input'])}" if path else said)
        raise ValueError("; ".join(wrong)) from None


def hide_secrets(args: dict[str, Any]) -> None:
    """Put what may be logged of consumers in place of their options, in arguments to be logged."""
    if "capture_consumers" in args:
        args["capture_consumers"] = list(map(shown, args["capture_consumers"]))


@_named()
def steering_config_of(args: "EngineArgs") -> SteeringConfig:
    """Make the steering config of the engine arguments.

    Raises:
        ValueError: an option is wrong; the message names it.
    """
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
        features=args.features,
        features_root=args.features_root,
        features_reconstruct=args.features_reconstruct,
        features_memory_bytes=args.features_memory_bytes,
        compat=args.compat,
    )


@_named()
def capture_config_of(args: "EngineArgs") -> CaptureConfig:
    """Make the capture config of the engine arguments.

    Raises:
        ValueError: an option is wrong; the message names it.
    """
    return CaptureConfig(
        capture_consumers=args.capture_consumers,
        capture_points=args.capture_points,
        capture_buffer_bytes=args.capture_buffer_bytes,
        capture_landing_bytes=args.capture_landing_bytes,
        capture_inline_max_bytes=args.capture_inline_max_bytes,
        capture_overload_policy=args.capture_overload_policy,
        capture_lens=args.capture_lens,
        capture_lens_rows=args.capture_lens_rows,
        capture_stop_after=args.capture_stop_after,
        capture_keep_bytes=args.capture_keep_bytes,
        rules=args.rules,
    )


def add_intervention_args(
    parser: "ArgumentParser", get_kwargs: Callable[[type[Any]], dict[str, dict[str, Any]]]
) -> None:
    """Add one flag per field of the two configs, in groups that help lists before all others.

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
    # Help lists groups in this order.
    parser._action_groups[:] = parser._action_groups[-2:] + parser._action_groups[:-2]
