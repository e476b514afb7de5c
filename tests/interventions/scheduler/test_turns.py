# SPDX-License-Identifier: Apache-2.0
"""Who was refused waits outside of the queue: nobody is forgotten, and a step asks about few."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vllm import SamplingParams
from vllm.v1.interventions.scheduler import turns
from vllm.v1.interventions.scheduler.turns import MAX_TRIED, Turns
from vllm.v1.request import Request

pytestmark = pytest.mark.quick


class Room:
    """So many places, of which a request needs as many as its prompt has tokens; requests of the
    same last token share theirs."""

    def __init__(self, size: int, by_priority: bool = False) -> None:
        self.size = size
        self.holders: dict[str, Request] = {}
        self.asked = 0
        self.turns = Turns(self._count, self.need, by_priority)

    def need(self, request: Request) -> tuple[int, int]:
        assert request.prompt_token_ids is not None
        return len(request.prompt_token_ids), request.prompt_token_ids[-1]

    def fits(self, request: Request) -> bool:
        needs = {self.need(r) for r in [*self.holders.values(), request]}
        return sum(places for places, _ in needs) <= self.size

    def _count(self, request: Request) -> bool:
        self.asked += 1
        return self.fits(request)


def request(number: int, places: int = 1, kind: int | None = None, priority: int = 0) -> Request:
    tokens = [0] * (places - 1) + [number if kind is None else kind]
    params = SamplingParams(max_tokens=4)
    arrival = float(number)
    return Request(f"r{number}", tokens, params, None, arrival_time=arrival, priority=priority)


def step(room: Room, queue: list[Request], most: int | None = None) -> list[str]:
    """What the scheduler's loop does; the ids of those that start, at most `most`."""
    started: list[str] = []
    skipped: list[Request] = []
    while len(started) != most:
        woken = room.turns.wake()
        if woken is not None:
            queue.insert(0, woken)
        if not queue:
            break
        one = queue.pop(0)
        if room.turns.try_admit(one):
            room.turns.leave(one.request_id)
            room.holders[one.request_id] = one
            started.append(one.request_id)
        else:
            skipped.append(one)
    for one in reversed(skipped):
        assert room.turns.park(one)
    room.turns.next_step()
    return started


def test_a_step_asks_about_few_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    room, queue = Room(1), [request(i) for i in range(3000)]
    assert step(room, queue) == ["r0"]
    assert (len(queue), len(room.turns.parked), room.asked) == (0, 2999, 3000)
    for i in range(1, 300):
        room.asked = 0
        assert step(room, queue) == []  # nothing was released
        del room.holders[f"r{i - 1}"]
        assert step(room, queue) == [f"r{i}"]
        assert room.asked <= 3 * MAX_TRIED
    monkeypatch.setattr(turns, "MAX_SKIPS", 10**9)
    monkeypatch.setattr(turns, "MAX_TRIED", 10**9)
    room.asked = 0
    assert step(room, queue) == []
    assert room.asked == 2700


def test_those_that_share_start_together_and_one_is_asked_for_all() -> None:
    room, queue = Room(1), [request(i, kind=1) for i in range(300)]
    room.holders["other"] = request(9999, kind=2)
    assert step(room, queue) == []
    room.asked = 0
    assert step(room, queue) == []
    assert room.asked == 1
    room.holders.clear()
    assert step(room, queue) == [f"r{i}" for i in range(300)]
    assert not len(room.turns.parked)


def test_those_that_come_back_keep_their_order() -> None:
    """Also if a step ends before all could start. One is back in the queue, the others stay."""
    room, queue = Room(2), [request(i, kind=i % 2) for i in range(100)]
    room.holders["other"] = request(9999, places=2)
    step(room, queue)
    room.holders.clear()
    for i in range(0, 100, 2):
        assert step(room, queue, most=2) == [f"r{i}", f"r{i + 1}"]
        assert not queue


def test_who_was_given_back_and_did_not_start_is_first_in_the_next_step() -> None:
    room, queue = Room(2), [request(0), request(1)]
    room.holders["other"] = request(9999, places=2)
    step(room, queue)
    del room.holders["other"]
    first = room.turns.wake()
    assert first is not None and first.request_id == "r0"
    assert room.turns.try_admit(first)  # and there are no KV blocks for it
    room.turns.next_step()
    assert room.turns.wake() is None
    assert not room.turns.park(first)  # the scheduler skipped it for a reason of its own
    second = room.turns.wake()
    assert second is not None and second.request_id == "r1"


@pytest.mark.parametrize("by_priority", [False, True])
def test_who_goes_first(by_priority: bool) -> None:
    room = Room(1, by_priority)
    room.holders["other"] = request(9999)
    assert step(room, [request(0, priority=5), request(1, priority=-1), request(2)]) == []
    order = []
    while len(room.turns.parked):
        room.holders.clear()
        order += step(room, [])
    assert order == (["r1", "r2", "r0"] if by_priority else ["r0", "r1", "r2"])


def test_two_that_wait_for_two_resources_do_not_wait_for_each_other() -> None:
    """Each is first of those that wait for one of them, and has waited too long."""
    one, two = Room(1), Room(1)
    first, second = request(0), request(1)
    one.holders["other"] = two.holders["other"] = request(9999)
    assert not one.turns.try_admit(first)
    assert not two.turns.try_admit(second)
    for _ in range(turns.MAX_SKIPS + 1):
        one.turns.next_step()
        two.turns.next_step()
    one.holders.clear()
    two.holders.clear()
    assert not one.turns.try_admit(second)
    assert two.turns.try_admit(first)
    assert one.turns.try_admit(first)


@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_it_says_what_asking_about_all_says(
    seed: int, by_priority: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a queue that all stay in. Few kinds: all of them are tried in each step."""
    monkeypatch.setattr(turns, "MAX_SKIPS", 6)
    chance, room, queue = random.Random(seed), Room(4, by_priority), list[Request]()
    waiting: dict[str, Request] = {}
    since: dict[str, int] = {}
    seen: dict[str, int] = dict.fromkeys(("started", "held up", "aborted"), 0)

    def place(one: Request) -> Any:
        return (one.priority if by_priority else 0, one.arrival_time)

    for number in range(2500):
        for name in [n for n in room.holders if chance.random() < 0.3]:
            del room.holders[name]
        if len(waiting) < 30 and chance.random() < 0.8:
            kind, priority = chance.randrange(4), chance.randrange(3)
            one = request(number, chance.choice([1, 1, 1, 4]), kind, priority)
            waiting[one.request_id] = one
            queue.append(one)
        if waiting and chance.random() < 0.05:
            gone = waiting.pop(chance.choice(list(waiting)))
            queue = [r for r in queue if r is not gone]
            room.turns.leave(gone.request_id)
            since.pop(gone.request_id, None)
            seen["aborted"] += 1
        head, first = next(iter(since.items()), ("", number))
        starved = waiting[head] if number - first > turns.MAX_SKIPS else None
        may = {
            name for name, one in waiting.items() if starved is None or place(one) <= place(starved)
        }
        fitting = {name for name, one in waiting.items() if room.fits(one)}
        seen["held up"] += len(fitting - may)
        started = step(room, queue)
        assert (may & fitting) or not started
        assert bool(started) == bool(may & fitting)
        assert set(started) <= waiting.keys()
        for name in started:
            del waiting[name]
            since.pop(name, None)
            seen["started"] += 1
        assert not queue
        assert len(room.turns.parked) == len(waiting)
        fresh = sorted((r for r in waiting.values() if r.request_id not in since), key=place)
        since |= dict.fromkeys((r.request_id for r in fresh), number)
    assert min(seen.values()) > 50, seen
