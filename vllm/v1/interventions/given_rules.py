# SPDX-License-Identifier: Apache-2.0
"""Rules as a request or the operator gives them, parsed and checked: all but the positions, which
are those of a prompt."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from vllm.v1.capture.rules import RULES_DO
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.named_features import rule_written_out
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_one_lane
from vllm.v1.interventions.values import plain, plain_list
from vllm.v1.interventions.vectors import pack_float32

MAX_RULES = 32
"""The most rules that a request is judged by, the operator's among them."""
MAX_WINDOW = 1 << 20
"""The largest `of`."""
OVER = {"generated": "all_generated", "prompt": "all_prompt"}
"""The names of positions that only rules have, and what they are to others."""

_NEEDED = ("name", "point", "layer", "threshold")
_ALLOWED = ("probe", "module", "dose", "below", "over", "need", "of", "then")
_WINDOW = f"must be an int between 1 and {MAX_WINDOW}, got {{given}}"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_FOR_ALL = (*OVER, "all", "predicting", "last_prompt")

DirectionOf = Callable[[Any, str, Site], np.ndarray]
"""A module's name, where that stands, a site -> the module's direction there, float64 [hidden]."""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Score of a row: its product with a vector."""

    vector: bytes
    """float32 [hidden], native endian."""

    def told(self) -> dict[str, Any]:
        """Return what the operator is told of it: the norm alone."""
        return {"probe_norm": float(np.linalg.norm(np.frombuffer(self.vector, np.float32)))}


class Dosed(msgspec.Struct, frozen=True, tag=True):
    """Score of a row: its dose, of several sites the largest."""

    def told(self) -> dict[str, Any]:
        """Return what the operator is told of it."""
        return {"dose": True}


class GivenRule(msgspec.Struct, frozen=True):
    """A rule as it was given, its positions not yet those of a prompt."""

    name: str
    sites: list[Site]
    """Layers of one point; of a probe one."""
    score: Probe | Dosed
    threshold: float
    below: bool
    over: Any
    need: int
    of: int
    stops: bool

    def told(self) -> dict[str, Any]:
        """Return what the operator is told of the rule."""
        point, layers = self.sites[0][0], [layer for _, layer in self.sites]
        return {
            "name": self.name,
            "point": point,
            "layer": layers[0] if len(layers) == 1 else layers,
            "threshold": self.threshold,
            "below": self.below,
            "over": self.over,
            "need": self.need,
            "of": self.of,
            "then": RULES_DO[self.stops],
            **self.score.told(),
        }


def given_rules(
    value: Any, path: str, shape: TapShape, direction_of: DirectionOf, least: int = 1
) -> list[GivenRule]:
    """Parse a list of `{"name", "point", "layer", "threshold"}` with "probe", "module" or "dose",
    and maybe "below", "over", "need", "of" and "then".

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
    message = f"must be a list of {least}-{MAX_RULES} rules, got {{given}}"
    entries = Given(value, path).entries(message, least, MAX_RULES)
    rules = [_rule(entry, shape, direction_of) for entry in entries]
    names = [rule.name for rule in rules]
    for i, name in enumerate(names):
        if name in names[:i]:
            reject(f"{path}[{i}].name", f"{name!r} is the name of another rule")
    return rules


def _rule(given: Given, shape: TapShape, direction_of: DirectionOf) -> GivenRule:
    rule = rule_written_out(given, shape).fields(needed=_NEEDED, allowed=_ALLOWED)
    name = rule["name"].text("must be up to 64 letters, digits and _.-, got {given}", _NAME)
    need_one_lane(rule.path, shape)
    point = rule["point"].point(shape)
    layers = rule["layer"].layers(point, shape)
    scores = [name for name in _SCORES if name in rule]
    if len(scores) != 1:
        rule.refuse(f"needs one of {', '.join(map(repr, _SCORES))}")
    if len(layers) > 1 and "dose" not in rule:
        rule["layer"].refuse("names several layers; give a rule for each")
    then = rule.get("then", "flag").choice(RULES_DO, "must be 'flag' or 'stop', got {given}")
    need = rule.get("need", 1).int(1, MAX_WINDOW, _WINDOW)
    of = rule.get("of", need).int(1, MAX_WINDOW, _WINDOW)
    if need > of:
        rule["need"].refuse(f"is {need}, more than of={of}")
    sites = [(point, layer) for layer in layers]
    return GivenRule(
        name=name,
        sites=sites,
        score=_SCORES[scores[0]](rule[scores[0]], sites[0], shape, direction_of),
        threshold=rule["threshold"].number(),
        below=rule.get("below", False).flag(),
        over=rule.get("over", "generated").value,
        need=need,
        of=of,
        stops=then == "stop",
    )


def _of_probe(given: Given, site: Site, shape: TapShape, direction_of: DirectionOf) -> Probe:
    return Probe(pack_float32(given.vector(shape.hidden_size), given.path))


def _of_module(given: Given, site: Site, shape: TapShape, direction_of: DirectionOf) -> Probe:
    return Probe(pack_float32(direction_of(given.plain(), given.path, site), given.path))


def _of_dose(given: Given, site: Site, shape: TapShape, direction_of: DirectionOf) -> Dosed:
    if not given.flag():
        given.refuse("must be true; leave it out for a rule of a probe")
    return Dosed()


_SCORES: dict[str, Callable[[Given, Site, TapShape, DirectionOf], Probe | Dosed]] = {
    "probe": _of_probe,
    "module": _of_module,
    "dose": _of_dose,
}
"""Key of a rule that says what its score is -> how it is read."""


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
