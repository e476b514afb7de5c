# SPDX-License-Identifier: Apache-2.0
"""Requests of other tools that a server started with `--compat` answers.

Whoever opens a door gets what it needs (families, consumers). A request speaks one tool's language
at a time: with fields of ours beside it is refused.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.config.compat import EASYSTEER, FAMILIES, LENS
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.frontend.compat import easysteer, lens
from vllm.v1.interventions.frontend.compat.peers import SPEC, is_spec, refuse_peer_args, said
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.plan import INHERIT, PLAN_FIELDS, STEERING_FIELDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_P = TypeVar("_P")

READS = {LENS: lens.READS, EASYSTEER: easysteer.READS}
"""By door, the paths of all fields of a body that it reads; `[]` is each entry of a list."""
assert READS.keys() == FAMILIES.keys()


def read_fields(
    asked: Mapping[str, Any], config: "VllmConfig", num_prompts: int = 1
) -> Mapping[str, Any]:
    """Make fields of ours of a `steering` that is a specification of EasySteer.

    Args:
        asked: the fields of a request that steer or capture.
        num_prompts: how many prompts came with them; they have one budget.

    Returns:
        `asked`, or others.

    Raises:
        ValueError: the specification is wrong, or too much work; fields of ours that steer beside.
    """
    spec = asked.get("steering")
    if not is_spec(spec) or EASYSTEER not in config.steering_config.compat:
        return asked
    for field in asked.keys() & {*STEERING_FIELDS, INHERIT} - {"steering"}:
        reject(field, "cannot be combined with steering in one request")
    return {k: v for k, v in asked.items() if k != "steering"} | easysteer.fields_of(
        spec, work=_work(config, num_prompts)
    )


def _with_spec(params: _P, config: "VllmConfig", num_prompts: int) -> _P:
    asked = {f: v for f in PLAN_FIELDS if (v := getattr(params, f)) is not None}
    fields = read_fields(asked, config, num_prompts)
    if fields is asked:
        reject("steering", said(SPEC))
    opened: Any = copy.copy(params)
    for field in PLAN_FIELDS:
        setattr(opened, field, fields.get(field))
    return opened


def _work(config: "VllmConfig", num_prompts: int) -> Work:
    """Make the budget of what a door does for one request: as much as its fields have then."""
    return Work(config.steering_config.max_request_work, num_prompts=num_prompts)


def is_asked(params: Any, config: "VllmConfig") -> bool:
    """Tell whether `read_args` has a door's work to do, and not names alone to look at."""
    if not isinstance(params, SamplingParams):
        return False
    if is_spec(params.steering):
        return True
    found = (params.extra_args or {}).keys() & set(lens.KEYS)
    return bool(found) and LENS in config.steering_config.compat


def read_args(
    params: _P, config: "VllmConfig", path: str = "extra_args.", num_prompts: int = 1
) -> _P:
    """Make fields of ours of what `SamplingParams.extra_args` says to other tools.

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
    if is_spec(params.steering):
        return read_args(_with_spec(params, config, num_prompts), config, path, num_prompts)
    if not is_asked(params, config):
        refuse_peer_args(params.extra_args, config, path)
        return params
    shape = config.tap_shape
    assert shape is not None and params.extra_args is not None
    found = params.extra_args.keys() & set(lens.KEYS)
    opened: Any = copy.copy(params)
    opened.extra_args = {k: v for k, v in params.extra_args.items() if k not in lens.KEYS} or None
    refuse_peer_args(opened.extra_args, config, path)
    fields = lens.fields_of(params.extra_args, path, shape, _work(config, num_prompts))
    own = next((f for f in PLAN_FIELDS if getattr(params, f) is not None), None)
    if own is not None:
        reject(own, f"cannot be combined with {path}{sorted(found)[0]} in one request")
    for field, value in fields.items():
        setattr(opened, field, value)
    return opened
