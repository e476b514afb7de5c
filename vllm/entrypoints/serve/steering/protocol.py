# SPDX-License-Identifier: Apache-2.0
"""Reads the bodies of `/v1/steering`: at most so many bytes, and only fields that it knows."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from fastapi import HTTPException, Request

from vllm.v1.interventions.errors import reject, show, unknown_keys
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.plan import STEERING_FIELDS, TIERS
from vllm.v1.steering.modules import FIELDS

from .body import READERS
from .packed import read_ops, read_vectors

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MAX_BODY_BYTES = 512 << 20
"""The largest body of a change. Vectors for every site of a model of 100 layers, 8192 wide, are a
quarter of it."""


async def read_body(
    request: Request, allowed: tuple[str, ...], max_bytes: int = MAX_BODY_BYTES
) -> dict[str, Any]:
    """Read a body, which must be a JSON object. It is parsed in the threads of plans.

    Args:
        allowed: the keys that it may have.

    Raises:
        HTTPException: it is larger than `max_bytes`, a 413.
        ValueError: it is not a JSON object, names a key twice, or has a key that is not `allowed`.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise HTTPException(
                status_code=HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value,
                detail=f"the body has more than {max_bytes} bytes",
            )
    engine = cast("AsyncLLM", request.app.state.engine_client)
    return await engine.input_processor.plan_threads.run(_parsed, bytes(raw), allowed)


def _parsed(raw: bytes, allowed: tuple[str, ...]) -> dict[str, Any]:
    try:
        body = json.loads(raw or b"{}", object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        reject("body", f"is not JSON: {str(error)[:200]}")
    if not isinstance(body, dict):
        reject("body", f"must be a JSON object, got {show(body)}")
    if unknown := unknown_keys(body, allowed):
        reject(unknown[0], f"is not a field of this endpoint; it has {', '.join(allowed)}")
    return body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys and values; a key that is there twice is an error.

    Else all but the last value of such a key would be ignored.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {show(key)} is there twice")
            seen.add(key)
    return made


SET_FIELDS = dict(zip(TIERS, FIELDS, strict=True))
"""The field of `POST /v1/steering/set` that holds a tier's vectors, by tier."""


def tiers_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vectors of a body by tier, and its operations, as `AsyncSteering.set_tiers` takes
    them.

    Raises:
        ValueError: a packed array cannot be read.
    """
    tiers = {
        tier: read_vectors(body[field], field)
        for tier, field in SET_FIELDS.items()
        if body.get(field) is not None
    }
    ops = {"ops": read_ops(body["ops"], "ops")} if body.get("ops") is not None else {}
    return tiers | ops


def fields_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that steer, as `SamplingParams` takes them.

    Raises:
        ValueError: a packed array cannot be read.
    """
    given = {name: body[name] for name in STEERING_FIELDS if body.get(name) is not None}
    return {name: READERS[name](value, name) for name, value in given.items()}


def flag_of(body: Mapping[str, Any], field: str) -> bool:
    """Return a field that is true or false; false where it is null or missing.

    Raises:
        ValueError: it is anything else.
    """
    return body.get(field) is not None and Given(body[field], field).flag()


def module_of(body: Mapping[str, Any]) -> dict[str, Any] | bytes:
    """Return a module's fields, or the content of the safetensors file given in their place.

    Raises:
        ValueError: both are given, or neither; a packed array or the file's base64 cannot be read.
    """
    given = {key: body[key] for key in (*FIELDS, "ops") if body.get(key) is not None}
    packed = body.get("safetensors")
    if packed is None:
        if not given:
            fields = ", ".join((*FIELDS, "ops", "safetensors"))
            reject("vectors", f"is missing; this endpoint takes {fields}")
        return {
            key: read_ops(value, key) if key == "ops" else read_vectors(value, key)
            for key, value in given.items()
        }
    if given:
        reject("safetensors", f"stands alone, {next(iter(given))} is given too")
    return Given(packed, "safetensors").base64()
