# SPDX-License-Identifier: Apache-2.0
"""What `llm.steering` says and checks before an engine is asked."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.plans import NOBODY, PARALLEL, SHAPE, VECTOR, config_of, plan_of, steering_of
from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.serve.steering import api_router
from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.control.changes import ChangeBuilder
from vllm.v1.interventions.frontend.control.early_checks import check_early
from vllm.v1.interventions.frontend.control.steering import AsyncSteering
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.global_state import Change
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions

CALM, LOUD = ({"vectors": {"pre_attn": {n: VECTOR}}} for n in (0, 1))
PIN = {"op": "pin", "point": "pre_attn", "layers": [1], "direction": VECTOR, "value": 1.0}

pytestmark = pytest.mark.quick


def builder(**options: object) -> ChangeBuilder:
    config = config_of(**options)  # type: ignore[arg-type]
    return ChangeBuilder(config, ModuleCatalog(config))


def test_layers_are_said_by_an_engine_that_only_captures() -> None:
    assert builder(steering=False).layers() == {
        n: layer.points for n, layer in SHAPE.layers.items()
    }
    two = builder(steering=False, capture_points=list(PARALLEL), steering_points=["post_attn"])
    assert two.layers() == dict.fromkeys(SHAPE.layers, PARALLEL)
    steers = builder(steering_points=["post_attn"], capture_points=list(PARALLEL))
    assert steers.layers() == {n: ("post_attn",) if n != 2 else () for n in SHAPE.layers}
    assert builder().layers()[0] == STREAM_POINTS
    with pytest.raises(ValueError, match="steering is not enabled"):
        builder(shape=None, steering=False).layers()


def test_default_modules_are_as_if_named_first() -> None:
    """Of those that are registered; a request that names one says how strong it is."""
    config = config_of(
        default_steering_modules=["absent", "calm", "pin"], steering_families=["add", "pin"]
    )
    made = {"calm": CALM, "loud": LOUD, "pin": {"ops": [PIN]}}
    make = ChangeBuilder(config, ModuleCatalog(config)).register
    modules = {n: make(n, m).put.modules[n] for n, m in made.items()}

    def ask(*names: object, defaults: bool = True, **fields: object) -> object:
        asked = {"steering_modules": list(names), **fields} if names else fields
        plain = config_of(steering_families=["add", "pin"])
        return plan_of(config=config if defaults else plain, modules=modules, **asked)  # type: ignore[arg-type]

    assert ask() == ask("calm", "pin", defaults=False)
    assert ask("loud") == ask("calm", "pin", "loud", defaults=False)
    assert ask(("calm", 0.5)) == ask("pin", ("calm", 0.5), defaults=False)
    assert ask() != ask("loud") != ask("loud", defaults=False)
    assert ask(steering_inherit_global=True) == ask()
    without = steering_of(config=config, modules=modules, steering_inherit_global=False)
    assert not without.inherit and not without.sums and not without.programs
    op = {"op": "pin", "point": "pre_attn", "layers": [1], "direction": VECTOR, "value": 2.0}
    both = steering_of(config=config, modules=modules, steering=[op])
    terms = both.programs[0].terms
    values = {t.digest: t.scalars for t in both.terms}
    alone = steering_of(config=config, modules=modules)
    assert values[terms[0]] == alone.terms[0].scalars != values[terms[1]]
    assert alone.sums == both.sums != []


def test_operations_of_all_requests() -> None:
    """As a default module: what `set` is given last, until it is cleared."""
    config = config_of(steering_families=["add", "pin"])
    catalog = ModuleCatalog(config)
    builder = ChangeBuilder(config, catalog)

    def ask(**fields: object) -> object:
        return plan_of(config=config, catalog=catalog, **fields)  # type: ignore[arg-type]

    def make(change: Change) -> None:
        catalog.made(change, 0)

    def set_to(value: float) -> Change:
        return builder.set(
            {"ops": [{**PIN, "value": value}], "base": {"pre_attn": {0: VECTOR}}}, False
        )

    def own(value: float) -> object:
        return plan_of(config=config, modules={}, steering=[{**PIN, "value": value}])

    assert ask() is None
    make(set_to(2.0))
    first = ask()
    assert first == own(2.0) is not None
    make(builder.set({"base": {"pre_attn": {0: VECTOR}}}, replace=False))
    assert ask() == first, "vectors were set, and no operations"
    make(set_to(3.0))
    assert ask() == own(3.0) != first
    for cleared in (builder.clear("ops"), builder.clear(None), builder.set({}, True),
                    builder.set({"ops": []}, False)):  # fmt: skip
        make(set_to(2.0))
        make(builder.clear("base"))
        assert ask() == first
        make(cleared)
        assert ask() is None
    for ops, said in (
        ([{**PIN, "positions": [0]}], r"^ops\[0\]: positions belong to a request"),
        (
            [{"op": "normalize", "point": "pre_attn", "layers": [0]}],
            r"^ops\[0\]\.op: .*--steering-families",
        ),
        ({"op": "pin"}, "^ops: "),
    ):
        with pytest.raises(InterventionError, match=said):
            builder.set({"ops": ops}, False)
    with pytest.raises(InterventionError, match=r"^base: a tier has vectors only"):
        builder.set({"base": [PIN]}, False)


class Several:
    """A link to engines that several API servers share."""

    client_count = 2


def test_operations_of_all_requests_need_servers_that_ask() -> None:
    """Each server asks for what others set if default modules are on; else it would not know."""
    config = config_of(steering_families=["add", "pin"])
    steering = AsyncSteering(config, ModuleCatalog(config), Several(), NOBODY)  # type: ignore[arg-type]
    with pytest.raises(InterventionError, match=r"^ops: with several API servers"):
        asyncio.run(steering.set_tiers({"ops": [PIN]}))
    config.steering_config.default_steering_modules = ["any"]
    steering = AsyncSteering(config, ModuleCatalog(config), Several(), NOBODY)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="call_utility"):  # it goes on to the engines
        asyncio.run(steering.set_tiers({"ops": [PIN]}))


def test_default_modules_that_nobody_registered_do_nothing() -> None:
    config = config_of(default_steering_modules=["calm"])
    assert plan_of(config=config) is None
    module = ChangeBuilder(config, ModuleCatalog(config)).register("calm", CALM).put.modules["calm"]
    assert plan_of(config=config, modules={"calm": module}) is not None
    # One that can act on no position of a request is no error of that request.
    answer = ChangeBuilder(config, ModuleCatalog(config)).register(
        "calm", {"decode_vectors": CALM["vectors"]}
    )
    late = answer.put.modules
    assert plan_of(config=config, modules=late, max_tokens=1) is not None
    with pytest.raises(InterventionError, match="can act on no position"):
        plan_of(
            config=config_of(),
            modules=late,
            max_tokens=1,
            steering_modules=["calm"],
        )
    with pytest.raises(InterventionError, match=r"^default_steering_modules\[1\]: '\.\./x' is not"):
        check_early(config_of(default_steering_modules=["ok", "../x"]))


class Engines:
    """The link of one frontend to a real engine core's side; it lets other tasks run first."""

    client_count = 2

    def __init__(self) -> None:
        self.core = SchedulerInterventions(config_of(), hash_block_size=4)

    async def call_utility_async(self, method: str, call: SteeringCall) -> dict[str, Any]:
        await asyncio.sleep(0)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=SteeringCall)
        return self.core.changes.call(sent, [], list)

    async def call_utility_all_async(self, method: str, call: SteeringCall) -> list[Any]:
        return [await self.call_utility_async(method, call)]


def test_frontends_tell_the_modules_that_any_has_registered() -> None:
    engines: Any = Engines()
    one, other = (
        AsyncSteering(config_of(), ModuleCatalog(config_of()), engines, NOBODY) for _ in "ab"
    )

    def endpoint(read: Any) -> Any:
        engine = SimpleNamespace(vllm_config=config_of(), steering=other)
        request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace()))
        request.app.state.engine_client = engine
        request.app.state.args = SimpleNamespace(steering_train=False)
        return json.loads(asyncio.run(read(request)).body)

    async def change() -> None:
        await one.register_module("calm", CALM)
        await one.set({"pre_attn": {0: VECTOR}})

    asyncio.run(change())
    told = asyncio.run(one.modules())
    assert told.keys() == {"calm"} and told["calm"]["tiers"]["base"]["pre_attn"].keys() == {0}
    told["calm"]["tiers"].clear()  # the caller's own
    assert asyncio.run(one.state())["modules"]["calm"]["tiers"]
    state = endpoint(api_router.state)
    assert state["version"] == 1 and state["modules"] == endpoint(api_router.modules)["modules"]
    assert state["modules"]["calm"]["tiers"]["base"]["pre_attn"].keys() == {"0"}
    asyncio.run(other.unregister_module("calm"))
    assert asyncio.run(one.modules()) == endpoint(api_router.modules)["modules"] == {}


def test_a_change_is_known_here_whoever_waits_for_it() -> None:
    """A caller that goes away between the phases leaves frontend and engines alike."""
    engines: Any = Engines()
    engines.client_count = 1
    steering = AsyncSteering(config_of(), ModuleCatalog(config_of()), engines, NOBODY)

    async def leave() -> None:
        task = asyncio.create_task(steering._make(steering._changes.register("calm", CALM)))
        for _ in range(100):
            if engines.core.changes._token:  # it is prepared
                break
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(leave())
    assert list(engines.core.state.contents.modules) == list(steering.told())
