# SPDX-License-Identifier: Apache-2.0
"""Changes of global tiers and modules, in two phases, so that all engines make one or none."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.interventions.calls import GLOBAL_OPS, Change, SteeringCall
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.scheduler.pools import Pool
from vllm.v1.interventions.scheduler.state import GlobalState, ModuleStore
from vllm.v1.steering.modules import need_module

if TYPE_CHECKING:
    from vllm.v1.request import Request

LEASE_SECONDS = 30.0
"""A change that was prepared and never decided, because its frontend died, gives way."""


class Changes:
    """The change that is being made, if any, and the state that results.

    Args:
        modules: what names mean; changed here.
        usage: what the state says of pools, by name.
        current: returns the global tiers as they are.
        set_tiers: makes others the global tiers, for requests that are under way too.
    """

    def __init__(
        self,
        modules: ModuleStore,
        usage: Mapping[str, Pool[Any]],
        current: Callable[[], GlobalState],
        set_tiers: Callable[[GlobalState, Iterable["Request"]], None],
    ) -> None:
        self._modules = modules
        self._usage = usage
        self._current = current
        self._set_tiers = set_tiers
        self._token = ""
        self._change: Change | None = None
        self._tiers: GlobalState | None = None
        self._expires = 0.0

    def call(self, call: SteeringCall, requests: Iterable["Request"]) -> dict[str, Any]:
        """Read, or make one phase of a change.

        Args:
            requests: all of the scheduler's.

        Returns:
            What msgpack can send: the state; "error" and "parameter" if the change cannot be made;
            "busy" if it must wait; "version" and how many "changes" of modules there were if it was
            made; for the phase "modules" what the frontend lacks.
        """
        match call.phase:
            case "state":
                return self._state()
            case "modules":
                return self._modules.news(call.since)
            case "prepare":
                if self._token not in ("", call.token) and time.monotonic() < self._expires:
                    return {"busy": True}
                try:
                    self._prepare(call)
                except InterventionError as error:
                    return {"error": str(error), "parameter": error.parameter}
            case "commit":
                if self._token != call.token:
                    return {"error": f"the change was not decided within {LEASE_SECONDS:g} s"}
                self._commit(requests)
            case "cancel":
                if self._token == call.token:
                    self._token = ""
        return {"version": self._current().current.version, "changes": self._modules.changes}

    def _prepare(self, call: SteeringCall) -> None:
        assert call.change is not None
        change, tiers = call.change, self._current()
        changed = None
        if change.action == "set":
            changed = tiers.changed(change.tiers, change.replace)
        elif change.action == "clear":
            changed = tiers.cleared(change.tier)
        elif change.action == "unregister" and change.name not in self._modules:
            need_module(self._modules.named, change.name, "name")
        if change.module is not None:
            # Another engine may have the change made, and a request here, before the commit comes.
            self._modules.keep(change.module)
        self._token, self._change, self._tiers = call.token, change, changed
        self._expires = time.monotonic() + LEASE_SECONDS

    def _commit(self, requests: Iterable["Request"]) -> None:
        assert self._change is not None
        if self._tiers is not None:
            self._set_tiers(self._tiers, requests)
        if self._change.module is not None:
            self._modules.put(self._change.name, self._change.module)
        elif self._change.name in self._modules:
            self._modules.remove(self._change.name)
        self._token = ""

    def _state(self) -> dict[str, Any]:
        ops = self._modules.named.get(GLOBAL_OPS)
        tiers = self._current()
        return {
            "version": tiers.current.version,
            "ops": [op.name for op in ops.ops] if ops is not None else [],
            "tiers": tiers.told,
        } | {name: {"in_use": p.in_use, "size": p.size} for name, p in self._usage.items()}
