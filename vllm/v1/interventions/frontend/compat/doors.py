# SPDX-License-Identifier: Apache-2.0
"""Requests of other tools that a server started with `--compat` answers.

Whoever opens a door gets what it needs (families, consumers). A request speaks one tool's language
at a time: with fields of ours beside it is refused.
"""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vllm.config.compat import EASYSTEER, HOTWIRE, INTERP, LENS, NEEDS
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.frontend.compat import (
    addresses,
    easysteer,
    hotwire,
    interp_engine,
    lens,
)
from vllm.v1.interventions.frontend.compat.interp_engine import ReadArray, as_it_is
from vllm.v1.interventions.frontend.compat.peers import refuse_peer_args, said, spec_of
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.plan import INHERIT, PLAN_FIELDS, STEERING_FIELDS
from vllm.v1.interventions.shape import TapShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_P = TypeVar("_P")
_Fields = dict[str, Any]


_STEERING = (*STEERING_FIELDS, INHERIT)


class Door(NamedTuple):
    """Functions that make fields of ours of a tool's requests, and the fields that they read."""

    reads: tuple[str, ...]
    """The paths of all fields of a body that it reads; `[]` is each entry of a list."""
    keys: tuple[str, ...] = ()
    """Keys of `extra_args` that it reads."""
    steers: str = ""
    """The one of them that steers."""
    of_args: Callable[[Mapping[str, Any], str, TapShape, Work], _Fields] | None = None
    """Reads those keys, given with what stands before them in errors."""
    of_spec: Callable[[Any, str, Work, ReadArray], _Fields] | None = None
    """Reads a specification in `steering`."""
    alone: tuple[str, ...] = _STEERING
    """Fields of ours that cannot stand beside what it reads."""
    of_capture: Callable[[Any, str, Work], Any] | None = None
    """Reads its names in `capture`; returns what has none as it is."""


DOORS = {
    LENS: Door(lens.READS, lens.KEYS, lens.STEER, lens.fields_of, alone=PLAN_FIELDS),
    EASYSTEER: Door(
        easysteer.READS,
        of_spec=lambda spec, path, work, read: easysteer.fields_of(spec, path, work),
    ),
    HOTWIRE: Door(hotwire.READS, (hotwire.STEER,), hotwire.STEER, hotwire.fields_of),
    INTERP: Door(
        interp_engine.READS,
        of_spec=interp_engine.fields_of,
        of_capture=addresses.capture_of,
    ),
}
"""Door, as `--compat` calls it -> what it does."""
assert DOORS.keys() == NEEDS.keys()

STEERING_KEYS = tuple(door.steers for door in DOORS.values() if door.steers)
"""Keys of other tools that steer."""


def _open(config: "VllmConfig") -> list[Door]:
    return [DOORS[name] for name in config.steering_config.compat]


def read_fields(
    asked: Mapping[str, Any],
    config: "VllmConfig",
    num_prompts: int = 1,
    read: ReadArray = as_it_is,
) -> Mapping[str, Any]:
    """Make fields of ours of a `steering` that is a specification, and of names in `capture`.

    Args:
        asked: the fields of a request that steer or capture.
        num_prompts: how many prompts came with them; they have one budget.
        read: reads arrays where they may be packed.

    Returns:
        `asked`, or others.

    Raises:
        ValueError: something in them is wrong, or too much work; fields of ours that steer beside a
            specification.
    """
    work = _work(config, num_prompts)
    made = {**asked}
    if "capture" in asked:
        for door in _open(config):
            if door.of_capture is not None:
                made["capture"] = door.of_capture(made["capture"], "capture", work)
    spec = spec_of(asked.get("steering"))
    if spec is not None and spec.door in config.steering_config.compat:
        door = DOORS[spec.door]
        for field in asked.keys() & {*door.alone} - {"steering"}:
            reject(field, "cannot be combined with steering in one request")
        assert door.of_spec is not None
        made |= door.of_spec(made.pop("steering"), "steering", work, read)
    return asked if made.keys() == asked.keys() and _same(made, asked) else made


def _same(made: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    return all(made[field] is asked[field] for field in asked)


def _with_fields(params: _P, config: "VllmConfig", num_prompts: int) -> _P:
    """Return `params`, or a copy with fields of ours in place of a tool's."""
    asked = {f: v for f in PLAN_FIELDS if (v := getattr(params, f)) is not None}
    fields = read_fields(asked, config, num_prompts)
    spec = spec_of(fields.get("steering"))
    if spec is not None:
        reject("steering", said(spec.foreign))
    if fields is asked:
        return params
    opened: Any = copy.copy(params)
    for field in PLAN_FIELDS:
        setattr(opened, field, fields.get(field))
    return opened


def _work(config: "VllmConfig", num_prompts: int) -> Work:
    """Make the budget of what a door does for one request: as much as its fields have then."""
    return Work(config.steering_config.max_request_work, num_prompts=num_prompts)


def _asked_doors(params: SamplingParams, config: "VllmConfig") -> list[tuple[Door, str]]:
    """Return the open doors of which `extra_args` has keys, each with the first."""
    given = params.extra_args or {}
    found = [(door, sorted(given.keys() & {*door.keys})) for door in _open(config)]
    return [(door, keys[0]) for door, keys in found if keys]


def _has_names(params: SamplingParams, config: "VllmConfig") -> bool:
    """Tell whether fields of ours may hold what is another tool's."""
    if params.capture is not None and any(door.of_capture for door in _open(config)):
        return True
    return params.steering is not None and spec_of(params.steering) is not None


def is_asked(params: Any, config: "VllmConfig") -> bool:
    """Tell whether `read_args` has a door's work to do, and not names alone to look at."""
    if not isinstance(params, SamplingParams):
        return False
    return _has_names(params, config) or bool(_asked_doors(params, config))


def read_args(
    params: _P, config: "VllmConfig", path: str = "extra_args.", num_prompts: int = 1
) -> _P:
    """Make fields of ours of what a request says to other tools, in `SamplingParams.extra_args` and
    in fields of ours.

    Args:
        path: what stands before a key in errors.
        num_prompts: how many prompts came with them; they have one budget.

    Returns:
        `params`, or a changed copy.

    Raises:
        ValueError: a key that no open door takes; a wrong value; too much work; fields of ours
            beside.
    """
    if not isinstance(params, SamplingParams):
        return params
    opened: Any = params
    doors = _asked_doors(params, config)
    if _has_names(params, config):
        opened = _with_fields(params, config, num_prompts)
    if not doors:
        refuse_peer_args(params.extra_args, config, path)
        return opened
    (door, key), *others = doors
    for _, other in others:
        reject(f"{path}{other}", f"cannot be combined with {path}{key} in one request")
    shape, args = config.tap_shape, params.extra_args
    assert shape is not None and args is not None and door.of_args is not None
    rest = {name: value for name, value in args.items() if name not in door.keys} or None
    refuse_peer_args(rest, config, path)
    fields = door.of_args(args, path, shape, _work(config, num_prompts))
    own = next((f for f in door.alone if getattr(opened, f) is not None), None)
    if own is not None:
        reject(own, f"cannot be combined with {path}{key} in one request")
    opened = copy.copy(opened)
    opened.extra_args = rest
    for field, value in fields.items():
        setattr(opened, field, value)
    return opened
