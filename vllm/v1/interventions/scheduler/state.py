# SPDX-License-Identifier: Apache-2.0
"""The global tiers and the named modules of one engine. Owned by the engine core, where all
frontends share them."""

import time
from collections import Counter, deque
from collections.abc import Mapping
from functools import cached_property
from threading import Lock, Timer
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from vllm.v1.interventions.messages import GlobalTiers
from vllm.v1.interventions.plan import TIERS, Plan, Site, VectorSet
from vllm.v1.interventions.scheduler.identity import Era
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.vectors import add_up, need_finite_sum, norms_of, vector_set_of
from vllm.v1.steering.modules import Module

PHASE_TIERS = {"prefill": ("base", "prefill"), "decode": ("base", "decode")}
"""Phase -> the tiers that act in it."""


class GlobalState:
    """Global tiers: at each site of each tier one vector or none."""

    def __init__(self, shape: TapShape) -> None:
        self._shape = shape
        self._vectors: dict[str, dict[Site, np.ndarray]] = {tier: {} for tier in TIERS}
        self.current = GlobalTiers(version=0, tiers={})

    def changed(self, tiers: dict[str, VectorSet], replace: bool) -> "GlobalState":
        """The state after a change; this one stays as it is.

        Args:
            tiers: tier -> vectors; each overwrites the one at its tier and site.
            replace: whether all that is not named goes.

        Raises:
            ValueError: the tiers of a phase add up to more than the model's dtype leaves room for.
        """
        new = GlobalState(self._shape)
        if not replace:
            new._vectors = {tier: dict(vectors) for tier, vectors in self._vectors.items()}
        for tier, vector_set in tiers.items():
            new._vectors[tier] |= dict(zip(vector_set.sites, vector_set.rows, strict=True))
        return self._next(new)

    def cleared(self, tier: str | None) -> "GlobalState":
        """The state without one tier, or without any for None.

        Raises:
            ValueError: see `changed`; the tier that goes may have balanced another.
        """
        new = GlobalState(self._shape)
        if tier is not None:
            new._vectors = {t: dict(v) for t, v in self._vectors.items() if t != tier} | {tier: {}}
        return self._next(new)

    def _next(self, new: "GlobalState") -> "GlobalState":
        for phase, names in PHASE_TIERS.items():
            total = add_up(new._vectors[tier] for tier in names)
            need_finite_sum(total, f"the global tiers at {phase} positions", self._shape)
        sets = {tier: vector_set_of(vectors) for tier, vectors in new._vectors.items() if vectors}
        new.current = GlobalTiers(version=self.current.version + 1, tiers=sets)
        return new

    @cached_property
    def told(self) -> dict[str, Any]:
        """The digest and the norms of each tier that has vectors."""
        return {
            tier: {"digest": vector_set.digest, "norms": norms_of(vector_set)}
            for tier, vector_set in self.current.tiers.items()
        }

    def era(self, first: int, nonce: str = "") -> Era:
        """The era of positions from `first` on that run under this state."""
        tiers = self.current.tiers
        prefill, decode = (
            tuple(tiers[tier].digest for tier in names if tier in tiers)
            for names in PHASE_TIERS.values()
        )
        return Era(first, prefill, decode, nonce)


KEPT_SECONDS = 60.0
"""Seconds that the vector sets of a module outlive its name, for requests that were on their
way."""


class ModuleStore:
    """Named modules. Requests refer to their vector sets by digest."""

    def __init__(self, modules: Mapping[str, Module] = MappingProxyType({})) -> None:
        self._modules = dict(modules)
        self._made: dict[str, int] = {}
        """Name -> the number of the change that gave it its module, ascending; none if it has had
        it from the start."""
        self._removed = 0
        """The number of the last change that removed a name."""
        self.changes = 0
        """Number of changes."""
        self._lock = Lock()
        """Held while what follows changes: a timer's thread forgets."""
        self._kept: deque[tuple[float, Module]] = deque()
        self._sets: dict[str, VectorSet] = {}
        self._uses: Counter[str] = Counter()
        for module in self._modules.values():
            self._use(module)

    def put(self, name: str, module: Module) -> None:
        """Give a module a name; the one that had it is kept."""
        self._use(module)
        if name in self._modules:
            self._leave(self._modules.pop(name))
        self._modules[name] = module
        self.changes += 1
        self._made.pop(name, None)
        self._made[name] = self.changes

    def remove(self, name: str) -> None:
        """Remove a name; its module is kept."""
        self._leave(self._modules.pop(name))
        self._made.pop(name, None)
        self.changes += 1
        self._removed = self.changes

    def keep(self, module: Module) -> None:
        """Keep for `KEPT_SECONDS` the vector sets of a module that has on this engine no name
        yet."""
        self._use(module)
        self._leave(module)

    def forget(self) -> None:
        """Drop the modules that were kept long enough; called when the first of them was."""
        with self._lock:
            now = time.monotonic()
            while self._kept and self._kept[0][0] <= now:
                _, module = self._kept.popleft()
                for vector_set in _sets_of(module):
                    self._uses[vector_set.digest] -= 1
                    if not self._uses[vector_set.digest]:
                        del self._uses[vector_set.digest], self._sets[vector_set.digest]
            if self._kept:
                self._forget_in(self._kept[0][0] - now)

    def _forget_in(self, seconds: float) -> None:
        # A thread, as an idle engine does nothing; not one for each of many neighbours.
        timer = Timer(max(seconds, 1.0), self.forget)
        timer.daemon = True
        timer.start()

    def _use(self, module: Module) -> None:
        with self._lock:
            for vector_set in _sets_of(module):
                self._uses[vector_set.digest] += 1
                self._sets.setdefault(vector_set.digest, vector_set)

    def _leave(self, module: Module) -> None:
        with self._lock:
            self._kept.append((time.monotonic() + KEPT_SECONDS, module))
            if len(self._kept) == 1:
                self._forget_in(KEPT_SECONDS)

    def news(self, since: int) -> dict[str, Any]:
        """Return what a frontend lacks that knows `since` changes: modules, as bytes that it can
        decode; and all names, if some were removed."""
        new = {}
        for name, number in reversed(self._made.items()):
            if number <= since:
                break
            new[name] = msgspec.msgpack.encode(self._modules[name])
        names = list(self._modules) if self._removed > since else None
        return {"changes": self.changes, "new": new, "names": names}

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    @property
    def named(self) -> Mapping[str, Module]:
        """Name -> module, as they are."""
        return self._modules

    def fill(self, plan: Plan | None) -> Plan | None:
        """`plan` with the vector sets of the modules it refers to: they are the request's from
        here on, whatever becomes of the name.

        Raises:
            ValueError: a module was unregistered, or registered anew, long before.
        """
        if plan is None or plan.steering is None:
            return plan
        given = {vector_set.digest for vector_set in plan.steering.sets}
        wanted = {d for vector_sum in plan.steering.sums for d, _ in vector_sum.sets} - given
        if not wanted:
            return plan
        # Looked up once: another thread may drop one.
        found = {digest: self._sets.get(digest) for digest in sorted(wanted)}
        sets = [vector_set for vector_set in found.values() if vector_set is not None]
        if missing := [digest for digest in found if found[digest] is None]:
            raise ValueError(
                f"steering_modules: a module of this request was unregistered or registered anew "
                f"while the request was on its way (digest {missing[0][:12]}); send it again"
            )
        all_sets = [*plan.steering.sets, *sets]
        steering = msgspec.structs.replace(plan.steering, sets=all_sets)
        return msgspec.structs.replace(plan, steering=steering)


def _sets_of(module: Module) -> list[VectorSet]:
    return [each for each in (module.prefill, module.decode) if each is not None]
