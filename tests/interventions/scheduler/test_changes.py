# SPDX-License-Identifier: Apache-2.0
"""Changes of the global state in two phases: all of one change, or nothing of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from tests.support.plans import HIDDEN, SHAPE, VECTOR, array, config_of, plan_of
from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.global_state import LEARNED_KINDS, SET_KINDS, Change, Globals
from vllm.v1.interventions.plan import VectorSet
from vllm.v1.interventions.scheduler import changes as changes_module
from vllm.v1.interventions.scheduler import module_sets
from vllm.v1.interventions.scheduler import state as state_module
from vllm.v1.interventions.scheduler.changes import LEASE_SECONDS
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.scheduler.module_sets import KEPT_SECONDS
from vllm.v1.interventions.vectors import norms_of, vector_set_of
from vllm.v1.steering import modules as modules_module
from vllm.v1.steering.modules import Module, Told, parse_module

pytestmark = pytest.mark.quick

SITE = ("pre_attn", 0)
ALL_SET = [("tiers", "base"), ("tiers", "prefill"), ("tiers", "decode"), ("ops", "")]


def vector_set(value: float) -> VectorSet:
    return vector_set_of({SITE: array(*[value] * HIDDEN)})


def module(value: float) -> Module:
    config = config_of().steering_config
    return parse_module({"pre_attn": {0: [value] * HIDDEN}}, "source", SHAPE, config)


def register(name: str, value: float) -> Change:
    return Change(Globals(modules={name: module(value)}))


def unregister(name: str) -> Change:
    return Change(drop=[("modules", name)])


def setting(value: float, tier: str = "base") -> Change:
    return Change(Globals(tiers={tier: vector_set(value)}))


class Engine:
    """The engine core's side, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.core = SchedulerInterventions(config_of(), hash_block_size=4)
        self.now = 1000.0
        monkeypatch.setattr(changes_module.time, "monotonic", lambda: self.now)
        self.timers: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(module_sets, "Timer", self._timer)

    def _timer(self, seconds: float, function: Callable[[], None]) -> Mock:
        start = partial(self.timers.append, (self.now + seconds, function))
        return Mock(start=start)

    def wait(self, seconds: float) -> None:
        """Let this time pass; nobody asks the engine for anything."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now = first[0]
            first[1]()
        self.now = until

    def prepare(self, token: str, change: Change) -> dict[str, Any]:
        return self.core.changes.call(SteeringCall("prepare", token, change), [], list)

    def commit(self, token: str) -> dict[str, Any]:
        return self.core.changes.call(SteeringCall("commit", token), [], list)

    def cancel(self, token: str) -> dict[str, Any]:
        return self.core.changes.call(SteeringCall("cancel", token), [], list)

    def make(self, change: Change) -> dict[str, Any]:
        assert "version" in self.prepare("now", change)
        return self.commit("now")

    def state(self) -> dict[str, Any]:
        return self.core.changes.call(SteeringCall("state"), [], list)

    @property
    def norms(self) -> dict[str, float]:
        """tier -> norm at SITE."""
        return {t: d["norms"]["pre_attn"][0] for t, d in self.state()["tiers"].items()}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_set_replace_clear(engine: Engine) -> None:
    assert engine.make(setting(1.0))["version"] == 1
    assert engine.make(setting(2.0, "decode"))["version"] == 2
    assert engine.norms == {"base": 2.0, "decode": 4.0}
    engine.make(Change(Globals(tiers={"prefill": vector_set(3.0)}), ALL_SET))
    assert engine.norms == {"prefill": 6.0}
    engine.make(setting(1.0))
    engine.make(Change(drop=[("tiers", "prefill")]))
    assert engine.norms == {"base": 2.0}
    assert engine.make(Change(drop=ALL_SET))["version"] == 6
    assert engine.norms == {}


def test_the_same_vectors_are_the_same_state_again(engine: Engine) -> None:
    engine.make(setting(1.0))
    first = engine.core.state.era(0)
    engine.make(setting(2.0))
    assert engine.core.state.era(0) != first
    engine.make(setting(1.0))
    assert engine.core.state.era(0) == first
    assert engine.state()["version"] == 3


def test_what_is_prepared_acts_only_when_it_is_committed(engine: Engine) -> None:
    reply = engine.prepare("a", setting(1.0))
    assert reply["version"] == 0
    assert engine.norms == {}
    assert engine.core.message({}) is None
    engine.commit("a")
    assert engine.norms == {"base": 2.0}
    step = engine.core.message({})
    assert step is not None
    assert step.tiers is not None
    assert step.version == step.tiers.version == 1


def test_one_change_at_a_time(engine: Engine) -> None:
    engine.prepare("a", setting(1.0))
    assert engine.prepare("b", setting(2.0)) == {"busy": True}
    assert "version" in engine.prepare("a", setting(1.0)), "its own again is no conflict"
    assert "error" in engine.commit("b")
    assert engine.norms == {}
    engine.cancel("b")  # of another: changes nothing
    assert engine.commit("a")["version"] == 1
    assert engine.norms == {"base": 2.0}
    assert "error" in engine.commit("a"), "committed twice"
    engine.make(setting(2.0))
    assert engine.norms == {"base": 4.0}


def test_a_cancelled_change_is_gone(engine: Engine) -> None:
    engine.prepare("a", setting(1.0))
    engine.cancel("a")
    assert "error" in engine.commit("a")
    assert "version" in engine.prepare("b", setting(2.0))
    engine.commit("b")
    assert engine.norms == {"base": 4.0}


def test_a_change_whose_frontend_died_gives_way(engine: Engine) -> None:
    engine.prepare("dead", setting(1.0))
    engine.now += LEASE_SECONDS - 1
    assert engine.prepare("b", setting(2.0)) == {"busy": True}
    engine.now += 2
    assert "version" in engine.prepare("b", setting(2.0))
    assert "error" in engine.commit("dead")  # it was not dead after all
    assert engine.commit("b")["version"] == 1
    assert engine.norms == {"base": 4.0}


def test_a_late_commit_that_nobody_replaced_is_made(engine: Engine) -> None:
    engine.prepare("slow", setting(1.0))
    engine.now += 10 * LEASE_SECONDS
    assert engine.commit("slow")["version"] == 1
    assert engine.norms == {"base": 2.0}


def test_a_refused_change_leaves_the_prepared_one_alone(engine: Engine) -> None:
    engine.prepare("slow", setting(1.0))
    engine.now += LEASE_SECONDS + 1
    assert "unknown module 'm'" in engine.prepare("b", unregister("m"))["error"]
    assert engine.commit("slow")["version"] == 1
    assert engine.norms == {"base": 2.0}


def test_a_refused_change_is_not_prepared(engine: Engine) -> None:
    engine.make(setting(1.5e38))
    reply = engine.prepare("a", setting(1.5e38, "prefill"))
    assert reply["error"].startswith("the global tiers at prefill positions: ")
    assert "error" in engine.commit("a")
    assert "version" in engine.prepare("b", setting(2.0, "prefill"))


def test_modules(engine: Engine) -> None:
    engine.make(register("m", 1.0))
    assert engine.core.state.contents.modules == {"m": module(1.0)}
    engine.make(register("m", 2.0))
    assert engine.core.state.contents.modules == {"m": module(2.0)}
    engine.make(unregister("m"))
    assert engine.core.state.contents.modules == {}
    assert "error" in engine.prepare("a", unregister("m"))
    assert engine.state()["version"] == 0, "modules are no global state"


def test_each_kind_has_its_place() -> None:
    """A kind is versioned, or learned by frontends, or both; else nobody would get to know it."""
    assert {*SET_KINDS, *LEARNED_KINDS} == {*Globals.__struct_fields__}


def test_operations_of_all_requests(engine: Engine) -> None:
    """They are set and cleared with the tiers, and requests see no name of them."""
    ops = module(3.0)
    both = Change(Globals(tiers={"base": vector_set(1.0)}, ops={"": ops}))
    engine.make(both)
    assert engine.core.state.contents.ops == {"": ops}
    assert engine.state()["tiers"].keys() == {"base"}
    engine.make(setting(2.0))
    assert engine.core.state.contents.ops == {"": ops}
    for gone in (Change(drop=ALL_SET), Change(drop=[("ops", "")])):
        engine.make(both)
        engine.make(gone)
        assert engine.core.state.contents.ops == {}
    assert engine.state()["tiers"].keys() == {"base"}, "operations alone were cleared"
    engine.make(Change(drop=ALL_SET))
    assert engine.state()["tiers"] == {} and engine.core.state.contents.modules == {}


def test_a_request_on_its_way_has_what_its_module_meant_or_an_error(engine: Engine) -> None:
    engine.make(register("m", 1.0))
    plan = plan_of(modules={"m": module(1.0)}, steering_modules=[("m", 3.0)])
    assert plan is not None
    assert plan.steering is not None
    assert plan.steering.sets == [], "the engine core has it"
    filled = engine.core.modules.fill(plan)
    assert filled is not None
    assert filled.steering is not None
    assert [p.digest for p in filled.steering.sets] == [vector_set(1.0).digest]
    engine.make(register("n", 1.0))
    engine.make(register("m", 2.0))
    assert engine.core.modules.fill(plan) == filled, "the same content under another name"
    engine.make(unregister("n"))
    assert engine.core.modules.fill(plan) == filled, "kept for a while"
    engine.wait(KEPT_SECONDS + 1)
    with pytest.raises(ValueError, match="unregistered or registered anew"):
        engine.core.modules.fill(plan)
    plain = plan_of(steering_vectors={"pre_attn": {0: VECTOR}})
    assert engine.core.modules.fill(plain) is plain
    assert engine.core.modules.fill(None) is None


def test_what_another_engine_has_made_already_is_here_from_the_preparation_on(
    engine: Engine,
) -> None:
    plan = plan_of(modules={"m": module(1.0)}, steering_modules=["m"])
    with pytest.raises(ValueError, match="unregistered or registered anew"):
        engine.core.modules.fill(plan)
    engine.prepare("a", register("m", 1.0))
    filled = engine.core.modules.fill(plan)
    assert filled is not None
    assert filled.steering is not None
    assert [p.digest for p in filled.steering.sets] == [vector_set(1.0).digest]
    assert engine.core.state.contents.modules == {}


def test_a_frontend_learns_what_another_registered(engine: Engine) -> None:
    catalog = ModuleCatalog(config_of())

    def learn() -> list[str]:
        """What is sent."""
        call = SteeringCall("news", since=catalog.changes)
        news = engine.core.changes.call(call, [], list)
        news = msgspec.msgpack.decode(msgspec.msgpack.encode(news))  # it is plain data
        catalog.learn(news)
        assert catalog.state == engine.core.state.contents
        new = msgspec.msgpack.decode(news["new"], type=Globals)
        return sorted(name or kind for kind, name in new.keys)

    assert learn() == []
    engine.make(register("m", 1.0))
    engine.make(register("n", 2.0))
    assert learn() == ["m", "n"]
    assert catalog.get("m", "path") == module(1.0)
    engine.make(register("n", 3.0))
    engine.make(unregister("m"))
    assert learn() == ["n"], "only what is new is sent"
    engine.make(register("m", 1.0))
    engine.make(unregister("m"))
    assert learn() == []
    # What it had made itself it knows; not if another had made something before.
    own = engine.make(register("own", 4.0))
    catalog.made(register("own", 4.0), own["changes"])
    assert learn() == []
    engine.make(register("other", 5.0))
    own = engine.make(register("own", 6.0))
    catalog.made(register("own", 6.0), own["changes"])
    assert learn() == ["other", "own"]
    engine.make(Change(Globals(ops={"": module(7.0)}, rules={"": []})))
    assert learn() == ["ops", "rules"]
    engine.make(Change(drop=[("ops", "")]))
    assert learn() == []


def counted(engine: Engine, number: int) -> tuple[int, int]:
    """Names so many modules, one frontend; calls of functions of the last change, and of asking
    what is the state."""
    for i in range(number):
        engine.make(register(f"m{i}", i + 1.0))
    calls = 0

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    found = []
    for do in (lambda: engine.make(register("last", 0.5)), engine.state):
        calls = 0
        sys.setprofile(called)
        do()
        sys.setprofile(None)
        found.append(calls)
    return found[0], found[1]


def test_a_change_costs_the_same_with_many_modules(engine: Engine) -> None:
    few, many = counted(engine, 3), counted(engine, 300)
    assert many[0] < few[0] + 100 and many[1] < few[1] + 100, (few, many)
    reply = engine.make(register("last", 0.5))
    assert reply.keys() == {"version", "changes"}, "what comes back does not grow, either"
    assert "modules" not in engine.state()


def test_norms_are_made_once_for_a_module_and_for_a_state(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[VectorSet] = []

    def norms(vector_set: VectorSet) -> dict[str, dict[int, float]]:
        made.append(vector_set)
        return norms_of(vector_set)

    for place in (modules_module, state_module):
        monkeypatch.setattr(place, "norms_of", norms)
    catalog = ModuleCatalog(config_of())
    for i in range(3):
        catalog.state.modules[f"m{i}"] = module(float(i + 1))
    told = catalog.told()
    assert len(made) == 3 and list(told) == ["m0", "m1", "m2"]
    assert msgspec.json.decode(told["m1"], type=Told)["tiers"]["base"] == {"pre_attn": {0: 4.0}}
    catalog.state.modules["m3"] = module(4.0)
    assert catalog.told().keys() == {*told, "m3"} and len(made) == 4
    engine.make(setting(1.0))
    assert engine.norms == engine.norms == {"base": 2.0} and len(made) == 5
    engine.make(setting(2.0))
    assert engine.norms == {"base": 4.0} and len(made) == 6


def test_what_was_kept_long_enough_is_forgotten(engine: Engine) -> None:
    """At the next call; vector sets that another module has, too, stay."""
    engine.make(register("m", 1.0))
    engine.make(register("twin", 1.0))
    engine.make(register("n", 2.0))
    engine.make(unregister("m"))
    engine.make(unregister("n"))
    sets = engine.core.modules._sets
    assert sets.keys() == {vector_set(1.0).digest, vector_set(2.0).digest}
    engine.wait(KEPT_SECONDS + 1)
    assert sets.keys() == {vector_set(1.0).digest}
    engine.make(unregister("twin"))
    engine.wait(KEPT_SECONDS + 1)
    assert not sets


def test_modules_that_were_deleted_are_freed_while_nobody_asks(engine: Engine) -> None:
    """Each when its time has come, by few timers; a name that is there keeps what it means."""
    sets = engine.core.modules._sets
    engine.make(register("stays", 0.5))
    for i in range(100):
        engine.make(register("m", float(i + 1)))
        engine.wait(0.1)
    engine.make(unregister("m"))
    assert len(sets) == 101 and len(engine.timers) == 1
    engine.wait(KEPT_SECONDS - 5)
    assert 40 < len(sets) < 70 and len(engine.timers) == 1
    engine.wait(6)
    assert sets.keys() == {vector_set(0.5).digest} and not engine.timers


def test_any_number_of_modules_takes_no_slot(engine: Engine) -> None:
    small = SchedulerInterventions(config_of(max_steering_configs=1), hash_block_size=4)
    for i in range(50):
        small.modules.replace(None, module(float(i + 1)))
    assert small.tables.sums.in_use == 0
    plan = small.modules.fill(plan_of(modules={"m7": module(8.0)}, steering_modules=["m7"]))
    assert plan is not None
    assert plan.steering is not None
    assert small.tables.fits("r", plan)
