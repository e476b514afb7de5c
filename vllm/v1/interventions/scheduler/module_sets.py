# SPDX-License-Identifier: Apache-2.0
"""Vector sets of the named modules of one engine, which requests refer to by digest."""

import time
from collections import Counter, deque
from collections.abc import Iterable
from threading import Lock, Timer

import msgspec

from vllm.v1.interventions.plan import Plan, VectorSet
from vllm.v1.steering.modules import Module

KEPT_SECONDS = 60.0
"""Seconds that the vector sets of a module outlive its name, for requests that were on their
way."""


class ModuleSets:
    """Vector sets by digest, as long as a module with a name has them, and `KEPT_SECONDS` more.

    Args:
        modules: those of the start.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self._lock = Lock()
        """Held while what follows changes: a timer's thread forgets."""
        self._kept: deque[tuple[float, Module]] = deque()
        self._sets: dict[str, VectorSet] = {}
        self._uses: Counter[str] = Counter()
        for module in modules:
            self._use(module)

    def replace(self, old: Module | None, new: Module | None) -> None:
        """Take in what a name means from now on, and keep for a while what it meant."""
        if new is not None:
            self._use(new)
        if old is not None:
            self._leave(old)

    def keep(self, module: Module) -> None:
        """Keep for `KEPT_SECONDS` the vector sets of a module that has on this engine no name
        yet."""
        self.replace(module, module)

    def forget(self) -> None:
        """Drop the modules that were kept long enough; called when the first of them was."""
        with self._lock:
            now = time.monotonic()
            while self._kept and self._kept[0][0] <= now:
                _, module = self._kept.popleft()
                for vector_set in module.phases.values():
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
            for vector_set in module.phases.values():
                self._uses[vector_set.digest] += 1
                self._sets.setdefault(vector_set.digest, vector_set)

    def _leave(self, module: Module) -> None:
        with self._lock:
            self._kept.append((time.monotonic() + KEPT_SECONDS, module))
            if len(self._kept) == 1:
                self._forget_in(KEPT_SECONDS)

    def fill(self, plan: Plan | None) -> Plan | None:
        """`plan` with the vector sets of the modules it refers to: they are the request's from
        here on, whatever becomes of the name.

        Raises:
            ValueError: a module was unregistered, or registered anew, long before.
        """
        if plan is None or plan.steering is None:
            return plan
        if not plan.steering.sums or not (wanted := plan.steering.module_digests):
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
