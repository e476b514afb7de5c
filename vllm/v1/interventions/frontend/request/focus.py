# SPDX-License-Identifier: Apache-2.0
"""Focus in a request, an entry of `SamplingParams.steering`: parsed and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np

from vllm.config.points import RETURNED
from vllm.v1.interventions.errors import need_family, reject, show
from vllm.v1.interventions.focus import (
    FACTOR,
    FOCUS,
    MAX_FACTORS,
    MAX_RUNS,
    RATIO,
    SHARE,
    FocusOp,
    FocusProgram,
)
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.given import Given, Select
from vllm.v1.interventions.plan import UNSTEERED
from vllm.v1.interventions.positions import ALL, END, Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.values import says
from vllm.v1.interventions.vectors import digest_of


def is_focus(entry: Any) -> bool:
    """Tell whether an entry of `steering` is one of these."""
    return isinstance(entry, Mapping) and says(entry.get("op"), FOCUS)


@dataclass(frozen=True)
class Focusing:
    """One parsed entry."""

    op: FocusOp
    span: Positions
    """The keys."""
    queries: Positions
    """The rows that are changed, of those behind the span's first key."""

    @cached_property
    def name(self) -> str:
        """The rule, number and heads of the operation, without the keys that it acts on."""
        heads = ";".join(f"{layer}:{own}" for layer, own in sorted(self.op.heads.items()))
        return f"{self.op.rule},{self.op.number.hex()},{heads}"

    def seen(self, position: int) -> list[tuple[int, ...]]:
        """Return the part of the span that is there at a position: (start, stop) of each run that
        ended before it, (start,) of one that goes on."""
        runs = [run for run in self.span.runs() if run[0] <= position]
        return [(a, b) if b <= position else (a,) for a, b in runs]


class FocusParser:
    """Parses one entry after the other, with what those before it do at the same layers.

    Args:
        shape: what the model offers.
        families: what the engine was started with.
        select: resolves `positions` and `span`.
        prompt: whose budget counts what they cost.
    """

    def __init__(
        self, shape: TapShape, families: frozenset[str], select: Select, prompt: Prompt
    ) -> None:
        self._shape, self._families = shape, families
        self._select, self._prompt = select, prompt
        self._at: dict[int, list[Focusing]] = {}

    def parse(self, entry: Any, path: str) -> Focusing:
        """Parse `{"op": "focus", "layers" | "heads": ..., "span": ..., "factor" | "share": ...}`.

        Raises:
            ValueError: a family the engine does not have, unknown keys, a layer that has no
                attention or whose keys cannot be read, heads out of range, a span or positions of
                nothing, a number out of its range, or more at a layer than there may be.
        """
        asked = Given(entry, path)
        need_family(FOCUS, self._families, f"{path}.op")
        number = "share" if "share" in asked.mapping() else "factor"
        layers = "heads" if "heads" in asked else "layers"
        allowed = ("positions", "rule") if number == "share" else ("positions",)
        given = asked.fields(("op", layers, "span", number), allowed, FOCUS)
        heads = self._heads(given[layers], layers)
        rule, value = self._number(given, number)
        span = given["span"].positions(self._select)
        queries = ALL
        if "positions" in given:
            queries = given["positions"].positions(self._select)
        first = span.first_from(0)
        assert first is not None
        if queries.stop <= first:
            reject(
                f"{path}.positions",
                f"all lie before position {first}, the first of span: no key of it is there yet",
            )
        before = queries & Positions([(first, END)])
        found = Focusing(FocusOp(rule, value, heads, span.flat()), span, before)
        self._prompt.work.charge(len(heads), Unit.SEGMENT, path)
        for layer in heads:
            self._need_room(layer, found, path)
        return found

    def charge(self, path: str) -> int:
        """Count the weights of the prompt's queries, over the keys up to each, which are made once
        more in the steps that all requests share. A generated token has one query a step.

        Returns:
            `SteeringPlan.key_weights`.
        """
        together, length = 0.0, len(self._prompt.token_ids)
        made: dict[tuple[int, ...], int] = {}
        """The pairs of queries and keys of entries that act together, by their places in memory."""
        for layer, entries in self._at.items():
            of_all, _ = self._shape.layers[layer].heads[RETURNED]
            heads = {h for e in entries for h in e.op.heads[layer] or range(of_all)}
            runs = sum(len(e.op.runs) // 2 for e in entries)
            each = len(heads) * self._shape.focus_passes(runs)
            which = tuple(map(id, entries))
            if which not in made:
                queries = Positions(run for e in entries for run in e.queries.below(length).runs())
                made[which] = sum((b - a) * (a + 1 + b) // 2 for a, b in queries.runs())
            number = int(made[which] * each) * self._prompt.work.n
            self._prompt.work.charge(number >> 10, Unit.WEIGHTS, path)
            together += each
        return ceil(together)

    def _heads(self, given: Given, key: str) -> dict[int, tuple[int, ...]]:
        """`FocusOp.heads` of `layers` or `heads`."""
        found: dict[int, tuple[int, ...]]
        if key == "layers":
            found = dict.fromkeys(given.layers(RETURNED, self._shape), ())
            if not found:
                given.refuse("names no layer")
        else:
            found = given.heads(RETURNED, self._shape)
        for layer in found:
            of = self._shape.layers[layer]
            latent = "attention over a latent cache (MLA)" if of.latent else ""
            if why := of.unread or latent:
                given.refuse(f"layer {layer} cannot be focused: {why}")
        return {layer: found[layer] for layer in sorted(found)}

    def _number(self, given: Given, key: str) -> tuple[int, float]:
        number = given[key].number()
        if key == "factor":
            if number < 0:
                given[key].refuse(f"must be 0 or more, got {show(number)}")
            return FACTOR, number
        if not 0 < number < 1:
            given[key].refuse(f"must be between 0 and 1, both excluded, got {show(number)}")
        if given["rule"].value is None:
            return SHARE, number
        given["rule"].choice(("ratio",), "must be 'ratio' or left out, got {given}")
        return RATIO, number

    def _need_room(self, layer: int, found: Focusing, path: str) -> None:
        others = self._at.setdefault(layer, [])
        others.append(found)
        if len(others) > MAX_FACTORS or (
            len(others) > 1 and any(other.op.rule != FACTOR for other in others)
        ):
            reject(
                path,
                f"is more at layer {layer} than one share, or {MAX_FACTORS} factors: it may have "
                "either",
            )
        runs = sum(len(other.op.runs) // 2 for other in others)
        if runs > MAX_RUNS:
            reject(
                f"{path}.span",
                f"comes to {runs} runs of keys at layer {layer}, allowed are {MAX_RUNS}",
            )
        for other in others[:-1]:
            if other.span & found.span:
                reject(f"{path}.span", f"has keys of another span at layer {layer}; name each once")


class FocusPrograms:
    """The distinct sets of entries that act together in a request.

    Args:
        entries: of the request.
        work: counts what they cost, for the field `path`.
        most: how many programs a request may have.
    """

    def __init__(self, entries: list[Focusing], work: Work, path: str, most: int) -> None:
        self._entries, self._work, self._path, self._most = entries, work, path, most
        self.programs: dict[str, FocusProgram] = {}

    def make(self, first: int, acts: np.ndarray) -> tuple[str, str]:
        """The digest of the program from position `first` on, where bool [entries] `acts` is true,
        and the key of its blocks; keeps it."""
        acting = np.flatnonzero(acts).tolist()
        if not acting:
            return UNSTEERED, UNSTEERED
        chosen = [self._entries[i] for i in acting]
        runs = sum(len(each.op.runs) for each in chosen)
        heads = sum(len(each.op.heads) for each in chosen)
        self._work.charge(runs + heads, Unit.CELL, self._path)
        digest = digest_of("focus;" + "|".join(f"{e.name},{e.op.runs}" for e in chosen))
        self.programs[digest] = FocusProgram(digest, acting)
        if len(self.programs) > self._most:
            reject(
                self._path,
                f"the request needs more than {self._most} programs of focus, the engine has "
                f"max_steering_configs={self._most}",
            )
        key = digest_of("focus;" + "|".join(f"{e.name},{e.seen(first)}" for e in chosen))
        return digest, f"focus:{key}"
