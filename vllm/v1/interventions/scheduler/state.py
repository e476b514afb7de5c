# SPDX-License-Identifier: Apache-2.0
"""The global state of one engine. Owned by the engine core, where all frontends share it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from vllm.v1.interventions.global_state import LEARNED_KINDS, Change, Globals, Key
from vllm.v1.interventions.messages import GlobalTiers
from vllm.v1.interventions.plan import TIERS
from vllm.v1.interventions.scheduler.identity import NO_GLOBALS, Era
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.vectors import (
    add_up,
    need_finite_sum,
    norms_of,
    vector_set_of,
    vectors_of,
)
from vllm.v1.steering.modules import PHASE_TIERS, need_module


@dataclass(frozen=True)
class GlobalState:
    """Global state between two changes. It stays as it is; `changed` makes another."""

    shape: TapShape
    contents: Globals = field(default_factory=Globals)
    version: int = 0
    """Number of changes that have a version."""
    number: int = 0
    """Number of all changes."""
    made: dict[Key, int] = field(default_factory=dict)
    """Content that frontends know -> the number of the change that gave it, ascending; without
    the contents of the start."""
    removed: int = 0
    """The number of the last change that removed a content that frontends know."""

    def changed(self, change: Change) -> "GlobalState":
        """The state after a change.

        Raises:
            ValueError: there is no such module to drop; or the tiers of a phase add up to more
                than the model's dtype leaves room for, of which one that goes may have balanced
                another.
        """
        made, number, removed = dict(self.made), self.number + 1, self.removed
        for kind, name in change.drop:
            if kind == "modules":
                need_module(self.contents.modules, name, "name")
            if kind in LEARNED_KINDS and name in self.contents.of(kind):
                removed = number
        contents = change.applied(self.contents)
        for key in change.keys:
            made.pop(key, None)
        made |= {key: number for key in change.put.keys if key[0] in LEARNED_KINDS}
        if change.versioned:
            self._set_tiers(contents.tiers, change)
        version = self.version + change.versioned
        return GlobalState(self.shape, contents, version, number, made, removed)

    def _set_tiers(self, tiers: dict[str, Any], change: Change) -> None:
        for tier, given in change.put.tiers.items():
            before = vectors_of(tiers[tier]) if tier in tiers else {}
            tiers[tier] = vector_set_of(before | vectors_of(given))
        for phase, names in PHASE_TIERS.items():
            total = add_up(vectors_of(tiers[tier]) for tier in names if tier in tiers)
            need_finite_sum(total, f"the global tiers at {phase} positions", self.shape)

    @cached_property
    def tiers(self) -> GlobalTiers:
        """The global tiers, as workers are told of them."""
        given = self.contents.tiers
        return GlobalTiers(self.version, {tier: given[tier] for tier in TIERS if tier in given})

    @cached_property
    def told(self) -> dict[str, Any]:
        """Version, names of the operations, and the digest and the norms of each tier that has
        vectors."""
        tiers = {
            tier: {"digest": vector_set.digest, "norms": norms_of(vector_set)}
            for tier, vector_set in self.tiers.tiers.items()
        }
        ops = [op.name for module in self.contents.ops.values() for op in module.ops]
        return {"version": self.version, "ops": ops, "tiers": tiers}

    def news(self, since: int) -> dict[str, Any]:
        """Return what a frontend lacks that knows `since` changes: contents, as bytes that it can
        decode; and all names by kind, if some were removed."""
        new = Globals()
        for (kind, name), number in reversed(self.made.items()):
            if number <= since:
                break
            new.of(kind)[name] = self.contents.of(kind)[name]
        names = {kind: list(self.contents.of(kind)) for kind in LEARNED_KINDS}
        return {
            "changes": self.number,
            "new": msgspec.msgpack.encode(new),
            "names": names if self.removed > since else None,
        }

    def era(self, first: int, nonce: str = "") -> Era:
        """The era of positions from `first` on that run under this state."""
        tiers = self.contents.tiers
        if not (tiers or first or nonce):
            return NO_GLOBALS
        prefill, decode = (
            tuple(tiers[tier].digest for tier in names if tier in tiers)
            for names in PHASE_TIERS.values()
        )
        return Era(first, prefill, decode, nonce)
