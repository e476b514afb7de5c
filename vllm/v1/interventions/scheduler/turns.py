# SPDX-License-Identifier: Apache-2.0
"""Requests that were refused room: where they wait, and whose turn it is."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable

from vllm.v1.request import Request

MAX_SKIPS = 256
"""Steps a request may be passed over by later ones before what gets free is kept for it."""

MAX_TRIED = 16
"""Needs that are tried in a step before later ones have to wait: what a step costs at most, however
many wait."""

Place = tuple[int, float, str]
"""Place of a request in its queue: priority, arrival time, request id."""


class Turns:
    """The turns of the requests that wait for one resource.

    A refused request is parked, outside of the scheduler's queue, until `wake`. Those of equal need
    have room together or not at all, so one is tried for all of them. Later requests may pass one
    that does not fit, but not for ever.

    Args:
        fits: whether there is room for a request now.
        need: what decides that; the same of two requests if one fits whenever the other does.
        by_priority: whether the scheduler's queue is ordered by priority.
    """

    def __init__(
        self,
        fits: Callable[[Request], bool],
        need: Callable[[Request], Hashable],
        by_priority: bool,
    ) -> None:
        self._fits = fits
        self._need = need
        self._by_priority = by_priority
        self._step = 0
        self.waiting: OrderedDict[str, tuple[Place, int]] = OrderedDict()
        """Request id -> place, and step of the first refusal, of all that were refused."""
        self._refused: set[str] = set()
        """Ids of the requests that were refused in this step."""
        self._failed: set[Hashable] = set()
        """Needs for which there is no room in this step."""
        self._woken: set[str] = set()
        """Ids of the requests that are in the scheduler's queue again; at most one."""
        self.parked: dict[str, tuple[Request, Place, Hashable]] = {}
        """Waiting requests that are in none of the scheduler's queues, by id."""
        self._groups: dict[Hashable, list[Place]] = {}
        """Need -> the parked requests, sorted."""
        self._firsts: list[Place] = []
        """The first of each group, sorted."""

    def try_admit(self, request: Request) -> bool:
        """Tell whether a request may start now. A refusal is remembered."""
        has_turn = not self.waiting or self._has_turn(self._place(request))
        if has_turn and self._fits(request):
            return True
        self.refuse(request)
        return False

    def refuse(self, request: Request) -> None:
        """Note that there is no room for a request in this step."""
        self.waiting.setdefault(request.request_id, (self._place(request), self._step))
        self._refused.add(request.request_id)
        self._woken.discard(request.request_id)

    def park(self, request: Request) -> bool:
        """Take over a request that the scheduler skipped, if it was refused here in this step."""
        self._woken.discard(request.request_id)
        if request.request_id not in self._refused:
            return False
        place, need = self._place(request), self._need(request)
        self.parked[request.request_id] = request, place, need
        group = self._groups.setdefault(need, [])
        if group:
            _remove(self._firsts, group[0])
        insort(group, place)
        insort(self._firsts, group[0])
        return True

    def wake(self) -> Request | None:
        """Give back the first parked request that has room now, for the scheduler to ask about.
        None if there is none, or the one before is still in its queue."""
        if self._woken:
            return None
        for first in self._firsts[:MAX_TRIED]:
            request, _, need = self.parked[first[2]]
            if need in self._failed or not self._has_turn(first):
                continue
            if self._fits(request):
                self._woken.add(request.request_id)
                return self._unpark(request.request_id)
            self._failed.add(need)
        return None

    def leave(self, request_id: str) -> None:
        """Forget a request that started, or ended."""
        self.waiting.pop(request_id, None)
        self._refused.discard(request_id)
        self._woken.discard(request_id)
        if request_id in self.parked:
            self._unpark(request_id)

    def next_step(self) -> None:
        """Count a step; one in which none waits needs no count."""
        self._step += 1
        self._refused.clear()
        self._failed.clear()

    def _place(self, request: Request) -> Place:
        priority = request.priority if self._by_priority else 0
        return priority, request.arrival_time, request.request_id

    def _has_turn(self, place: Place) -> bool:
        """Tell whether nobody before it has waited too long. Sharers of what is there have to wait
        too: what keeps finding new users never gets free."""
        longest, since = next(iter(self.waiting.values()), (place, self._step))
        return self._step - since <= MAX_SKIPS or place <= longest

    def _unpark(self, request_id: str) -> Request:
        request, place, need = self.parked.pop(request_id)
        group = self._groups[need]
        _remove(self._firsts, group[0])
        _remove(group, place)
        if group:
            insort(self._firsts, group[0])
        else:
            del self._groups[need]
        return request


def _remove(places: list[Place], place: Place) -> None:
    del places[bisect_left(places, place)]
