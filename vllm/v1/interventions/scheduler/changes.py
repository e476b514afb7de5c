# SPDX-License-Identifier: Apache-2.0
"""Changes of global tiers and modules, in two phases, so that all engines make one or none."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vllm.v1.interventions.plan import TIERS, Part
from vllm.v1.interventions.scheduler.tiers import GlobalState, norms_of
from vllm.v1.interventions.sites import InterventionError, reject
from vllm.v1.steering.modules import Module

if TYPE_CHECKING:
    from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
    from vllm.v1.request import Request

LEASE_SECONDS = 30.0
"""A change that was prepared and never decided, because its frontend died, gives way."""


class Change(msgspec.Struct, frozen=True):
    """What to do; checked by the frontend."""

    action: Literal["set", "clear", "register", "unregister"]
    tiers: dict[str, Part] = {}
    """set: the vectors of each tier."""
    replace: bool = False
    """set: whether all that is not named goes."""
    tier: str | None = None
    """clear: one tier; None for all."""
    name: str = ""
    module: Module | None = None


class SteeringCall(msgspec.Struct, frozen=True):
    """A call of the engine core. Reading needs no phases."""

    phase: Literal["state", "modules", "prepare", "commit", "cancel"]
    token: str = ""
    """Names a change from its preparation to its end."""
    change: Change | None = None
    known: dict[str, str] = {}
    """modules: name -> digest of those the frontend has."""


class Changes:
    """The change that is being made, if any, and the state that results."""

    def __init__(self, interventions: "SchedulerInterventions") -> None:
        self._interventions = interventions
        self._token = ""
        self._change: Change | None = None
        self._tiers: GlobalState | None = None
        self._expires = 0.0

    def call(self, call: SteeringCall, requests: Iterable["Request"]) -> dict[str, Any]:
        """Returns the state; with "error" if the change cannot be made, "busy" if it must wait."""
        match call.phase:
            case "modules":
                return self._news(call.known)
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
        return self._state()

    def _prepare(self, call: SteeringCall) -> None:
        assert call.change is not None
        change, tiers = call.change, self._interventions.tiers
        changed = None
        if change.action == "set":
            changed = tiers.changed(change.tiers, change.replace)
        elif change.action == "clear":
            changed = tiers.cleared(change.tier)
        elif change.action == "unregister" and change.name not in self._interventions.modules:
            known = ", ".join(sorted(self._interventions.modules.items())[:20]) or "none"
            reject("name", f"unknown module {change.name!r}; registered are {known}")
        elif change.module is not None:
            # Another engine may have the change made, and a request here, before the commit comes.
            self._interventions.modules.keep(change.module)
        self._token, self._change, self._tiers = call.token, change, changed
        self._expires = time.monotonic() + LEASE_SECONDS

    def _commit(self, requests: Iterable["Request"]) -> None:
        assert self._change is not None
        if self._tiers is not None:
            self._interventions.set_tiers(self._tiers, requests)
        elif self._change.module is not None:
            self._interventions.modules.put(self._change.name, self._change.module)
        else:
            self._interventions.modules.remove(self._change.name)
        self._token = ""

    def _news(self, known: dict[str, str]) -> dict[str, Any]:
        """The names there are, and the modules a frontend lacks; as bytes, which it can decode."""
        modules = self._interventions.modules.items()
        return {
            "names": list(modules),
            "new": {
                name: msgspec.msgpack.encode(module)
                for name, module in modules.items()
                if known.get(name) != module.digest
            },
        }

    def _state(self) -> dict[str, Any]:
        current = self._interventions.tiers.current
        modules = self._interventions.modules.items()
        return {
            "version": current.version,
            "tiers": {
                tier: {"digest": part.digest, "norms": norms_of(part)}
                for tier in TIERS
                if (part := current.tiers.get(tier)) is not None
            },
            "modules": {name: describe(module) for name, module in sorted(modules.items())},
            "slots": {
                "in_use": self._interventions.slots.in_use,
                "size": self._interventions.slots.size,
            },
            "rows": {
                "in_use": self._interventions.pool.in_use,
                "size": self._interventions.pool.size,
            },
        }


def describe(module: Module) -> dict[str, Any]:
    """Norms and names, not values."""
    return {
        "digest": module.digest,
        "tiers": {tier: norms_of(part) for tier, part in module.tiers.items()},
        "ops": [op.name for op in module.ops],
    }
