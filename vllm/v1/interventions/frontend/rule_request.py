# SPDX-License-Identifier: Apache-2.0
"""What a request may say in `rules`: parsed, checked and resolved to positions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.v1.capture.rules import RULES_DO
from vllm.v1.interventions.errors import need_mapping, reject, show, show_key
from vllm.v1.interventions.frontend.capture_streams import Streams
from vllm.v1.interventions.frontend.module_catalog import ModuleCatalog
from vllm.v1.interventions.frontend.projections import direction_of, matrix_digest
from vllm.v1.interventions.frontend.selectors import Prompt, Selector
from vllm.v1.interventions.frontend.work import Unit
from vllm.v1.interventions.plan import Rule, Selection, Site, TapShape
from vllm.v1.interventions.sites import need_layers, need_point
from vllm.v1.interventions.values import plain, plain_list
from vllm.v1.interventions.vectors import need_number, need_vector

MAX_RULES = 32
"""The most rules of a request."""
MAX_WINDOW = 1 << 20
"""The largest `of`."""

_NEEDED = ("name", "point", "layer", "threshold")
_ALLOWED = (*_NEEDED, "probe", "module", "below", "over", "need", "of", "then")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_OVER = {"generated": "all_generated", "prompt": "all_prompt"}


class AskedRule(NamedTuple):
    """A rule and the probe that makes its scores."""

    rule: Rule
    probe: bytes
    """float32 [hidden], native endian."""


def parse_rules(
    value: Any, path: str, shape: TapShape, prompt: Prompt, catalog: ModuleCatalog
) -> list[AskedRule]:
    """Parse `SamplingParams.rules`: a list of `{"name", "point", "layer", "threshold"}` with
    "probe" or "module", and maybe "below", "over", "need", "of" and "then".

    Args:
        value: the user's list, or None.
        path: the field's name, for errors.
        shape: what the model offers.
        prompt: what `over` is resolved on.
        catalog: what names of modules mean.

    Raises:
        ValueError: too many rules, a name that is used twice or no name, an unknown key or point, a
            layer out of range, a probe of the wrong width, a number that is not finite, positions
            that are known at the end only, or none at all.
    """
    entries = [] if value is None else plain_list(value)
    if entries is None or (value is not None and not 1 <= len(entries) <= MAX_RULES):
        given = show(value) if entries is None else f"{len(entries)}"
        reject(path, f"must be a list of 1-{MAX_RULES} rules, got {given}")
    asked = [
        _rule(entry, f"{path}[{i}]", shape, prompt, catalog) for i, entry in enumerate(entries)
    ]
    names = [one.rule.name for one in asked]
    for i, name in enumerate(names):
        if name in names[:i]:
            reject(f"{path}[{i}].name", f"{name!r} is the name of another rule")
    return asked


def _rule(
    entry: Any, path: str, shape: TapShape, prompt: Prompt, catalog: ModuleCatalog
) -> AskedRule:
    entry = need_mapping(entry, path)
    if unknown := sorted(show_key(key) for key in entry.keys() - set(_ALLOWED)):
        reject(path, f"unknown keys {unknown[:8]}, allowed are {', '.join(_ALLOWED)}")
    if missing := [key for key in _NEEDED if key not in entry]:
        reject(f"{path}.{missing[0]}", "is missing")
    name = plain(entry["name"])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        reject(f"{path}.name", f"must be up to 64 letters, digits and _.-, got {show(name)}")
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
    rule = Rule(
        name=name,
        site=site,
        runs=_positions(entry.get("over", "generated"), f"{path}.over", prompt),
        threshold=need_number(entry["threshold"], f"{path}.threshold"),
        below=below,
        need=need,
        of=of,
        stops=then == "stop",
    )
    return AskedRule(rule, _probe(entry, path, site, shape, prompt, catalog))


def _count(value: Any, path: str) -> int:
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_WINDOW:
        reject(path, f"must be an int between 1 and {MAX_WINDOW}, got {show(value)}")
    return value


def _positions(value: Any, path: str, prompt: Prompt) -> list[int]:
    named = plain(value)
    selector = Selector(prompt)
    given = _OVER.get(named, value) if isinstance(named, str) else value
    runs = selector.resolve(given, path)
    if selector.wants_last_generated:
        reject(path, "'last_generated' is known when the answer has ended, too late for a rule")
    prompt.need_some(runs, path)
    return runs.flat()


def _probe(
    entry: Mapping[Any, Any],
    path: str,
    site: Site,
    shape: TapShape,
    prompt: Prompt,
    catalog: ModuleCatalog,
) -> bytes:
    """float32 [hidden], native endian."""
    if ("probe" in entry) == ("module" in entry):
        reject(path, "needs either 'probe' or 'module'")
    prompt.work.charge(shape.hidden_size >> 8, Unit.KILOBYTE, path)
    if "module" in entry:
        name = plain(entry["module"])
        direction = direction_of(name, f"{path}.module", site, catalog, prompt.work)
        return direction.astype(np.float32).tobytes()
    with np.errstate(over="ignore"):
        vector = need_vector(entry["probe"], f"{path}.probe", shape.hidden_size).astype(np.float32)
    if not np.isfinite(vector).all():
        reject(f"{path}.probe", "overflows float32")
    return vector.tobytes()


def place_rules(
    asked: Sequence[AskedRule], streams: Streams, shape: TapShape, projections: dict[str, bytes]
) -> list[Rule]:
    """The rules with the place of their scores. Those at one site over the same positions share a
    matrix, so that a step makes their scores at once.

    Args:
        streams: those of the request; the rules' are added.
        projections: as in `CapturePlan`; the rules' are added.
    """
    groups: dict[tuple[Site, tuple[int, ...]], list[int]] = {}
    for i, (rule, _) in enumerate(asked):
        groups.setdefault((rule.site, tuple(rule.runs)), []).append(i)
    placed: dict[int, Rule] = {}
    for (site, runs), members in groups.items():
        matrix = b"".join(asked[i].probe for i in members)
        digest = matrix_digest(matrix, shape)
        projections[digest] = matrix
        selection = streams.add("rules", Selection([site], list(runs)), True, [digest], "rules")
        for column, i in enumerate(members):
            placed[i] = msgspec.structs.replace(
                asked[i].rule, stream=selection.streams[0], column=column
            )
    return [placed[i] for i in range(len(asked))]
