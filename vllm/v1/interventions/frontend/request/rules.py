# SPDX-License-Identifier: Apache-2.0
"""Parser of a request's `rules`: it checks them and finds their positions."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm.sampling_params import SamplingParams
from vllm.v1.capture.registry import is_inline
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.frontend.request.budget import Unit
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.matrices import direction_of, matrix_digest
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.selectors import Selector
from vllm.v1.interventions.frontend.request.streams import Streams
from vllm.v1.interventions.given_rules import (
    MAX_RULES,
    OVER,
    Dosed,
    GivenRule,
    Probe,
    given_rules,
)
from vllm.v1.interventions.makings import AnyMaking, Dose, Scores
from vllm.v1.interventions.plan import CapturePlan, Rule, Selection, Site
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.values import plain

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AskedRule(NamedTuple):
    """A rule and what makes its scores."""

    rule: Rule
    score: Probe | Dosed


def parse_rules(
    value: Any, path: str, shape: TapShape, prompt: Prompt, catalog: ModuleCatalog
) -> list[AskedRule]:
    """Parse `SamplingParams.rules`, and add those of the operator, which come first.

    Args:
        value: the user's list, or None.
        path: the field's name, for errors.
        shape: what the model offers.
        prompt: what `over` is resolved on.
        catalog: what names of modules mean, and the rules that hold for all requests.

    Raises:
        ValueError: as `given_rules`; positions that are known at the end only, or none at all; a
            name that a rule of the operator has, or with those too many.
    """
    of_all = catalog.rules
    named = partial(_direction, catalog=catalog, prompt=prompt)
    own = [] if value is None else given_rules(value, path, shape, named)
    if len(own) > (room := MAX_RULES - len(of_all)):
        reject(path, f"has {len(own)} rules, beside the operator's there may be {room}")
    names = {rule.name for rule in of_all}
    asked = []
    for rule in of_all:
        runs = Selector(prompt).resolve(_positions(rule), path)
        if runs:  # an answer of one token has no row
            asked.append(_asked(rule, runs, True, path, prompt, shape))
    for i, rule in enumerate(own):
        if rule.name in names:
            reject(f"{path}[{i}].name", f"{rule.name!r} is the name of a rule of the operator")
        at = f"{path}[{i}].over"
        selector = Selector(prompt)
        runs = selector.resolve(_positions(rule), at)
        if selector.wants_last_generated:
            reject(at, "'last_generated' is known when the answer has ended, too late for a rule")
        prompt.need_some(runs, at)
        asked.append(_asked(rule, runs, False, f"{path}[{i}]", prompt, shape))
    return asked


def refuse_beside_forcing(
    plan: CapturePlan, params: SamplingParams, prompt: Prompt, config: "VllmConfig"
) -> None:
    """Raise ValueError for what cannot be had of an answer that a rule may cut and have go on."""
    rule = next((rule for rule in plan.rules if rule.puts), None)
    if rule is None:
        return
    masks = config.model_config is not None and config.model_config.return_sampling_mask
    forced = [
        ("logprobs", params.logprobs is not None, "tokens that are forced have none"),
        ("logprob_token_ids", params.logprob_token_ids is not None, "forced tokens have none"),
        ("return_sampling_mask", masks, "tokens that are forced have none"),
    ]
    whose = "the operator's rule" if rule.for_all else "rule"
    for path, is_given, why in forced + sent_once(plan, params, bool(prompt.media.items), config):
        if is_given:
            reject(path, f"cannot be used beside {whose} {rule.name!r}, which forces tokens: {why}")


def sent_once(
    plan: CapturePlan | None, params: SamplingParams, has_media: bool, config: "VllmConfig"
) -> list[tuple[str, bool, str]]:
    """Return what cannot be had of an answer whose request is sent anew while it runs: a field or
    option, whether it is given, and why."""
    found = [
        ("structured_outputs", params.structured_outputs is not None, "a grammar goes on alone"),
        ("prompt", has_media, "images and embeddings are sent once"),
        ("kv_transfer_config", config.kv_transfer_config is not None, "it loads a prompt once"),
        (
            "enable_return_routed_experts",
            config.aux_output_config.enable_return_routed_experts,
            "experts of what was cut would be among them",
        ),
    ]
    for name, selection in () if plan is None else plan.consumers.items():
        path = f"capture.{name}"
        found += [
            (path, not is_inline(name), "it has rows of what is cut; capture inline"),
            (path, selection.making.adds_up, "a sum has rows of what is cut; capture the rows"),
        ]
    return found


def _direction(name: Any, path: str, site: Site, *, catalog: ModuleCatalog, prompt: Prompt) -> Any:
    return direction_of(name, path, site, catalog, prompt.work)


def _positions(rule: GivenRule) -> Any:
    """`over`, as selectors of others say it."""
    if isinstance(rule.over, list | tuple):
        return [OVER.get(one, one) if isinstance(one, str) else one for one in rule.over]
    named = plain(rule.over)
    return OVER.get(named, rule.over) if isinstance(named, str) else rule.over


def _asked(
    rule: GivenRule, runs: Positions, for_all: bool, path: str, prompt: Prompt, shape: TapShape
) -> AskedRule:
    units = rule.score.head.units * len(rule.sites)
    prompt.work.charge(units * shape.hidden_size >> 8, Unit.KILOBYTE, path)
    if not for_all:  # the operator's are the operator's to bound
        rows = len(runs.below(len(prompt.token_ids)))
        numbers = rows * rule.score.pool.numbers(rule.score.head.outputs)
        prompt.work.charge(numbers * prompt.work.n, Unit.POOLED, path)
    made = Rule(
        name=rule.name,
        sites=rule.sites,
        runs=runs.flat(),
        threshold=rule.threshold,
        below=rule.below,
        need=rule.need,
        of=rule.of,
        then=rule.then,
        puts=rule.puts,
        for_all=for_all,
        head=rule.score.head,
        pool=rule.score.pool,
    )
    return AskedRule(made, rule.score)


def place_rules(
    asked: Sequence[AskedRule], streams: Streams, shape: TapShape, projections: dict[str, bytes]
) -> list[Rule]:
    """The rules with the place of their scores. Those of a kind at the same sites over the same
    positions share a stream, so that a step makes their scores at once.

    Args:
        streams: those of the request; the rules' are added.
        projections: as in `CapturePlan`; the rules' are added.
    """
    groups: dict[_Alike, list[int]] = {}
    for i, (rule, score) in enumerate(asked):
        alike = type(score), tuple(rule.sites), tuple(rule.runs)
        groups.setdefault(alike, []).append(i)
    placed: dict[int, Rule] = {}
    for (kind, sites, runs), members in groups.items():
        for some in _parts(asked, members, shape):
            making, columns = _MADE[kind]([asked[i].score for i in some], shape, projections)
            scores = Selection(list(sites), list(runs), making=making)
            selection = streams.add("rules", scores, True, "rules")
            for column, i in zip(columns, some, strict=True):
                placed[i] = msgspec.structs.replace(
                    asked[i].rule, stream=selection.streams[0], column=column
                )
    return [placed[i] for i in range(len(asked))]


def _parts(asked: Sequence[AskedRule], members: list[int], shape: TapShape) -> list[list[int]]:
    """Some rules in parts whose scores take no more bytes than the row that they are made of, as
    far as each by itself does."""
    parts: list[list[int]] = []
    room = 0
    for i in members:
        units = asked[i].score.head.units
        if not parts or units > room:
            parts.append([])
            room = shape.row_bytes // 4
        parts[-1].append(i)
        room -= units
    return parts


_Alike = tuple[type[Probe] | type[Dosed], tuple[Site, ...], tuple[int, ...]]
"""Kind of score, sites and positions of rules whose scores are made at once."""
_Made = tuple[AnyMaking, Sequence[int]]
"""Making of the scores of some rules, and the first column of each."""


def _scores(scores: Sequence[Any], shape: TapShape, projections: dict[str, bytes]) -> _Made:
    """The products of several probes with the vectors of each, which are the site's own."""
    digests = []
    for parts in zip(*(score.vectors for score in scores), strict=True):
        matrix = b"".join(parts)
        digests.append(matrix_digest(matrix, shape))
        projections[digests[-1]] = matrix
    *columns, size = accumulate((score.head.units for score in scores), initial=0)
    return Scores(tuple(digests) if len(set(digests)) > 1 else (digests[0],), size), columns


def _doses(scores: Sequence[Any], shape: TapShape, projections: dict[str, bytes]) -> _Made:
    return Dose(), [0] * len(scores)


_MADE: dict[type, Callable[[Sequence[Any], TapShape, dict[str, bytes]], _Made]] = {
    Probe: _scores,
    Dosed: _doses,
}
"""Kind of score -> how it is made."""
