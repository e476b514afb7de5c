# SPDX-License-Identifier: Apache-2.0
"""Rules as a request or the operator gives them, parsed and checked: all but the positions, which
are those of a prompt."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from vllm.v1.capture.rules import RULES_DO
from vllm.v1.interventions.errors import need_mapping, reject, show, unknown_keys
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_layers, need_one_lane, need_point
from vllm.v1.interventions.values import plain, plain_list
from vllm.v1.interventions.vectors import need_number, need_vector

MAX_RULES = 32
"""The most rules that a request is judged by, the operator's among them."""
MAX_WINDOW = 1 << 20
"""The largest `of`."""
OVER = {"generated": "all_generated", "prompt": "all_prompt"}
"""The names of positions that only rules have, and what they are to others."""

_NEEDED = ("name", "point", "layer", "threshold")
_ALLOWED = (*_NEEDED, "probe", "module", "below", "over", "need", "of", "then")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_FOR_ALL = (*OVER, "all", "predicting", "last_prompt")

DirectionOf = Callable[[Any, str, Site], np.ndarray]
"""A module's name, where that stands, a site -> the module's direction there, float64 [hidden]."""


class GivenRule(msgspec.Struct, frozen=True):
    """A rule as it was given, its positions not yet those of a prompt."""

    name: str
    site: Site
    probe: bytes
    """float32 [hidden], native endian."""
    threshold: float
    below: bool
    over: Any
    need: int
    of: int
    stops: bool

    def told(self) -> dict[str, Any]:
        """Return what the operator is told of the rule; of its probe only the norm."""
        point, layer = self.site
        return {
            "name": self.name,
            "point": point,
            "layer": layer,
            "threshold": self.threshold,
            "below": self.below,
            "over": self.over,
            "need": self.need,
            "of": self.of,
            "then": RULES_DO[self.stops],
            "probe_norm": float(np.linalg.norm(np.frombuffer(self.probe, np.float32))),
        }


def given_rules(
    value: Any, path: str, shape: TapShape, direction_of: DirectionOf, least: int = 1
) -> list[GivenRule]:
    """Parse a list of `{"name", "point", "layer", "threshold"}` with "probe" or "module", and maybe
    "below", "over", "need", "of" and "then".

    Args:
        value: the user's list.
        path: the field's name, for errors.
        shape: what the model offers.
        direction_of: what names of modules mean.
        least: how many there must be.

    Raises:
        ValueError: too many rules, a name that is used twice or no name, an unknown key or point, a
            layer out of range, a probe of the wrong width, a number that is not finite.
    """
    entries = plain_list(value)
    if entries is None or not least <= len(entries) <= MAX_RULES:
        given = show(value) if entries is None else f"{len(entries)}"
        reject(path, f"must be a list of {least}-{MAX_RULES} rules, got {given}")
    rules = [_rule(entry, f"{path}[{i}]", shape, direction_of) for i, entry in enumerate(entries)]
    names = [rule.name for rule in rules]
    for i, name in enumerate(names):
        if name in names[:i]:
            reject(f"{path}[{i}].name", f"{name!r} is the name of another rule")
    return rules


def _rule(entry: Any, path: str, shape: TapShape, direction_of: DirectionOf) -> GivenRule:
    entry = need_mapping(entry, path)
    if unknown := unknown_keys(entry, _ALLOWED):
        reject(path, f"unknown keys {unknown}, allowed are {', '.join(_ALLOWED)}")
    if missing := [key for key in _NEEDED if key not in entry]:
        reject(f"{path}.{missing[0]}", "is missing")
    name = plain(entry["name"])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        reject(f"{path}.name", f"must be up to 64 letters, digits and _.-, got {show(name)}")
    need_one_lane(path, shape)
    point = need_point(entry["point"], f"{path}.point", shape)
    layers = need_layers(entry["layer"], point, f"{path}.layer", shape)
    if len(layers) > 1:
        reject(f"{path}.layer", "names several layers; give a rule for each")
    then = plain(entry.get("then", "flag"))
    if then not in RULES_DO:
        reject(f"{path}.then", f"must be 'flag' or 'stop', got {show(then)}")
    below = plain(entry.get("below", False))
    if not isinstance(below, bool):
        reject(f"{path}.below", f"must be true or false, got {show(below)}")
    need = _count(entry.get("need", 1), f"{path}.need")
    of = _count(entry.get("of", need), f"{path}.of")
    if need > of:
        reject(f"{path}.need", f"is {need}, more than of={of}")
    site = point, layers[0]
    return GivenRule(
        name=name,
        site=site,
        probe=_probe(entry, path, site, shape, direction_of),
        threshold=need_number(entry["threshold"], f"{path}.threshold"),
        below=below,
        over=entry.get("over", "generated"),
        need=need,
        of=of,
        stops=then == "stop",
    )


def _count(value: Any, path: str) -> int:
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_WINDOW:
        reject(path, f"must be an int between 1 and {MAX_WINDOW}, got {show(value)}")
    return value


def _probe(
    entry: Mapping[Any, Any], path: str, site: Site, shape: TapShape, direction_of: DirectionOf
) -> bytes:
    """float32 [hidden], native endian."""
    if ("probe" in entry) == ("module" in entry):
        reject(path, "needs either 'probe' or 'module'")
    if "module" in entry:
        direction = direction_of(plain(entry["module"]), f"{path}.module", site)
        return direction.astype(np.float32).tobytes()
    with np.errstate(over="ignore"):
        vector = need_vector(entry["probe"], f"{path}.probe", shape.hidden_size).astype(np.float32)
    if not np.isfinite(vector).all():
        reject(f"{path}.probe", "overflows float32")
    return vector.tobytes()


def rules_for_all(
    value: Any, path: str, shape: TapShape, direction_of: DirectionOf
) -> list[GivenRule]:
    """Parse rules that hold for all requests: as `given_rules`, over positions that any prompt has.

    Raises:
        ValueError: as `given_rules`; also for positions that belong to a request.
    """
    rules = given_rules(value, path, shape, direction_of, least=0)
    made = []
    for i, rule in enumerate(rules):
        over = plain_list(rule.over) if isinstance(rule.over, list | tuple) else [plain(rule.over)]
        if not over or not all(isinstance(one, str) and one in _FOR_ALL for one in over):
            reject(
                f"{path}[{i}].over",
                f"must be of {', '.join(_FOR_ALL)}: this rule is for all prompts",
            )
        made.append(msgspec.structs.replace(rule, over=over if len(over) > 1 else over[0]))
    return made
