# SPDX-License-Identifier: Apache-2.0
"""Serves `/v1/steering`, the global tiers and named modules of the engine; see docs/http.md.

Reading is as open as the rest of `/v1`. Changing needs a key, see `SteeringAccess`.
"""

import asyncio
from http import HTTPStatus
from typing import Any, cast

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from vllm import envs
from vllm.config.compat import LENS
from vllm.entrypoints.serve.steering.lens_routes import router as lens_router
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.frontend.control.running import not_running
from vllm.v1.interventions.frontend.control.steering import AsyncSteering
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.plan import STEERING_FIELDS
from vllm.v1.steering.modules import FIELDS, need_module_name

from .access import ClientDigest, SteeringAccess
from .capture_router import router as capture_router
from .packed import read_rules
from .playground_router import playground_router
from .protocol import SET_FIELDS, fields_of, flag_of, module_of, read_body, tiers_of
from .sweep_router import router as sweep_router
from .train_router import router as train_router

router = APIRouter(prefix="/v1/steering", tags=["steering"])


def _engine(request: Request) -> AsyncLLM:
    return cast(AsyncLLM, request.app.state.engine_client)


def _may_change(request: Request) -> None:
    cast(SteeringAccess, request.app.state.steering_access).need(request)


def _with_modules(told: dict[str, Any], steering: AsyncSteering) -> Response:
    """Write an answer with what is told of all modules; they may be many."""
    modules = {name: msgspec.Raw(each) for name, each in steering.told().items()}
    content = msgspec.json.encode({**told, "modules": modules})
    return Response(content, media_type="application/json")


async def _made(change: Any) -> Any:
    """Wait for a change of the engines; one that times out is a 503."""
    try:
        return await change
    except TimeoutError as error:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE.value, detail=str(error)) from error


@router.get("")
async def state(request: Request) -> Response:
    """Return the version, the tiers' norms and digests, the modules, and the slots in use."""
    engine = _engine(request)
    config = engine.vllm_config.steering_config
    if not config.enable_steering:
        return JSONResponse({"enabled": False})
    await engine.steering.refresh()
    states = await engine.steering.states()
    used = {
        what: {key: sum(state[what][key] for state in states) for key in ("in_use", "size")}
        for what in ("slots", "rows")
    }
    options = {
        "default_steering_modules": config.default_steering_modules,
        "train": request.app.state.args.steering_train,
    }
    told = {"enabled": True, **states[0], **used, **options, "engines": len(states)}
    return await asyncio.to_thread(_with_modules, told, engine.steering)


@router.get("/layers")
async def layers(request: Request) -> dict[str, Any]:
    """Return the model's shape: the points of each layer, the heads of its attention as [number,
    width], what can be captured beside, the width of rows within its branches, and which points can
    be steered."""
    config = _engine(request).vllm_config
    if (shape := config.tap_shape) is None:
        reject(
            "steering",
            "neither steering nor capture is enabled; start the server with --enable-steering "
            "or --capture-consumers",
        )
    steering, layers = config.steering_config, sorted(shape.layers.items())
    return {
        "hidden_size": shape.hidden_size,
        "lanes": shape.lanes,
        "dtype": shape.dtype,
        "num_layers": len(shape.layers),
        "layers": {str(n): list(layer.points) for n, layer in layers},
        "heads": {str(n): layer.heads for n, layer in layers if layer.heads},
        "widths": {str(n): layer.widths for n, layer in layers if layer.widths},
        "captured": {
            str(n): [p for p in shape.offers(n) if p not in (*layer.points, *layer.heads)]
            for n, layer in layers
        },
        "steering_points": list(steering.steering_points) if steering.enable_steering else [],
        "steering_families": list(steering.steering_families) if steering.enable_steering else [],
    }


@router.post("/set")
async def set_tiers(request: Request) -> dict[str, Any]:
    """Set global vectors or operations, on all engines or none; return the new version."""
    _may_change(request)
    fields = (*SET_FIELDS.values(), "ops", "replace")
    body = await read_body(request, fields)
    steering = _engine(request).steering
    tiers = await asyncio.to_thread(tiers_of, body)
    replace = flag_of(body, "replace")
    if not tiers and not replace:
        reject("vectors", f"is missing; this endpoint takes {', '.join(fields)}")
    return {"version": await _made(steering.set_tiers(tiers, replace, SET_FIELDS))}


@router.post("/clear")
async def clear(request: Request) -> dict[str, Any]:
    """Clear one tier, or all; return the new version."""
    _may_change(request)
    body = await read_body(request, ("tier",))
    return {"version": await _made(_engine(request).steering.clear(body.get("tier")))}


@router.get("/modules")
async def modules(request: Request) -> Response:
    """Return each module's digest, norms of its vectors and names of its operations, by name."""
    engine = _engine(request)
    if not engine.vllm_config.steering_config.enable_steering:
        return JSONResponse({"modules": {}})
    await engine.steering.refresh()
    return await asyncio.to_thread(_with_modules, {}, engine.steering)


@router.post("/modules")
async def register(request: Request) -> dict[str, Any]:
    """Name vectors and operations; return the digest. A path on the server cannot be given."""
    _may_change(request)
    fields = ("name", *FIELDS, "ops", "safetensors")
    body = await read_body(request, fields)
    if "name" not in body:
        reject("name", f"is missing; this endpoint takes {', '.join(fields)}")
    steering = _engine(request).steering
    source = await asyncio.to_thread(module_of, body)
    digest = await _made(steering.register_content(body["name"], source))
    return {"name": body["name"], "digest": digest}


@router.delete("/modules/{name}")
async def unregister(request: Request, name: str) -> dict[str, Any]:
    """Forget a name. Later requests cannot use it; running ones are not changed."""
    _may_change(request)
    name = need_module_name(name, "name")
    await _made(_engine(request).steering.unregister_module(name))
    return {"name": name}


@router.post("/features")
async def register_features(request: Request) -> dict[str, Any]:
    """Name a sparse autoencoder of a file in the operator's folder."""
    _may_change(request)
    needed = ("name", "path", "point", "layer")
    body = Given(await read_body(request, (*needed, "reconstruct")), "").need(*needed).value
    await _made(_engine(request).steering.register_features(**body))
    return dict(body)


@router.delete("/features/{name}")
async def unregister_features(request: Request, name: str) -> dict[str, Any]:
    """Forget the name of an autoencoder. Later requests cannot use it."""
    _may_change(request)
    await _made(_engine(request).steering.unregister_features(name))
    return {"name": name}


@router.get("/rules")
async def rules(request: Request) -> dict[str, Any]:
    """Return the rules that hold for all requests, without their probes. It takes a key: what they
    look for is nobody else's business."""
    _may_change(request)
    return {"rules": await _engine(request).steering.rules()}


@router.post("/rules")
async def set_rules(request: Request) -> dict[str, Any]:
    """Set the rules that hold for all requests that come later; return their names."""
    _may_change(request)
    body = await read_body(request, ("rules",))
    if "rules" not in body:
        reject("rules", "is missing; this endpoint takes rules, a list that may be empty")
    steering = _engine(request).steering
    given = await asyncio.to_thread(read_rules, body["rules"], "rules")
    await _made(steering.set_rules(given))
    return {"rules": [rule["name"] for rule in await steering.rules()]}


@router.post("/requests/{request_id}")
async def change(request: Request, request_id: str) -> dict[str, Any]:
    """Change the steering of a running request, of its own client; return the position from which
    on it acts of each completion of each prompt, those left out that ended before."""
    body = await read_body(request, STEERING_FIELDS)
    steering = _engine(request).steering
    read = _engine(request).input_processor.plan_threads.run
    fields, ids = await read(fields_of, body), steering.ids(request_id)
    try:
        if not ids:
            raise not_running(request_id)
        found = await steering.change_each(ids, fields)
    except LookupError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND.value, detail=str(error)) from error
    changed = [
        {
            "prompt": int(one.removeprefix(f"{request_id}-")) if one != request_id else 0,
            "completion": completion,
            "position": position,
        }
        for one, positions in found.items()
        for completion, position in positions.items()
    ]
    return {"id": request_id, "changed": changed}


def attach_router(app: FastAPI) -> None:
    """Add the endpoints of steering and capture to a server's app."""
    args = app.state.args
    app.add_middleware(ClientDigest)
    has_api_key = any(args.api_key or [envs.VLLM_API_KEY])
    app.state.steering_access = SteeringAccess(args.steering_api_key, bearer=not has_api_key)
    app.include_router(router)
    app.include_router(capture_router)
    app.state.sweep_slots = None
    app.include_router(sweep_router)
    app.state.train_job = None
    app.include_router(train_router)
    if LENS in args.compat:
        app.include_router(lens_router)
    if args.playground:
        app.include_router(playground_router())
