# SPDX-License-Identifier: Apache-2.0
"""The global tiers and the named modules of one engine. Owned by the engine core, where all
frontends share them."""

import time

import msgspec
import numpy as np

from vllm.v1.interventions.messages import GlobalTiers
from vllm.v1.interventions.plan import TIERS, UNSTEERED, Plan, Site, TapShape, VectorSet
from vllm.v1.interventions.scheduler.block_identity import Era
from vllm.v1.interventions.vectors import add_up, need_finite_sum, vector_set_of
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

    def era(self, first: int, nonce: str = "") -> Era:
        """The era of positions from `first` on that run under this state."""
        tiers = self.current.tiers
        phases = {
            phase: "+".join(tiers[tier].digest if tier in tiers else "" for tier in names)
            for phase, names in PHASE_TIERS.items()
        }
        prefill, decode = (d if d != "+" else UNSTEERED for d in phases.values())
        return Era(first, prefill, decode, nonce)


def norms_of(vector_set: VectorSet) -> dict[str, dict[int, float]]:
    """Euclidean norms of a set's vectors: point -> layer -> norm."""
    norms: dict[str, dict[int, float]] = {}
    for (point, layer), row in zip(vector_set.sites, vector_set.rows, strict=True):
        norms.setdefault(point, {})[layer] = float(np.linalg.norm(row.astype(np.float64)))
    return norms


KEPT_SECONDS = 60.0
"""How long the vector sets of a module outlive its name, for requests that were on their way."""


class ModuleStore:
    """Named modules. Requests refer to their vector sets by digest."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}
        self._kept: list[tuple[float, Module]] = []
        self._sets: dict[str, VectorSet] = {}

    def put(self, name: str, module: Module) -> None:
        """Give a module a name; the one that had it is kept."""
        if name in self._modules:
            self.keep(self._modules[name])
        self._modules[name] = module
        self._index()

    def remove(self, name: str) -> None:
        """Remove a name; its module is kept."""
        self.keep(self._modules.pop(name))

    def keep(self, module: Module) -> None:
        """Keep for `KEPT_SECONDS` the vector sets of a module that has no name any more, or on
        this engine not yet."""
        now = time.monotonic()
        self._kept = [entry for entry in self._kept if entry[0] > now]
        self._kept.append((now + KEPT_SECONDS, module))
        self._index()

    def _index(self) -> None:
        # Built aside and swapped: `fill` reads it in another thread.
        modules = [*self._modules.values(), *(module for _, module in self._kept)]
        self._sets = {p.digest: p for m in modules for p in (m.prefill, m.decode) if p is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def items(self) -> dict[str, Module]:
        """Name -> module, a copy."""
        return dict(self._modules)

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
        sets = self._sets
        if missing := wanted - sets.keys():
            raise ValueError(
                f"steering_modules: a module of this request was unregistered or registered anew "
                f"while the request was on its way (digest {min(missing)[:12]}); send it again"
            )
        all_sets = [*plan.steering.sets, *(sets[digest] for digest in sorted(wanted))]
        steering = msgspec.structs.replace(plan.steering, sets=all_sets)
        return msgspec.structs.replace(plan, steering=steering)
