# SPDX-License-Identifier: Apache-2.0
"""What is refused of global tiers, registered modules and beam search: calls, not requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tests.errors.case import Case, path
from tests.errors.steering import CONFIG, PIN, limited, module, named
from tests.support.plans import HIDDEN, NOBODY, VECTOR, config_of, plan_of
from vllm.config import KVTransferConfig, VllmConfig
from vllm.sampling_params import BeamSearchParams
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.frontend.control import steering as engine_steering
from vllm.v1.interventions.frontend.control.changes import ChangeBuilder
from vllm.v1.interventions.frontend.control.steering import Steering
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.resolve import refuse_beam_search
from vllm.v1.interventions.global_state import Change
from vllm.v1.interventions.scheduler.changes import Changes
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.steering.startup_files import parse_module_args


def with_connector() -> VllmConfig:
    """The config of an engine with a KV connector."""
    config = config_of()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both"
    )
    return config


def steering(config: VllmConfig = CONFIG, core: Any = None) -> Steering:
    """`llm.steering` of an engine whose core answers as `core` does."""
    return Steering(config, ModuleCatalog(config), core, NOBODY)


def answering(reply: dict[str, Any]) -> Any:
    """An engine core that always says this."""
    client = object.__new__(InprocClient)
    client.engine_core = SimpleNamespace(steering=lambda call: reply)  # type: ignore[assignment]
    return client


def impatient() -> object:
    """A change while another frontend's never ends."""
    patience, engine_steering.BUSY_SECONDS = engine_steering.BUSY_SECONDS, 0.0
    try:
        return steering(core=answering({"busy": True})).clear()
    finally:
        engine_steering.BUSY_SECONDS = patience


def scheduler() -> SchedulerInterventions:
    return SchedulerInterventions(CONFIG, hash_block_size=4)


def call(changes: Changes, phase: Any, change: Change | None = None) -> None:
    reply = changes.call(SteeringCall(phase, "token", change), [], list)
    if "error" in reply:
        raise ValueError(reply["error"])


def overlapping() -> None:
    """Two tiers of which each fits and the sum does not."""
    changes, vector = scheduler().changes, {"pre_attn": {0: [1.5e38] * HIDDEN}}
    for tier in ("base", "prefill"):
        change = ChangeBuilder(CONFIG, ModuleCatalog(CONFIG)).set({tier: vector}, False)
        call(changes, "prepare", change)
        call(changes, "commit")


def forgotten() -> object:
    """A request on its way when its module goes."""
    plan = plan_of(**named(["m"], m=module()))
    return scheduler().modules.fill(plan)


def several_servers() -> object:
    """Operations of all requests, where two API servers share the engines."""
    core = cast("Any", SimpleNamespace(client_count=2))
    one = engine_steering.AsyncSteering(CONFIG, ModuleCatalog(CONFIG), core, NOBODY)
    return asyncio.run(one.set([PIN], tier="ops"))


STEERING_CALLS = [
    Case(path("steering"), do=lambda: steering(config_of(steering=False)).clear()),
    Case(
        path("tier", "'both'", "base, prefill, decode"),
        do=lambda: steering().set({}, tier="both"),
    ),
    Case(path("base.mlp", "'mlp'"), do=lambda: steering().set({"mlp": {}})),
    Case(path("steering"), do=lambda: steering(with_connector()).set({})),
    Case(path("base"), do=lambda: steering().set({"ops": [PIN]})),
    Case(path("decode"), do=lambda: steering().set([PIN], tier="decode")),
    Case(path("ops"), do=several_servers),
    Case(
        path("base.pre_attn.0.positions"),
        do=lambda: steering().set(limited([0])["steering_vectors"]),
    ),
    Case(
        path("base.pre_attn", allowed="['post_block']"),
        do=lambda: steering(config_of(steering_points=["post_block"])).set(
            {"pre_attn": {0: VECTOR}}
        ),
    ),
    Case(path("name", "'../m'"), do=lambda: steering().register_module("../m", {})),
    Case(path("source"), do=lambda: steering().register_module("m", {})),
    Case(
        path("source", "['vector']", "vectors, prefill_vectors, decode_vectors, ops"),
        do=lambda: steering().register_module("m", {"ops": [], "vector": {}}),
    ),
    Case(path("source", allowed="float32"), do=lambda: module({"pre_attn": {0: [1e39] * HIDDEN}})),
    Case(path("source.ops[0]"), do=lambda: module({"ops": [{**PIN, "positions": "all"}]})),
    Case(
        path("name", "'m'", "none"),
        do=lambda: call(scheduler().changes, "prepare", Change(drop=[("modules", "m")])),
    ),
    Case({"given": "30"}, do=lambda: call(scheduler().changes, "commit")),
    Case({}, do=impatient),
    Case(
        path("the global tiers at prefill positions", "pre_attn layer 0", "float32"), do=overlapping
    ),
    Case({}, do=forgotten),
    Case(
        path("beam_search"),
        do=lambda: refuse_beam_search(BeamSearchParams(2, 4), CONFIG, ModuleCatalog(CONFIG)),
    ),
    Case(path("steering_modules[0]", "'calm'"), do=lambda: parse_module_args(["calm"])),
    Case(path("steering_modules[1]", "m"), do=lambda: parse_module_args(["m=a", "m=b"])),
    Case(path("steering_modules[0]", "'{\"a\": 1}'"), do=lambda: parse_module_args(['{"a": 1}'])),
    Case(
        path("steering_modules[0].path", "1"),
        do=lambda: parse_module_args(['{"name": "m", "path": 1}']),
    ),
]
