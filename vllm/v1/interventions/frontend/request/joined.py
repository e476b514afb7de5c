# SPDX-License-Identifier: Apache-2.0
"""Steering of a request that changes while it runs: one plan up to a position, another from there.

Digests stay what they are, so positions before the change keep their blocks in the prefix cache.
"""

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.plan import UNSTEERED, Program, Segment, Site, SteeringPlan, VectorSet
from vllm.v1.interventions.sites import site_order
from vllm.v1.interventions.terms import rows_needed


class Joined:
    """Two plans of one request, whose globals act alike.

    Args:
        before: acts up to the change.
        after: acts from there on; no gate of it is decided at the last token of the prompt, or
            latches.
        module_sets: vector sets of modules that `after` refers to, by digest.
        path: field that errors name.
        work: counts what joining them costs.
    """

    def __init__(
        self,
        before: SteeringPlan,
        after: SteeringPlan,
        module_sets: dict[str, VectorSet],
        path: str,
        work: Work,
    ) -> None:
        assert before.inherit == after.inherit
        self.module_sets = module_sets
        self._path, self._before, self._after = path, before.segments, after.segments
        plans = before, after
        self.op_sites = _op_sites(plans)
        """The sites where operations of either act, each with its places in a program."""
        places = sum(len(ops) for _, ops in self.op_sites)
        work.charge(places * sum(len(plan.programs) for plan in plans), Unit.CELL, path)
        programs = [_placed(p, plan, self.op_sites) for plan in plans for p in plan.programs]
        shift = len(before.focus_ops)
        moved = [
            msgspec.structs.replace(p, ops=[shift + i for i in p.ops]) for p in after.focus_programs
        ]
        self._focus_ops = [*before.focus_ops, *after.focus_ops]
        self._sums = {each.digest: each for plan in plans for each in plan.sums}
        self._sets = {each.digest: each for plan in plans for each in plan.sets}
        self._programs = {each.digest: each for each in programs}
        self._terms = {each.digest: each for plan in plans for each in plan.terms}
        self._focus = {each.digest: each for each in [*before.focus_programs, *moved]}
        self._key_weights = max(plan.key_weights for plan in plans)
        self._inherit = before.inherit

    def at(self, position: int, config: SteeringConfig) -> SteeringPlan:
        """Return the plan that is `before` up to a generated position, and `after` from there on.

        Raises:
            ValueError: nothing acts from there on that `after` has; or the engine has not the room
                for both.
        """
        first = bisect_right(self._after, position, key=lambda segment: segment.first) - 1
        changed = [
            msgspec.structs.replace(self._after[first], first=position),
            *self._after[first + 1 :],
        ]
        if any(map(_acts, self._after)) and not any(map(_acts, changed)):
            reject(self._path, f"can act on no position from {position} on, where the change is")
        segments = [*(s for s in self._before if s.first < position), *changed]
        sums = [self._sums[d] for d in _used(s.vector_sum for s in segments)]
        programs = [self._programs[d] for d in _used(s.program for s in segments)]
        terms = [self._terms[d] for d in _used(d for p in programs for d in p.terms)]
        focus = [self._focus[d] for d in _used(s.focus for s in segments)]
        sets = _used(digest for vector_sum in sums for digest, _ in vector_sum.sets)
        slots, rows = max(len(sums), len(focus)), max(rows_needed(terms), len(programs))
        for needed, option, most in (
            (slots, "max_steering_configs", config.max_steering_configs),
            (rows, "max_steering_rows", config.max_steering_rows),
        ):
            if needed > most:
                reject(
                    self._path,
                    f"the request needs {needed} of the engine's {option}={most} with what acted "
                    "before: all of it is kept until the answer ends. Change it less often",
                )
        return SteeringPlan(
            segments=segments,
            inherit=self._inherit,
            sums=sums,
            sets=[self._sets[digest] for digest in sets if digest in self._sets],
            programs=programs,
            op_sites=self.op_sites,
            terms=terms,
            focus_programs=focus,
            focus_ops=self._focus_ops,
            key_weights=self._key_weights,
        )


def _acts(segment: Segment) -> bool:
    return any((segment.vector_sum, segment.program, segment.focus))


def _used(digests: Iterable[str]) -> list[str]:
    """Digests without their repetitions, and without `UNSTEERED`."""
    return [digest for digest in dict.fromkeys(digests) if digest != UNSTEERED]


def _op_sites(plans: Iterable[SteeringPlan]) -> list[tuple[Site, list[int]]]:
    """The sites of all plans' operations, with places of their own for the longest list at each."""
    longest: dict[Site, int] = {}
    for plan in plans:
        for site, ops in plan.op_sites:
            longest[site] = max(longest.get(site, 0), len(ops))
    made, first = [], 0
    for site in sorted(longest, key=site_order):
        made.append((site, list(range(first, first + longest[site]))))
        first += longest[site]
    return made


def _placed(
    program: Program, plan: SteeringPlan, op_sites: list[tuple[Site, list[int]]]
) -> Program:
    """A program of `plan` with its terms at the places of `op_sites`."""
    own, terms = dict(plan.op_sites), list[str]()
    for site, places in op_sites:
        here = [program.terms[i] for i in own.get(site, ())]
        terms += [*here, *[UNSTEERED] * (len(places) - len(here))]
    return msgspec.structs.replace(program, terms=terms)
