# SPDX-License-Identifier: Apache-2.0
"""What bodies over HTTP are refused for beside what is wrong offline, too."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import HTTPException
from starlette.datastructures import Headers

from tests.errors.case import Case, path
from tests.support.plans import HIDDEN, SHAPE, config_of
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.steering.access import SteeringAccess
from vllm.entrypoints.serve.steering.api_router import layers, register, set_tiers
from vllm.entrypoints.serve.steering.body import refuse_beams, refuse_unserved
from vllm.entrypoints.serve.steering.packed import MAX_ARRAY_BYTES, pack, read_vectors, unpack
from vllm.entrypoints.serve.steering.playground_router import need_playground
from vllm.entrypoints.serve.steering.protocol import MAX_BODY_BYTES, module_of, read_body
from vllm.entrypoints.serve.steering.serving import need_finite
from vllm.v1.interventions.frontend.compat.peers import refuse_peer_args
from vllm.v1.steering.files import parse_safetensors
from vllm.v1.steering.unshaped import ANY_FAMILY


def steered_to_nan(prompt: bool) -> Any:
    nan = SimpleNamespace(logprob=float("nan"))
    request = SimpleNamespace(model_extra={"steering": []}, vllm_xargs=None)
    answer = SimpleNamespace(prompt_logprobs=[None, {5: nan}] if prompt else None)
    output = SimpleNamespace(cumulative_logprob=-1.0 if prompt else float("nan"))
    return lambda: need_finite(request, answer, output)  # type: ignore[arg-type]


GOOD = pack(torch.zeros(2, HIDDEN))


def packed(**changed: Any) -> Any:
    """A packed array that is good but for `changed`; None takes a key away."""
    given = {k: v for k, v in {**GOOD, **changed}.items() if v is not None}
    return lambda: unpack(given, "p")


def by_layer(**changed: Any) -> Any:
    given = {k: v for k, v in {**GOOD, "layers": [0, 1], **changed}.items() if v is not None}
    return lambda: read_vectors({"post_block": given}, "v")


class Sent:
    """A request with a body, as far as `read_body` looks."""

    def __init__(self, body: bytes, headers: dict[str, str], times: int = 1) -> None:
        self.headers = Headers(headers)
        threads = SimpleNamespace(run=asyncio.to_thread)
        engine = SimpleNamespace(input_processor=SimpleNamespace(plan_threads=threads))
        self.app: Any = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        self._chunks = [body] * times

    async def stream(self) -> Any:
        for chunk in self._chunks:
            yield chunk


def sent(body: Any, times: int = 1) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda: _plain(read_body(Sent(raw, {}, times), ("name", "ops")))  # type: ignore[arg-type]


def _plain(made: Any) -> Any:
    """HTTP's own errors as a ValueError."""
    try:
        return asyncio.run(made) if asyncio.iscoroutine(made) else made()
    except HTTPException as error:
        raise ValueError(error.detail) from error


def shown(keys: list[str] | None, bearer: bool = True, **headers: str) -> Any:
    """`headers`: with an underscore for each dash."""
    request: Any = Sent(b"", {name.replace("_", "-"): value for name, value in headers.items()})
    return lambda: _plain(lambda: SteeringAccess(keys, bearer).need(request))


def endpoint(function: Any, body: Any) -> Any:
    """A call of an endpoint by somebody who may."""
    request = Sent(json.dumps(body).encode(), {"X-Steering-Key": "k"})
    config = config_of()
    config.tap_shape = None
    request.app.state.steering_access = SteeringAccess(["k"], bearer=False)
    request.app.state.engine_client.vllm_config = config
    request.app.state.engine_client.steering = None
    return lambda: _plain(function(request))


HTTP = [
    Case(path("steering", "prompt"), do=steered_to_nan(True)),
    Case(path("steering", "answer"), do=steered_to_nan(False)),
    Case(
        {"path": "sampling_params.capture", "given": "capture"},
        do=lambda: GenerateRequest.model_validate(
            {"token_ids": [1], "capture": {}, "sampling_params": {"capture": {}}}
        ),
    ),
    Case(
        path("vllm_xargs"),
        do=lambda: GenerateRequest.model_validate(
            {"token_ids": [1], "sampling_params": {}, "vllm_xargs": {"steering": "{}"}}
        ),
    ),
    Case(path("capture"), do=lambda: refuse_unserved({"prompt": "", "capture": {}}, served=False)),
    Case(
        path("captures", "capture"),
        do=lambda: refuse_unserved({"captures": {}, "model": "m"}, served=True),
    ),
    Case(
        path("steering_vectors"),
        do=lambda: refuse_unserved({"steering": [], "steering_vectors": {}}, served=False),
    ),
    Case(path("capture"), do=lambda: refuse_beams({"capture": {}})),
    Case(
        path("patch", "RhizoNymph/vllm", anchor="rhizonymphvllm"),
        do=lambda: refuse_unserved({"patch": {}}, served=False),
    ),
    Case(
        path("vllm_xargs.steer", "vLLM-Hook", anchor="vllm-hook-and-mia"),
        do=lambda: refuse_peer_args({"steer": "{}"}, config_of(), "vllm_xargs."),
    ),
    Case(
        path("vllm_xargs.steering", "'steering'"),
        do=lambda: refuse_peer_args({"steering": "[]"}, config_of(), "vllm_xargs."),
    ),
    Case(
        path("extra_body.capture", "'capture'"),
        do=lambda: refuse_unserved({"extra_body": {"capture": {}}}, served=False),
    ),
    # Packed arrays.
    Case(path("p", allowed="shape"), do=packed(shape=None)),
    Case(
        path("v.post_block", "65537", "65536"),
        do=lambda: read_vectors({"post_block": dict.fromkeys(range(65537))}, "v"),
    ),
    Case(path("p", "['x']", "dtype, shape, data"), do=packed(x=1)),
    Case(path("p.dtype", "'float64'", "float16, bfloat16, float32"), do=packed(dtype="float64")),
    Case(path("p.shape"), do=packed(shape=[1, 1, 1])),
    Case(path("p.shape[0]", "0"), do=packed(shape=[0, HIDDEN])),
    Case(path("p.shape", "80000000000", str(MAX_ARRAY_BYTES)), do=packed(shape=[200000, 100000])),
    Case(path("p.data", "1"), do=packed(data=1)),
    Case(path("p.data", "1", str(len(GOOD["data"]))), do=packed(data="A")),
    Case(path("p.data"), do=packed(data="!" * len(GOOD["data"]))),
    Case(path("p.data"), do=packed(shape=[1], data="AADAfw==")),
    Case(path("p.data", "4", "6"), do=packed(dtype="float16", shape=[3], data="AAAAAA==")),
    Case(path("v.post_block"), do=by_layer(layers=None)),
    Case(path("v.post_block.shape"), do=by_layer(shape=[2 * HIDDEN])),
    Case(path("v.post_block.layers", "1 entries", "2"), do=by_layer(layers=[0])),
    Case(path("v.post_block.layers[1]", "'1'"), do=by_layer(layers=[0, "1"])),
    # Bodies of /v1/steering.
    Case(path("body"), do=sent(b"{")),
    Case(path("body"), do=sent(b'{"name": 1, "name": 2}')),
    Case(path("body", "list"), do=sent([])),
    Case(path("vector", allowed="name, ops"), do=sent({"vector": []})),
    Case({"allowed": str(MAX_BODY_BYTES)}, do=sent(bytes(1 << 20), times=513)),
    Case(path("replace", "1"), do=endpoint(set_tiers, {"replace": 1})),
    Case(path("vectors"), do=endpoint(set_tiers, {})),
    Case(path("name"), do=endpoint(register, {})),
    Case(path("steering"), do=endpoint(layers, {})),
    Case(path("vectors"), do=lambda: module_of({})),
    Case(path("safetensors", "ops"), do=lambda: module_of({"safetensors": "", "ops": []})),
    Case(path("safetensors", "1"), do=lambda: module_of({"safetensors": 1})),
    Case(path("safetensors"), do=lambda: module_of({"safetensors": "a"})),
    Case(
        path("safetensors"),
        do=lambda: parse_safetensors(bytes(2 << 20), "safetensors", SHAPE, ANY_FAMILY),
    ),
    Case(
        path("safetensors"),
        do=lambda: parse_safetensors(b"{}", "safetensors", SHAPE, ANY_FAMILY),
    ),
    # Who may change.
    Case({}, do=shown(None)),
    Case({"allowed": "X-Steering-Key, or as bearer token"}, do=shown(["k"])),
    Case({"allowed": "X-Steering-Key"}, do=shown(["k"], bearer=False, Authorization="Bearer k")),
    Case({}, do=shown(["k"], X_Steering_Key="K")),
    Case(
        {},
        do=lambda: need_playground(
            SimpleNamespace(  # type: ignore[arg-type]
                playground=True, enable_steering=False, capture_consumers=[], compat=[]
            )
        ),
    ),
]
