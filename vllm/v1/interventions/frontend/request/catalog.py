# SPDX-License-Identifier: Apache-2.0
"""Frontend: what the names in `steering_modules` mean at this moment, and vectors without one."""

from collections.abc import Awaitable, Callable, Collection, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.v1.features.autoencoder import close, opened
from vllm.v1.interventions.frontend.request.memo import CaptureMemo, VectorMemo
from vllm.v1.interventions.frontend.request.module_plans import ModulePlans
from vllm.v1.interventions.given_rules import GivenRule
from vllm.v1.interventions.global_state import Change, Globals, startup_state
from vllm.v1.interventions.plan import SteeringPlan, VectorSet
from vllm.v1.steering.modules import Module, need_module

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ModuleCatalog:
    """Global state as far as this frontend makes plans of it: the engine core has the same."""

    refresh: Callable[[], Awaitable[None]]
    """Asks what other API servers of the engines have changed; set where there may be some."""

    def __init__(self, config: "VllmConfig") -> None:
        self.vectors = VectorMemo()
        """Memo of the vectors that requests brought along, in place of a module's name."""
        self.captures = CaptureMemo()
        self.plans = ModulePlans()
        # At the start, as it takes seconds a gigabyte: requests are planned beside others.
        for file in config.steering_config.feature_files.values():
            opened(file)
        self._config = config
        self._state: Globals | None = None
        """State of which plans are made. A change puts another in its place: threads read it."""
        self._lock = Lock()
        """Held while the state is loaded, or another takes its place."""
        self._sets: tuple[Globals | None, dict[str, VectorSet]] = None, {}
        """A state, and the vector sets of all its modules by digest: each request that names a
        module asks for some."""
        self.changes = 0
        """Number of changes of the engine core's state that are known here."""
        self.applied = 0
        """Number of changes that this frontend's state went through: plans that were made before
        the last one may name what is gone."""

    @property
    def state(self) -> Globals:
        """Global state, without vectors of tiers; that of start-up is loaded at the first look."""
        if self._state is None:
            with self._lock:  # what a change made meanwhile is not lost
                if self._state is None:
                    # Not before: the model's shape comes with the engine's ready message.
                    self._state = startup_state(self._config)
        return self._state

    def load(self) -> None:
        """Read what the options name, if nobody has; it takes long, so do it in a thread."""
        assert self.state is not None

    @property
    def asks_others(self) -> bool:
        """True if each request asks first what other API servers have changed."""
        defaults = self._config.steering_config.default_steering_modules
        return bool(defaults) or self._config.capture_config.rules is not None

    @property
    def _acting(self) -> Globals:
        """State of which some may act on requests that name none of it."""
        return self.state if self.asks_others else self._state or Globals()

    def defaults(self, besides: Collection[str] = ()) -> list[tuple[str, Module]]:
        """Modules that act on a request that does not name them: those of
        `default_steering_modules` that are registered, in the option's order, and the operations
        of `llm.steering.set`.

        Args:
            besides: names that the request gives.

        Returns:
            Each with what errors name as the reason why it acts.
        """
        state, names = self._acting, self._config.steering_config.default_steering_modules
        if not (names or state.ops):
            return []
        acting = [n for n in names if n in state.modules and n not in besides]
        named = [("default_steering_modules", state.modules[name]) for name in acting]
        return named + [("llm.steering.set", module) for module in state.ops.values()]

    def acting(self, names: Iterable[Any]) -> list[str | None]:
        """Return the digests of what some names mean, None for a name that means nothing, and then
        those of the modules that act by default.

        Args:
            names: each alone, or with a scale behind it.
        """
        known, digests = self.state.modules, list[str | None]()
        for name in names:
            module = known.get(name if type(name) is str else name[0])
            digests.append(None if module is None else module.digest)
        return [*digests, *(module.digest for _, module in self.defaults())]

    @property
    def rules(self) -> list[GivenRule]:
        """Rules of the operator, which hold for all requests."""
        return self._acting.rules.get("", [])

    def get(self, name: Any, path: str) -> Module:
        """The module of a name. Raises ValueError if there is none, naming `path`."""
        return need_module(self.state.modules, name, path)

    def sets_of(self, steering: SteeringPlan | None) -> dict[str, VectorSet]:
        """The vector sets of modules that a plan refers to, by digest, without those that no name
        has any more."""
        if steering is None or not (wanted := steering.module_digests):
            return {}
        state, (indexed, known) = self.state, self._sets
        if indexed is not state or not wanted <= known.keys():
            modules = [*state.modules.values(), *state.ops.values()]
            sets = [vector_set for module in modules for vector_set in module.phases.values()]
            known = {each.digest: each for each in sets}
            self._sets = state, known
        return {digest: known[digest] for digest in wanted if digest in known}

    def told(self) -> dict[str, bytes]:
        """Return `Module.told` of each module, by name, sorted."""
        return {name: module.told for name, module in sorted(self.state.modules.items())}

    def learn(self, news: dict[str, Any]) -> None:
        """Take over what the engine core has and this frontend lacks.

        Args:
            news: the reply of `Changes.call` to "news".
        """
        names = news["names"] or {}
        gone = [(k, name) for k in names for name in self.state.of(k).keys() - names[k]]
        self._apply(Change(msgspec.msgpack.decode(news["new"], type=Globals), gone))
        self.changes = news["changes"]

    def made(self, change: Change, changes: int) -> None:
        """Take over a change that this frontend had the engines make.

        Args:
            changes: how many there were with this one.
        """
        self._apply(change)
        if changes == self.changes + 1:  # else there is one of another frontend to ask for
            self.changes = changes

    def _apply(self, change: Change) -> None:
        if change.learned:  # else nothing need be loaded
            old = self.state
            with self._lock:
                before = self._state or old
                self._state = change.applied(before)
                self._sets = None, {}
                self.applied += 1
                self._offer(self._state)
            for file in {*before.features.values()} - {*self._state.features.values()}:
                close(file)

    def close(self, change: Change) -> None:
        """Close the file of an autoencoder that was to get a name, and did not."""
        for name, file in change.put.features.items():
            if self.state.features.get(name) != file:
                close(file)

    def _offer(self, state: Globals) -> None:
        """Let requests find the autoencoders that have a name."""
        named = {**self._config.steering_config.feature_files, **state.features}
        shape = self._config.tap_shape
        if shape is not None and named.keys() | shape.features.keys():
            self._config.tap_shape = msgspec.structs.replace(shape, features=named)
