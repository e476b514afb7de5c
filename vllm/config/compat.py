# SPDX-License-Identifier: Apache-2.0
"""The engine arguments that `--compat` turns on."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from vllm.config.steering import refuse_unknown
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)


class Need(NamedTuple):
    """Options that the requests of a tool need."""

    families: frozenset[str]
    """The operations that its requests come to."""
    captures: bool = False
    """True if they get rows in their answers."""
    package: str = ""
    """The package that reads or writes them."""


LENS, EASYSTEER, HOTWIRE, INTERP = "lens", "easysteer", "hotwire", "interp-engine"
NEEDS = {
    LENS: Need(frozenset({"add", "norm_match"}), captures=True, package="zstandard"),
    EASYSTEER: Need(frozenset({"add", "ablate", "replace", "normalize"})),
    HOTWIRE: Need(frozenset({"add"})),
    INTERP: Need(frozenset({"add", "norm_match", "ablate", "clamp", "feature"}), captures=True),
}
"""Tool, as `--compat` calls it -> what its requests need."""


def open_doors(args: "EngineArgs") -> None:
    """Turn on, among the engine arguments, what their `compat` needs.

    Raises:
        ValueError: a door is unknown, or a package that it needs is not installed.
    """
    refuse_unknown("compat", args.compat, [*NEEDS])
    if not args.compat:
        return
    for door in args.compat:
        package = NEEDS[door].package
        if package and find_spec(package) is None:
            raise ValueError(f"compat: {door!r} needs the package {package}: pip install {package}")
    args.enable_steering = True
    families = set(args.steering_families).union(*(NEEDS[door].families for door in args.compat))
    args.steering_families = sorted(families)
    captures = any(NEEDS[door].captures for door in args.compat)
    is_there = any(one in ("inline", {"name": "inline"}) for one in args.capture_consumers)
    if captures and not is_there:
        args.capture_consumers = [*args.capture_consumers, "inline"]
    logger.info(
        "compat %s: steering is on with the families %s%s",
        ", ".join(args.compat),
        ", ".join(args.steering_families),
        ", capture with inline" if captures else "",
    )
