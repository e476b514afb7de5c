# SPDX-License-Identifier: Apache-2.0
"""Serves `POST /v1/steering/sweep`; see docs/http.md.

It changes nothing of the server and asks what completions could, so it is as open as these.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.interventions.errors import describe, reject, show
from vllm.v1.interventions.frontend.request.chat import KEY, ChatTurns
from vllm.v1.interventions.frontend.request.resolve import need_steering
from vllm.v1.interventions.frontend.request.written_text import written_text

from .protocol import flag_of, read_body
from .sweep_places import AnyCell
from .sweep_plan import Grid, as_json
from .sweep_request import FIELDS, parse_sweep
from .sweep_run import SweepRun, SweepSlots

router = APIRouter(prefix="/v1/steering", tags=["steering"])

MAX_BODY_BYTES = 16 << 20
"""The largest body: two prompts and an operation's vectors."""


@router.post("/sweep")
async def sweep(request: Request) -> Response:
    """Answer how each point, layer, position and scale changes the next token; see docs/http.md."""
    body = await read_body(request, (*FIELDS, "model", "stream"), MAX_BODY_BYTES)
    # It listens for the end of the connection, so the body must have been read.
    answer: Response = await _answer(body, request)
    return answer


@with_cancellation
async def _answer(body: dict[str, Any], raw_request: Request) -> Response:
    state = raw_request.app.state
    engine = cast(AsyncLLM, state.engine_client)
    # A server that does not steer may serve no completions either.
    need_steering(engine.vllm_config, "op")
    stream = flag_of(body, "stream")
    prompt, lora, ids = await _rendered(raw_request, body, "prompt")
    clean = clean_ids = None
    if body.get("clean") is not None:
        clean, _, clean_ids = await _rendered(raw_request, body, "clean")
    processor = engine.input_processor
    plan = await processor.plan_threads.run(
        parse_sweep, body, ids, clean_ids, engine.vllm_config, processor.tokenizer,
        cast("ChatTurns | None", prompt.get(KEY)), written_text(prompt),
    )  # fmt: skip
    if state.sweep_slots is None:
        state.sweep_slots = SweepSlots(engine)
    run = SweepRun(engine, state.sweep_slots, plan, prompt, clean, lora)
    grid = await run.begin()
    cells = run.cells()
    begun = time.monotonic()
    # What the engine refuses it refuses of the first: a 400 still, also where a stream follows.
    first = await anext(cells)
    if stream:
        events = _events(grid, first, cells, begun)
        keep_alive = float(state.args.sse_keep_alive_interval)
        content = with_sse_keep_alive(events, keep_alive)
        return StreamingResponse(content=content, media_type="text/event-stream")
    async with aclosing(cells):
        grid.add(*first)
        async for one in cells:
            grid.add(*one)
    seconds = time.monotonic() - begun
    return await asyncio.to_thread(lambda: JSONResponse({**grid.head(), **_summary(grid, seconds)}))


async def _events(
    grid: Grid,
    first: tuple[AnyCell, float],
    cells: AsyncGenerator[tuple[AnyCell, float]],
    begun: float,
) -> AsyncGenerator[str]:
    """The events of a stream. An error ends it with an event of its own.

    The cells run whether or not the client reads: a sweep ends and makes room for others.
    """
    found: asyncio.Queue[tuple[AnyCell, float] | Exception | None] = asyncio.Queue()

    async def run() -> None:
        try:
            async with aclosing(cells):
                async for one in cells:
                    found.put_nowait(one)
        except Exception as error:
            found.put_nowait(error)
        else:
            found.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        # Both may be of many cells.
        yield await asyncio.to_thread(lambda: _event("start", grid.head()))
        yield _event("cell", _shown(grid, *first))
        while isinstance(one := await found.get(), tuple):
            yield _event("cell", _shown(grid, *one))
        if one is None:
            seconds = time.monotonic() - begun
            yield await asyncio.to_thread(lambda: _event("summary", _summary(grid, seconds)))
        else:
            yield _event("error", {"error": {"message": describe(one), "code": 500}})
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    yield "data: [DONE]\n\n"


def _event(name: str, data: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"


def _shown(grid: Grid, cell: AnyCell, score: float) -> dict[str, Any]:
    shown = cell._asdict()
    if grid.plan.scales is None:
        del shown["scale"]
    return {**shown, "value": as_json(grid.add(cell, score))}


def _summary(grid: Grid, seconds: float) -> dict[str, Any]:
    rate = grid.plan.num_cells / max(seconds, 1e-9)
    return {"grid": grid.table(), "cells_per_second": round(rate, 1)}


async def _rendered(
    request: Request, body: Mapping[str, Any], path: str
) -> tuple[EngineInput, LoRARequest | None, list[int]]:
    """Render a prompt as completions do, or as chats do if it is a list of messages.

    Returns:
        the prompt, the adapter that the model's name is, and the tokens.
    """
    state, value, model = request.app.state, body.get(path), body.get("model")
    if model is not None and not isinstance(model, str):
        reject("model", f"must be a name, got {show(model)}")
    if isinstance(value, list):
        longest = cast(AsyncLLM, state.engine_client).vllm_config.model_config.max_model_len
        if len(value) > longest:  # a message is a token at least
            reject(path, f"has {len(value)} entries, the model takes up to {longest} tokens")
    chat = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    ids = isinstance(value, list) and all(type(entry) is int for entry in value)
    if not value or not (chat or ids or isinstance(value, str)):
        what = "is empty" if value in ("", []) else f"got {show(value)}"
        reject(path, f"must be a text, token ids or the messages of a chat, {what}")
    serving = state.openai_serving_chat if chat else state.openai_serving_completion
    if serving is None:
        reject(path, "this model does not serve " + ("chats" if chat else "completions"))
    try:
        if chat:
            asked: Any = ChatCompletionRequest.model_validate(
                {"model": model, "messages": value, "max_tokens": 1}
            )
            rendered = await serving.render_chat_request(asked)
        else:
            asked = CompletionRequest.model_validate(
                {"model": model, "prompt": value, "max_tokens": 1}
            )
            rendered = await serving.render_completion_request(asked)
    except ValidationError as error:
        reject(path, f"is no chat that can be rendered: {error.errors()[0]['msg'][:200]}")
    if isinstance(rendered, ErrorResponse):
        raise HTTPException(status_code=rendered.error.code, detail=rendered.error.message)
    (prompt,) = rendered[1] if chat else rendered
    tokens = serving._extract_prompt_components(prompt).token_ids
    if not tokens:
        reject(path, "has no tokens")
    state.engine_client.input_processor.renderer.validate_token_ids(tokens, parameter=path)
    return prompt, serving._maybe_get_adapters(asked), list(tokens)
