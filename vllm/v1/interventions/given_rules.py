# SPDX-License-Identifier: Apache-2.0
"""Rules as a request or the operator gives them, parsed and checked: all but the positions, which
are those of a prompt."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.v1.capture.rules import FLAG, FORCE, STOP
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.given_probes import read_probe
from vllm.v1.interventions.named_features import rule_written_out
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_one_lane
from vllm.v1.interventions.values import plain, plain_list
from vllm.v1.interventions.vectors import pack_float32
from vllm.v1.probes.heads import Largest, Linear, Mlp
from vllm.v1.probes.pools import AnyPool, Each
from vllm.v1.probes.probe import ServedProbe

MAX_RULES = 32
"""The most rules that a request is judged by, the operator's among them."""
MAX_FORCED = 256
"""The most tokens that a rule forces."""
MAX_WINDOW = 1 << 20
"""The largest `of`."""
OVER = {"generated": "all_generated", "prompt": "all_prompt"}
"""The names of positions that only rules have, and what they are to others."""

_SCORED = ("probe", "module", "dose")
_ALLOWED = ("point", "layer", "threshold", *_SCORED, "below", "over", "need", "of", "then")
_WINDOW = f"must be an int between 1 and {MAX_WINDOW}, got {{given}}"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_FOR_ALL = (*OVER, "all", "predicting", "last_prompt")

DirectionOf = Callable[[Any, str, Site], np.ndarray]
"""A module's name, where that stands, a site -> the module's direction there, float64 [hidden]."""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Score of a row: what a head makes of its products with vectors at each site, and a pool of
    the rows up to it."""

    vectors: tuple[bytes, ...]
    """float32 [units, hidden] of each site, native endian."""
    head: Linear | Mlp = Linear()
    pool: AnyPool = Each()

    def told(self) -> dict[str, Any]:
        """Return what the operator is told of it: the norm, and the kinds of head and pool."""
        weights = np.frombuffer(b"".join(self.vectors), np.float32)
        norm = float(np.linalg.norm(weights))
        return {"probe_norm": norm, "head": self.head.kind, "pool": self.pool.kind}


class Dosed(msgspec.Struct, frozen=True, tag=True):
    """Score of a row: its dose, of several sites the largest."""

    head: Largest = Largest()
    pool: Each = Each()

    def told(self) -> dict[str, Any]:
        """Return what the operator is told of it."""
        return {"dose": True}


class GivenRule(msgspec.Struct, frozen=True):
    """A rule as it was given, its positions not yet those of a prompt."""

    name: str
    sites: list[Site]
    score: Probe | Dosed
    threshold: float
    below: bool
    over: Any
    need: int
    of: int
    then: str
    puts: tuple[int, ...]

    def told(self) -> dict[str, Any]:
        """Return what the operator is told of the rule."""
        points, layers = zip(*self.sites, strict=True)
        point = {"point": points[0]} if len(set(points)) == 1 else {"points": [*points]}
        return {
            "name": self.name,
            **point,
            "layer": layers[0] if len(layers) == 1 else [*layers],
            "threshold": self.threshold,
            "below": self.below,
            "over": self.over,
            "need": self.need,
            "of": self.of,
            "then": {FORCE: [*self.puts]} if self.puts else self.then,
            **self.score.told(),
        }


def given_rules(
    value: Any, path: str, shape: TapShape, direction_of: DirectionOf, least: int = 1
) -> list[GivenRule]:
    """Parse a list of `{"name", "point", "layer", "threshold"}` with "probe", "module" or "dose",
    and maybe "below", "over", "need", "of" and "then"; a probe of several layers has its own sites,
    and maybe its own threshold.

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
    rule = rule_written_out(given, shape).fields(needed=("name",), allowed=_ALLOWED)
    name = rule["name"].text("must be up to 64 letters, digits and _.-, got {given}", _NAME)
    need_one_lane(rule.path, shape)
    scores = [name for name in _SCORED if name in rule]
    if len(scores) != 1:
        rule.refuse(f"needs one of {', '.join(map(repr, _SCORED))}")
    scored = _SCORES[scores[0]](rule, shape, direction_of)
    then, puts = _action(rule.get("then", FLAG), shape)
    need = rule.get("need", 1).int(1, MAX_WINDOW, _WINDOW)
    of = rule.get("of", need).int(1, MAX_WINDOW, _WINDOW)
    if need > of:
        rule["need"].refuse(f"is {need}, more than of={of}")
    threshold = scored.threshold
    if "threshold" in rule or threshold is None:
        threshold = rule.need("threshold")["threshold"].number()
    return GivenRule(
        name=name,
        sites=scored.sites,
        score=scored.score,
        threshold=threshold,
        below=rule.get("below", False).flag(),
        over=rule.get("over", "generated").value,
        need=need,
        of=of,
        then=then,
        puts=puts,
    )


def _action(given: Given, shape: TapShape) -> tuple[str, tuple[int, ...]]:
    """Action of a rule where it fires, and the tokens that it forces."""
    if not isinstance(given.value, Mapping):
        message = "must be 'flag', 'stop' or {'force': [token ids]}, got {given}"
        return given.choice((FLAG, STOP), message), ()
    ids = given.fields(needed=(FORCE,), of="an action")[FORCE]
    most = shape.token_ids - 1
    message = f"must be a list of 1-{MAX_FORCED} token ids, got {{given}}"
    listed = ids.entries(message, 1, MAX_FORCED)
    wanted = f"must be a token id, 0 to {most}, got {{given}}"
    return FORCE, tuple(token.int(0, most, wanted) for token in listed)


class _Scored(NamedTuple):
    """A rule's score, and where it is read."""

    score: Probe | Dosed
    sites: list[Site]
    threshold: float | None = None
    """The probe's own, for a rule without one."""


def _sites(rule: Given, shape: TapShape) -> list[Site]:
    """Layers of one point, as the rule names them."""
    point = rule.need("point", "layer")["point"].point(shape)
    return [(point, layer) for layer in rule["layer"].layers(point, shape)]


def _site(rule: Given, shape: TapShape) -> Site:
    sites = _sites(rule, shape)
    if len(sites) > 1:
        rule["layer"].refuse("names several layers; give a rule for each, or a probe with 'sites'")
    return sites[0]


def _of_probe(rule: Given, shape: TapShape, direction_of: DirectionOf) -> _Scored:
    given = rule["probe"]
    if not isinstance(given.value, Mapping | ServedProbe):
        site = _site(rule, shape)
        vector = pack_float32(given.vector(shape.hidden_size), given.path)
        return _Scored(Probe((vector,)), [site])
    for key in ("point", "layer"):
        if key in rule:
            rule[key].refuse("is a vector's; this probe has its own sites: leave it out")
    probe = read_probe(given, shape)
    vectors = (np.ascontiguousarray(part).tobytes() for part in probe.weight.swapaxes(0, 1))
    score = Probe(tuple(vectors), probe.head, probe.pool)
    return _Scored(score, [*probe.sites], probe.threshold)


def _of_module(rule: Given, shape: TapShape, direction_of: DirectionOf) -> _Scored:
    given, site = rule["module"], _site(rule, shape)
    direction = direction_of(given.plain(), given.path, site)
    return _Scored(Probe((pack_float32(direction, given.path),)), [site])


def _of_dose(rule: Given, shape: TapShape, direction_of: DirectionOf) -> _Scored:
    given, sites = rule["dose"], _sites(rule, shape)
    if not given.flag():
        given.refuse("must be true; leave it out for a rule of a probe")
    return _Scored(Dosed(), sites)


_SCORES: dict[str, Callable[[Given, TapShape, DirectionOf], _Scored]] = {
    "probe": _of_probe,
    "module": _of_module,
    "dose": _of_dose,
}
"""Key of a rule that says what its score is -> how it is read, with where."""


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
