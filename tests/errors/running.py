# SPDX-License-Identifier: Apache-2.0
"""Changes of running requests that are refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tests.errors.case import Case, path
from tests.support.plans import HIDDEN, NOBODY, VECTOR, config_of, plan_of
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.interventions.frontend.control.running import RunningRequests
from vllm.v1.interventions.frontend.control.steering import AsyncSteering
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.results.going_on import SentRequest

CONFIG = config_of(steering_families=["add", "ablate", "gate"], max_steering_configs=2)
PROMPT, POSITION = 5, 7
WAS: dict[str, Any] = {"steering_vectors": {"pre_attn": {0: VECTOR}}}
GATE = {"probe": [1.0] * HIDDEN, "threshold": 0.0, "sharpness": 1.0}
ABLATE = {"op": "ablate", "point": "pre_attn", "layers": [0], "direction": [1.0] * HIDDEN}


def vectors(*numbers: float, **more: Any) -> dict[str, Any]:
    return {"pre_attn": {i: {"vector": [n] * HIDDEN, **more} for i, n in enumerate(numbers)}}


def frontend(ids: str = "a", **params: Any) -> tuple[RunningRequests, dict[str, Any]]:
    """A frontend with requests of one id that have five tokens of prompt and three of an answer,
    and their states."""
    catalog, states = ModuleCatalog(CONFIG), dict[str, Any]()
    plan = plan_of(prompt=PROMPT, config=CONFIG, **WAS)
    for name in ids:
        asked, tokens = SamplingParams(max_tokens=8, **params), [*range(PROMPT)]
        request = EngineCoreRequest(name, tokens, None, asked, None, 0.0, None, None, None)
        request.plan = plan
        states[name] = SimpleNamespace(
            queue=None,
            parent_req=None,
            request_index=0,
            prompt_token_ids=tokens,
            prompt_len=PROMPT,
            detokenizer=SimpleNamespace(num_output_tokens=lambda: POSITION + 1 - PROMPT),
        )
        states[name].sent = SentRequest(states[name], request, catalog)
    of_ids = {"r": list(ids)}
    made = SimpleNamespace(external_req_ids=of_ids, request_states=states, tokenizer=None)
    return RunningRequests(CONFIG, catalog, cast("Any", made)), states


def change(fields: dict[str, Any], ids: str = "a", **params: Any) -> object:
    running, states = frontend(ids, **params)
    found = [*running.find(["r"]).values()]
    [future] = running.ask(found, running.joined(found, fields))
    states["a"].sent.changes(states["a"], CONFIG.steering_config)
    return future.result(timeout=0)


def gated(**more: Any) -> dict[str, Any]:
    return {"steering": [{**ABLATE, "gate": {**GATE, **more}}]}


def twice() -> object:
    running, _ = frontend()
    found = [*running.find(["r"]).values()]
    running.ask(found, running.joined(found, {}))
    return running.find(["r"])


def overtaken() -> object:
    """A change that was read while another one came to act."""
    running, states = frontend()
    found = [*running.find(["r"]).values()]
    joined = running.joined(found, {"steering_vectors": vectors(2.0)})
    running.ask(found, joined)
    assert states["a"].sent.changes(states["a"], CONFIG.steering_config) == POSITION
    return running.ask(found, joined)


def ended() -> object:
    """`AsyncLLM.steering.change` of a request that is aborted meanwhile."""
    running, states = frontend()
    core = cast("Any", SimpleNamespace(client_count=1))
    steering = AsyncSteering(CONFIG, ModuleCatalog(CONFIG), core, NOBODY)
    steering._running = running

    async def abort() -> object:
        task = asyncio.create_task(steering.change("r", {}))
        while states["a"].sent.asked is None:
            await asyncio.sleep(0.01)
        states.clear()
        return await asyncio.wait_for(task, 10)

    return asyncio.run(abort())


def several_servers() -> object:
    core = cast("Any", SimpleNamespace(client_count=2))
    return asyncio.run(AsyncSteering(CONFIG, ModuleCatalog(CONFIG), core, NOBODY).change("r", {}))


GRAMMAR = StructuredOutputsParams(regex="a")
LATER = vectors(4.0, positions={"start": POSITION + 1})

RUNNING = [
    Case({"given": "r"}, do=lambda: change({}, ids="")),
    Case({}, do=ended),
    Case(path("capture"), do=lambda: change({"capture": {}})),
    Case(path("request_id"), do=twice),
    Case(path("request_id"), do=overtaken),
    Case(path("request_id"), do=lambda: change({}, ids="ab")),
    Case(path("request_id"), do=several_servers),
    Case(path("structured_outputs"), do=lambda: change({}, structured_outputs=GRAMMAR)),
    Case(path("steering"), do=lambda: change(gated(when="last_prompt"))),
    Case(path("steering"), do=lambda: change(gated(latch=True))),
    Case(
        path("steering_vectors", "7"),
        do=lambda: change({"steering_vectors": vectors(2.0, positions=[0, POSITION - 1])}),
    ),
    Case(
        path("prefill_steering_vectors"),
        do=lambda: change({"prefill_steering_vectors": vectors(2.0), "steering_vectors": LATER}),
    ),
    Case(
        path("steering_vectors", "3", "2", option="max_steering_configs"),
        do=lambda: change({"steering_vectors": LATER, "decode_steering_vectors": vectors(3.0)}),
    ),
]
