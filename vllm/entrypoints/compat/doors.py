# SPDX-License-Identifier: Apache-2.0
"""What `--compat` opens: requests of other tools that this server answers.

Whoever opens a door gets what it needs (families, consumers). A request speaks one tool's language
at a time: with fields of ours beside it is refused.
"""

import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.entrypoints.compat import lens
from vllm.entrypoints.compat.peers import refuse_peer_args
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.plan import PLAN_FIELDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)
_P = TypeVar("_P")

LENS = "lens"


def open_doors(args: "EngineArgs") -> None:
    """Turn on, among the engine arguments, what their `compat` needs.

    Raises:
        ValueError: a door is unknown, or a package that it needs is not installed.
    """
    if unknown := sorted(set(args.compat) - {LENS}):
        raise ValueError(f"compat: unknown {unknown}, allowed are {[LENS]}")
    if LENS not in args.compat:
        return
    if find_spec("zstandard") is None:
        raise ValueError("compat: 'lens' needs the package zstandard: pip install zstandard")
    args.enable_steering = True
    args.steering_families = sorted({*args.steering_families, "add", "norm_match"})
    if not any(one in ("inline", {"name": "inline"}) for one in args.capture_consumers):
        args.capture_consumers = [*args.capture_consumers, "inline"]
    logger.info(
        "compat lens: steering is on with the families %s, capture with inline",
        ", ".join(args.steering_families),
    )


def read_args(params: _P, config: "VllmConfig", path: str = "extra_args.") -> _P:
    """Make fields of ours of what `SamplingParams.extra_args` says to other tools.

    Args:
        path: what stands before a key in errors.

    Returns:
        `params`, or a changed copy.

    Raises:
        ValueError: a key that no open door takes; a wrong value; fields of ours beside.
    """
    if not isinstance(params, SamplingParams) or not params.extra_args:
        return params
    found = params.extra_args.keys() & set(lens.KEYS)
    if not found or LENS not in config.steering_config.compat:
        refuse_peer_args(params.extra_args, config, path)
        return params
    shape = config.tap_shape
    assert shape is not None
    opened: Any = copy.copy(params)
    opened.extra_args = {k: v for k, v in params.extra_args.items() if k not in lens.KEYS} or None
    refuse_peer_args(opened.extra_args, config, path)
    fields = lens.fields_of(params.extra_args, path, shape)
    own = next((f for f in PLAN_FIELDS if getattr(params, f) is not None), None)
    if own is not None:
        reject(own, f"cannot be combined with {path}{sorted(found)[0]} in one request")
    for field, value in fields.items():
        setattr(opened, field, value)
    return opened
