# SPDX-License-Identifier: Apache-2.0
"""The engine arguments that `--compat` turns on."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm.config.steering import refuse_unknown
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

LENS, EASYSTEER = "lens", "easysteer"
FAMILIES = {LENS: {"add", "norm_match"}, EASYSTEER: {"add", "ablate", "replace", "normalize"}}
"""Tool -> the operations that its requests come to."""


def open_doors(args: "EngineArgs") -> None:
    """Turn on, among the engine arguments, what their `compat` needs.

    Raises:
        ValueError: a door is unknown, or a package that it needs is not installed.
    """
    refuse_unknown("compat", args.compat, [*FAMILIES])
    if not args.compat:
        return
    if LENS in args.compat and find_spec("zstandard") is None:
        raise ValueError("compat: 'lens' needs the package zstandard: pip install zstandard")
    args.enable_steering = True
    families = set(args.steering_families).union(*(FAMILIES[door] for door in args.compat))
    args.steering_families = sorted(families)
    is_there = any(one in ("inline", {"name": "inline"}) for one in args.capture_consumers)
    if LENS in args.compat and not is_there:
        args.capture_consumers = [*args.capture_consumers, "inline"]
    logger.info(
        "compat %s: steering is on with the families %s%s",
        ", ".join(args.compat),
        ", ".join(args.steering_families),
        ", capture with inline" if LENS in args.compat else "",
    )
