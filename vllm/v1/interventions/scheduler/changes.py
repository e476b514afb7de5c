# SPDX-License-Identifier: Apache-2.0
"""Changes of the global state, in two phases, so that all engines make one or none."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.global_state import Change
from vllm.v1.interventions.scheduler.feature_room import AskWorkers, FeatureRoom
from vllm.v1.interventions.scheduler.module_sets import ModuleSets
from vllm.v1.interventions.scheduler.pools import Pool
from vllm.v1.interventions.scheduler.state import GlobalState

if TYPE_CHECKING:
    from vllm.v1.request import Request

LEASE_SECONDS = 30.0
"""A change that was prepared and never decided, because its frontend died, gives way."""


class Changes:
    """The change that is being made, if any, and the state that results.

    Args:
        modules: the vector sets of modules; changed here.
        room: autoencoders that workers hold; changed here.
        usage: what the state says of pools, by name.
        current: returns the state as it is.
        set_state: makes another the state, for requests that are under way too.
    """

    def __init__(
        self,
        modules: ModuleSets,
        room: FeatureRoom,
        usage: Mapping[str, Pool[Any]],
        current: Callable[[], GlobalState],
        set_state: Callable[[GlobalState, Iterable["Request"]], None],
    ) -> None:
        self._modules = modules
        self._room = room
        self._usage = usage
        self._current = current
        self._set_state = set_state
        self._token = ""
        self._change = Change()
        self._next = current()
        self._expires = 0.0

    def call(
        self, call: SteeringCall, requests: Iterable["Request"], ask: AskWorkers
    ) -> dict[str, Any]:
        """Read, or make one phase of a change.

        Args:
            requests: all of the scheduler's.
            ask: has all workers call a function.

        Returns:
            What msgpack can send: the state; "error" and "parameter" if the change cannot be made;
            "busy" if it must wait, or workers read; "version" and how many "changes" there were if
            it was made; for the phase "news" what the frontend lacks.
        """
        named = {file.stamp for file in self._current().contents.features.values()}
        if call.phase != "news":  # which may be of each request
            self._room.tidy(named, requests, ask)
        match call.phase:
            case "load" | "claim" | "loaded" | "unload":
                try:
                    return self._room.call(call, named, ask)
                except InterventionError as error:
                    return _told(error)
            case "state":
                pools = self._usage.items()
                usage = {name: {"in_use": pool.in_use, "size": pool.size} for name, pool in pools}
                return self._current().told | usage
            case "news":
                return self._current().news(call.since)
            case "prepare":
                if self._token not in ("", call.token) and time.monotonic() < self._expires:
                    return {"busy": True}
                try:
                    self._prepare(call)
                except InterventionError as error:
                    return _told(error)
            case "commit":
                if self._token != call.token:
                    return {"error": f"the change was not decided within {LEASE_SECONDS:g} s"}
                self._commit(requests)
            case "cancel":
                if self._token == call.token:
                    self._token = ""
        return {"version": self._current().version, "changes": self._current().number}

    def _prepare(self, call: SteeringCall) -> None:
        assert call.change is not None
        self._next = self._current().changed(call.change)
        for module in call.change.put.modules.values():
            # Another engine may have the change made, and a request here, before the commit comes.
            self._modules.keep(module)
        self._token, self._change = call.token, call.change
        self._expires = time.monotonic() + LEASE_SECONDS

    def _commit(self, requests: Iterable["Request"]) -> None:
        before, after = self._current().contents.modules, self._next.contents.modules
        for kind, name in self._change.keys:
            if kind == "modules":
                self._modules.replace(before.get(name), after.get(name))
        self._set_state(self._next, requests)
        self._token = ""


def _told(error: InterventionError) -> dict[str, Any]:
    return {"error": str(error), "parameter": error.parameter}
