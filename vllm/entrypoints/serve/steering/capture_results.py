# SPDX-License-Identifier: Apache-2.0
"""Puts capture results into the choices of a response."""

from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import islice
from math import isfinite
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from fastapi import Response
from pydantic import BaseModel, PrivateAttr, model_serializer
from starlette.concurrency import run_in_threadpool
from torch.nn.utils.rnn import pad_sequence

from vllm.v1.capture.attention import AttentionRows
from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.capture.results import CapturedRows, CaptureResult, SiteRows
from vllm.v1.interventions.errors import describe
from vllm.v1.interventions.frontend.compat import lens

from .packed import pack

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionResponse,
        ChatCompletionStreamResponse,
    )
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionResponse,
        CompletionStreamResponse,
    )
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateResponse,
        GenerateTextStreamResponse,
        GenerateTokensStreamResponse,
    )
    from vllm.outputs import CompletionOutput

    from .serving import Asking

    Answer = CompletionResponse | ChatCompletionResponse | GenerateResponse
    Chunk = (
        CompletionStreamResponse
        | ChatCompletionStreamResponse
        | GenerateTokensStreamResponse
        | GenerateTextStreamResponse
    )

_INLINE = CapturedRows | MadeRows
"""Types of result that the consumer `inline` returns for a site."""


def add_capture_results(choice: BaseModel, output: "CompletionOutput") -> None:
    """Give a choice its `capture_results` and `rules`; one without any stays as it is.

    A choice that is not finished gets new rows only, with null as status, and no `rules`.
    """
    if output.rules is not None:
        assert choice.model_extra is not None
        choice.model_extra["rules"] = plain(output.rules)
    if output.capture_results is None:
        return
    finished = output.finish_reason is not None
    shown = {
        name: result
        for name, result in output.capture_results.items()
        if finished or _has_rows(result.payload)
    }
    if shown:
        # The models of choices keep extra fields, so nothing is added where nothing is captured.
        assert choice.model_extra is not None
        choice.model_extra["capture_results"] = ShownResults(shown, finished)


class ShownResults(BaseModel):
    """Results by consumer, packed when the response is written."""

    def __init__(self, results: Mapping[str, CaptureResult], finished: bool) -> None:
        super().__init__()
        self._results = results
        self._finished = finished

    @property
    def results(self) -> Mapping[str, CaptureResult]:
        """The results by consumer, as they are."""
        return self._results

    _results: Mapping[str, CaptureResult] = PrivateAttr()
    _finished: bool = PrivateAttr()

    @model_serializer
    def shown(self) -> dict[str, Any]:
        """Return the results as JSON."""
        return {name: _result(result, self._finished) for name, result in self._results.items()}


def has_captured(response: "Answer | Chunk") -> bool:
    """Tell whether a choice of a response has results."""
    return any("capture_results" in (c.model_extra or {}) for c in response.choices)


async def written(
    response: "Answer",
    request: "Asking",
    headers: Mapping[str, str] | None,
) -> Response:
    """Write a response in a thread: rows of many megabytes would hold up all other requests.

    By msgspec: other encoders look at each character, and let no other thread run meanwhile.
    """

    def write() -> Response:
        content = response.model_dump()
        if _speaks_lens(request):
            for choice, shown in zip(response.choices, content["choices"], strict=True):
                results = (choice.model_extra or {}).get("capture_results")
                if isinstance(results, ShownResults):
                    shown["activations"] = lens.wire_of(results.results)
            content["activations"] = content["choices"][0].get("activations")
        return Response(
            msgspec.json.encode(content), headers=headers, media_type="application/json"
        )

    return await run_in_threadpool(write)


def streamed(chunks: AsyncGenerator[str, None], request: "ChatCompletionRequest") -> Any:
    """Return the chunks of a chat's answer, with what the tool of its request expects beside."""
    return _with_activations(chunks) if _speaks_lens(request) else chunks


async def _with_activations(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Pass events on, with one more of what vLLM-Lens calls activations before the last; all work
    on them is done in threads."""
    rows = lens.StreamedRows()
    async for event in chunks:
        if event.startswith("data: [DONE]"):
            if more := await run_in_threadpool(rows.event):
                yield more
        elif event.startswith("data: {"):
            await run_in_threadpool(rows.add, event)
        yield event


def _speaks_lens(request: "Asking") -> bool:
    """Tell whether a request that was not refused asked as vLLM-Lens does, and so in its words."""
    args = request.vllm_xargs or {}
    return bool(args.get(lens.CAPTURE) or args.get(lens.QK))


async def written_chunk(chunk: "Chunk", exclude: Set[str] | None = None) -> str:
    """Write a chunk of a streamed response; one with results in a thread, as `written`.

    Args:
        exclude: fields that are left out; None for those that were not set.
    """
    how: dict[str, Any] = {"exclude_unset": True} if exclude is None else {"exclude": exclude}
    if not has_captured(chunk):
        return chunk.model_dump_json(**how)

    def write() -> str:
        return msgspec.json.encode(chunk.model_dump(**how)).decode()

    return await run_in_threadpool(write)


def has_rows(output: "CompletionOutput") -> bool:
    """Tell whether a chunk has rows, so that it must be sent even without text."""
    return any(_has_rows(result.payload) for result in (output.capture_results or {}).values())


def _result(result: CaptureResult, finished: bool) -> dict[str, Any]:
    payload = result.payload
    if isinstance(payload, Mapping) and all(isinstance(r, _INLINE) for r in payload.values()):
        shown: Any = [
            _rows(point, layer, rows) | _values(rows)
            for (point, layer), rows in payload.items()
            if finished or len(rows)
        ]
    else:
        try:
            shown = plain(payload)
        except Exception as error:  # a consumer may have made anything; the answer is not its
            reason = f"the payload cannot be written as JSON: {describe(error)}"
            return {"status": "error", "error": reason, "payload": None}
    return {
        "status": result.status if finished else None,
        "error": result.error if finished else None,
        "payload": shown,
    }


def _has_rows(payload: Any) -> bool:
    """Tell whether a payload has rows at a site; the rows of later sites are not made for it."""
    if not isinstance(payload, Mapping):
        return False
    if isinstance(payload, SiteRows):  # with the same rows at each site
        return any(len(rows) for rows in islice(payload.values(), 1))
    return any(isinstance(rows, _INLINE) and len(rows) for rows in payload.values())


def _rows(point: str, layer: int | None, rows: _INLINE) -> dict[str, Any]:
    """Return the rows of one site as JSON; versions that are all 0 are left out, and heads and
    tokens where there are none."""
    shown = {
        "point": point,
        "layer": layer,
        "positions": rows.positions.tolist(),
        "token_ids": rows.token_ids.tolist(),
    }
    if rows.versions.any():
        shown["versions"] = rows.versions.tolist()
    if rows.heads:
        shown["heads"] = list(rows.heads)
    if rows.tokens is not None:
        shown["tokens"] = rows.tokens
    if isinstance(rows, CapturedRows) and rows.form is not None:
        shown["form"] = rows.form
    return shown


def _values(rows: _INLINE) -> dict[str, Any]:
    """Return what the rows hold. The weights of each query have the zeros of keys that come later,
    up to the last query's."""
    if isinstance(rows, CapturedRows):
        return pack(rows.values)
    shown = rows.header
    for name, part in rows.parts().items():
        if isinstance(rows, AttentionRows) and name == "weights":
            weights = [row.movedim(-1, 0) for row in part]
            padded = pad_sequence(weights, batch_first=True) if weights else torch.empty(0)
            shown["weights"] = pack(padded.movedim(1, -1) if weights else padded)
        else:
            shown[name] = pack(part)
    return shown


def plain(value: Any) -> Any:
    """Turn a payload into JSON: arrays are packed, numbers that are not finite become null."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair would fail when the answer is sent
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, torch.Tensor):
        if not value.ndim:
            return plain(value.item())
        return pack(value.detach().cpu().resolve_conj().resolve_neg())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask")
    if isinstance(value, np.ndarray):
        if not value.ndim:
            return plain(value.item())
        return pack(torch.from_numpy(np.ascontiguousarray(value, value.dtype.newbyteorder("="))))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return pack(torch.frombuffer(bytearray(value), dtype=torch.uint8)) if value else ""
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(entry) for entry in value]
    return str(value)


def _key(key: Any) -> str:
    """Return a mapping's key as text, a site as `post_block.12`."""
    name = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
    return str(plain(name))
