# SPDX-License-Identifier: Apache-2.0
"""Memory of autoencoders that get a name while the engine serves: a bound in bytes, places for
`reconstruct`, and which of them workers hold. One without a name stays while a request uses it, and
a while more."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config.steering import FeatureFile
from vllm.logger import init_logger
from vllm.v1.interventions.calls import FeaturePhase, SteeringCall
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.makings import Features
from vllm.v1.interventions.plan import Plan

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

KEPT_SECONDS = 60.0
"""Seconds that an autoencoder without a name outlives the last request that used it, for requests
that were on their way, or are sent anew."""

AskWorkers = Callable[..., list[Any]]
"""`EngineCore.collective_rpc`."""


@dataclass
class _Held:
    name: str
    file: FeatureFile
    num_bytes: int
    used: float
    """Time at which it last had a name or a request, by `time.monotonic`."""


def _stamps(plan: Plan | None) -> Iterator[tuple[str, str]]:
    """Yield name and stamp of each autoencoder that got its name late and that a plan reads or
    reconstructs by."""
    capture = None if plan is None else plan.capture
    for stream in capture.streams if capture is not None else ():
        if isinstance(stream.making, Features) and stream.making.stamp:
            yield stream.making.name, stream.making.stamp
    steering = None if plan is None else plan.steering
    for term in steering.terms if steering is not None else ():
        if term.features is not None:
            yield term.features


def _ask(worker: Any, phase: FeaturePhase, name: str, file: FeatureFile) -> str | None:
    """Call `WorkerInterventions.hold` of a worker, in its process."""
    answer: str | None = worker.worker.model_runner.interventions.hold(phase, name, file)
    return answer


class FeatureRoom:
    """The autoencoders that workers hold, or are loading.

    Args:
        size: bytes that they may take.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[str, _Held] = {}
        """By stamp."""

    def use(self, plan: Plan | None) -> None:
        """Note that a request of this plan is here.

        Raises:
            ValueError: it uses an autoencoder that lost its name long before.
        """
        for name, stamp in _stamps(plan):
            held = self._held.get(stamp)
            if held is None:
                raise ValueError(
                    f"features: {name} was unregistered or registered anew while the request was "
                    "on its way; send it again"
                )
            held.used = time.monotonic()

    def left(self, plan: Plan | None) -> None:
        """Note that a request of this plan has ended."""
        for _, stamp in _stamps(plan):
            if stamp in self._held:
                self._held[stamp].used = time.monotonic()

    def tidy(self, named: Collection[str], requests: Iterable["Request"], ask: AskWorkers) -> None:
        """Drop what has no name, no request, and had none for `KEPT_SECONDS`.

        Args:
            named: stamps of those that have a name.
            requests: all of the scheduler's.
        """
        if not self._held:
            return
        now = time.monotonic()
        used = {*named, *(s for r in requests for _, s in _stamps(r.interventions.plan))}
        for stamp, held in [*self._held.items()]:
            if stamp in used:
                held.used = now
            elif now - held.used > KEPT_SECONDS:
                self._drop(held, ask)

    def call(self, call: SteeringCall, named: Collection[str], ask: AskWorkers) -> dict[str, Any]:
        """Do one phase of a load.

        Args:
            named: as for `tidy`.

        Returns:
            "busy" while workers read, or if the place has another one; else nothing.

        Raises:
            InterventionError: there is no room, or a worker cannot have it: then none has.
        """
        assert call.change is not None
        [(name, file)] = call.change.put.features.items()
        match call.phase:
            case "load":
                self._need_room(name, call.num_bytes)
                held = _Held(name, file, call.num_bytes, time.monotonic())
                self._held[file.stamp] = held
                ask(_ask, args=("load", name, file))
            case "claim":
                if file.place and self._at(file) - {file.stamp}:
                    return {"busy": True}
                self._begun(name, file).file = file
            case "loaded":
                self._begun(name, file).used = time.monotonic()
                answers = ask(_ask, args=("loaded", name, file))
                if wrong := next(filter(None, answers), ""):  # others may still read
                    self._drop(self._held[file.stamp], ask)
                    raise InterventionError(wrong, parameter="path")
                if None in answers:
                    return {"busy": True}
                logger.info("features by name: %s", self.told)
            case "unload":
                if file.stamp in self._held and file.stamp not in named:
                    self._drop(self._held[file.stamp], ask)
        return {}

    def _begun(self, name: str, file: FeatureFile) -> _Held:
        held = self._held.get(file.stamp)
        if held is None:
            raise InterventionError(
                f"path: loading {name} took so long that it was given up; register it again",
                parameter="path",
            )
        return held

    def _at(self, file: FeatureFile) -> set[str]:
        """Return the stamps of those that have the place of a file."""
        place = (file.point, file.layer, file.place)
        held = [each.file for each in self._held.values()]
        return {f.stamp for f in held if (f.point, f.layer, f.place) == place}

    @property
    def told(self) -> str:
        """Bytes of each, by name, and of all, for the log."""
        each = ", ".join(f"{held.name} {held.num_bytes}" for held in self._held.values())
        return f"{each or 'none'}; {self._taken} of {self._size} bytes"

    @property
    def _taken(self) -> int:
        return sum(held.num_bytes for held in self._held.values())

    def _need_room(self, name: str, needed: int) -> None:
        left = self._size - self._taken
        if needed > left:
            raise InterventionError(
                f"path: {name} takes {needed} bytes, and {left} of {self._size} are left: "
                f"unregister features, whose memory is free {KEPT_SECONDS:g} s after their last "
                "request, or start the engine with more (--features-memory-bytes)",
                parameter="path",
            )

    def _drop(self, held: _Held, ask: AskWorkers) -> None:
        del self._held[held.file.stamp]
        ask(_ask, args=("unload", held.name, held.file))
        logger.info("%s is dropped; features by name: %s", held.name, self.told)
