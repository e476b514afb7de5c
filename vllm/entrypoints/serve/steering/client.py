# SPDX-License-Identifier: Apache-2.0
"""A client of a vLLM server that steers and captures.

This file stands alone, on numpy and httpx: copy it to where vLLM is not installed.

    client = SteeringClient("http://localhost:8000", steering_key="...")
    answer = client.complete("Today I went", max_tokens=8,
                             steering_vectors={"post_block": {12: vector}},
                             capture={"inline": {"hooks": {"post_block": [12]}}})
    answer.text, answer.rows["post_block", 12].values
"""

import base64
import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

Site = tuple[str, int]
"""(point, layer)."""

_FLOATS = {"float16": "<f2", "float32": "<f4"}


class SteeringError(Exception):
    """The server refused."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; 400 for what cannot be done, 403 for who may not."""
        self.param = param
        """Path of the field that is wrong, `steering_vectors.post_block.12`."""


def pack(values: Any) -> dict[str, Any]:
    """`{"dtype", "shape", "data"}`, which a request may have in place of numbers.

    Args:
        values: [hidden] or [n, hidden]; float16 and float32 as they are, others as float32.
    """
    array = np.asarray(values)
    name = array.dtype.name if array.dtype.name in _FLOATS else "float32"
    data = np.ascontiguousarray(array, dtype=_FLOATS[name]).tobytes()
    return {
        "dtype": name,
        "shape": list(array.shape),
        "data": base64.b64encode(data).decode(),
    }


def unpack(packed: Mapping[str, Any]) -> np.ndarray:
    """The array of a packed one; bfloat16, which numpy lacks, becomes float32, exactly."""
    raw = base64.b64decode(packed["data"])
    if packed["dtype"] == "bfloat16":
        halves = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return halves.view(np.float32).reshape(packed["shape"])
    dtype = _FLOATS.get(packed["dtype"], packed["dtype"])
    return np.frombuffer(raw, dtype).reshape(packed["shape"])


def pack_layers(
    vectors: Mapping[int, Any], scales: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """All vectors of a point as one packed array, in place of `{layer: vector}`.

    Args:
        vectors: layer -> [hidden].
        scales: layer -> scale; 1 for those not named.
    """
    layers = list(vectors)
    packed = pack(np.stack([np.asarray(vectors[layer]) for layer in layers]))
    packed["layers"] = layers
    if scales:
        packed["scales"] = [float(scales.get(layer, 1.0)) for layer in layers]
    return packed


def packed_fields(value: Any) -> Any:
    """A request with every numpy array in it packed."""
    if isinstance(value, np.ndarray):
        return pack(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: packed_fields(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [packed_fields(entry) for entry in value]
    return value


@dataclass
class Rows:
    """The rows of one point of one layer, in position order."""

    positions: np.ndarray
    """int64 [n]: row i has read the token at `positions[i]` and predicts the next one."""
    token_ids: np.ndarray
    """int64 [n]."""
    values: np.ndarray
    """[n, hidden]; with `project` [n, k]."""
    versions: np.ndarray
    """int64 [n]: of the global steering each row ran under."""

    def at(self, position: int) -> np.ndarray:
        """The row of one absolute position.

        Raises:
            KeyError: that position was not captured.
        """
        found = np.flatnonzero(self.positions == position)
        if not len(found):
            raise KeyError(f"position {position} was not captured, these were: {self.positions}")
        row: np.ndarray = self.values[int(found[0])]
        return row


@dataclass
class Choice:
    """One completion; of a stream, what came in one chunk."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    rows: dict[Site, Rows] = field(default_factory=dict)
    """Of the consumer `inline`."""
    capture_results: dict[str, Any] = field(default_factory=dict)
    """consumer -> {"status", "error", "payload"} as the server sent it, `inline` too. The status is
    None before the last chunk of a stream."""

    @property
    def capture_status(self) -> dict[str, str | None]:
        return {name: result["status"] for name, result in self.capture_results.items()}


@dataclass
class Answer:
    """What a request gave."""

    choices: list[Choice]
    raw: dict[str, Any]
    """The body of the answer."""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def rows(self) -> dict[Site, Rows]:
        """Of the first choice."""
        return self.choices[0].rows


def read_rows(payload: Sequence[Mapping[str, Any]] | None) -> dict[Site, Rows]:
    """The payload of the consumer `inline`."""
    made = {}
    for entry in payload or ():
        positions = np.array(entry["positions"], dtype=np.int64)
        made[entry["point"], entry["layer"]] = Rows(
            positions=positions,
            token_ids=np.array(entry["token_ids"], dtype=np.int64),
            values=unpack(entry),
            versions=np.array(entry.get("versions", [0] * len(positions)), dtype=np.int64),
        )
    return made


def joined(chunks: Sequence[Choice]) -> Choice:
    """The chunks of one choice of a stream as the choice they come to."""
    if not chunks:
        raise ValueError("no chunks")
    made = Choice(chunks[0].index, "".join(chunk.text for chunk in chunks))
    parts: dict[Site, list[Rows]] = {}
    for chunk in chunks:
        made.finish_reason = chunk.finish_reason or made.finish_reason
        made.capture_results |= chunk.capture_results
        for site, rows in chunk.rows.items():
            parts.setdefault(site, []).append(rows)
    for site, several in parts.items():
        made.rows[site] = Rows(
            *(
                np.concatenate([getattr(rows, name) for rows in several])
                for name in ("positions", "token_ids", "values", "versions")
            )
        )
    return made


def _choice(raw: Mapping[str, Any]) -> Choice:
    message = raw.get("message") or raw.get("delta") or {}
    results = raw.get("capture_results") or {}
    return Choice(
        index=raw["index"],
        text=raw.get("text") or message.get("content") or "",
        finish_reason=raw.get("finish_reason"),
        rows=read_rows(results.get("inline", {}).get("payload")),
        capture_results=results,
    )


def _checked(response: httpx.Response) -> dict[str, Any]:
    if response.status_code >= 400:
        try:
            error = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            error = response.text
        if not isinstance(error, dict):
            error = {"message": str(error)}
        raise SteeringError(response.status_code, error["message"], error.get("param"))
    made: dict[str, Any] = response.json()
    return made


def _event(line: str) -> dict[str, Any] | None:
    """The JSON of a line of a stream of events."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if error := event.get("error"):
        raise SteeringError(error.get("code", 500), error["message"], error.get("param"))
    return event


@dataclass(frozen=True)
class _Call:
    """A request; the two clients differ in how they send it."""

    method: str
    path: str
    body: Any = None


def _set(vectors: Any, prefill_vectors: Any, decode_vectors: Any, replace: bool) -> _Call:
    body = {
        "vectors": vectors,
        "prefill_vectors": prefill_vectors,
        "decode_vectors": decode_vectors,
        "replace": replace,
    }
    return _Call("POST", "/set", {key: value for key, value in body.items() if value is not None})


def _register(name: str, source: Any) -> _Call:
    if isinstance(source, str | Path):
        content = base64.b64encode(Path(source).read_bytes()).decode()
        return _Call("POST", "/modules", {"name": name, "safetensors": content})
    if not source.keys() & {"vectors", "prefill_vectors", "decode_vectors", "ops"}:
        source = {"vectors": source}
    return _Call("POST", "/modules", {"name": name, **source})


def _generation(prompt: Any, model: str | None, fields: Mapping[str, Any]) -> _Call:
    """A chat if the prompt is a list of messages."""
    chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    path, name = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
    body = {name: prompt, **fields}
    if model is not None:
        body["model"] = model
    return _Call("POST", path, body)


class _Settings:
    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        steering_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        """
        Args:
            url: of the server, without `/v1`.
            api_key: of the server (`--api-key`).
            steering_key: which may change steering (`--steering-api-key`).
            model: name to send; a server with one model needs none.
            timeout: seconds without an answer.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._timeout = timeout
        self._headers = {}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if steering_key is not None:
            self._headers["X-Steering-Key"] = steering_key

    def _arguments(self, call: _Call) -> dict[str, Any]:
        path = call.path if call.path.startswith("/v1") else f"/v1/steering{call.path}"
        given: dict[str, Any] = {"method": call.method, "url": self._url + path}
        if call.body is not None:
            given["json"] = packed_fields(call.body)
        return given


class SteeringClient(_Settings):
    """Calls a server and waits."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._http = httpx.Client(headers=self._headers, timeout=self._timeout)

    def __enter__(self) -> "SteeringClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _call(self, call: _Call) -> dict[str, Any]:
        return _checked(self._http.request(**self._arguments(call)))

    def state(self) -> dict[str, Any]:
        """Version, norms and digests of global tiers, modules, slots in use."""
        return self._call(_Call("GET", ""))

    def layers(self) -> dict[str, Any]:
        """hidden_size, dtype, num_layers, the points each layer has."""
        return self._call(_Call("GET", "/layers"))

    def set(
        self,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        replace: bool = False,
    ) -> int:
        """Set global vectors, `{point: {layer: vector}}`; the version."""
        return int(self._call(_set(vectors, prefill_vectors, decode_vectors, replace))["version"])

    def clear(self, tier: str | None = None) -> int:
        return int(self._call(_Call("POST", "/clear", {"tier": tier} if tier else {}))["version"])

    def modules(self) -> dict[str, Any]:
        modules: dict[str, Any] = self._call(_Call("GET", "/modules"))["modules"]
        return modules

    def register_module(self, name: str, source: Any) -> str:
        """Name vectors and operations; the digest.

        Args:
            source: a safetensors file here, `{point: {layer: vector}}`, or a mapping with
                "vectors", "prefill_vectors", "decode_vectors" and "ops".
        """
        return str(self._call(_register(name, source))["digest"])

    def unregister_module(self, name: str) -> None:
        self._call(_Call("DELETE", f"/modules/{name}"))

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """Generate.

        Args:
            prompt: a text, token ids, several of these, or the messages of a chat.
            fields: of the body; steering and capture fields may have numpy arrays.
        """
        raw = self._call(_generation(prompt, self._model, fields))
        return Answer([_choice(choice) for choice in raw["choices"]], raw)

    def stream(self, prompt: Any, **fields: Any) -> Generator[Choice, None, None]:
        """As `complete`, chunk by chunk; `joined` puts those of one index together."""
        call = _generation(prompt, self._model, {**fields, "stream": True})
        with self._http.stream(**self._arguments(call)) as response:
            if response.status_code >= 400:
                response.read()
                _checked(response)
            for line in response.iter_lines():
                if event := _event(line):
                    yield from map(_choice, event["choices"])


class AsyncSteeringClient(_Settings):
    """The methods of `SteeringClient` as coroutines."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._http = httpx.AsyncClient(headers=self._headers, timeout=self._timeout)

    async def __aenter__(self) -> "AsyncSteeringClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, call: _Call) -> dict[str, Any]:
        return _checked(await self._http.request(**self._arguments(call)))

    async def state(self) -> dict[str, Any]:
        return await self._call(_Call("GET", ""))

    async def layers(self) -> dict[str, Any]:
        return await self._call(_Call("GET", "/layers"))

    async def set(
        self,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        replace: bool = False,
    ) -> int:
        call = _set(vectors, prefill_vectors, decode_vectors, replace)
        return int((await self._call(call))["version"])

    async def clear(self, tier: str | None = None) -> int:
        call = _Call("POST", "/clear", {"tier": tier} if tier else {})
        return int((await self._call(call))["version"])

    async def modules(self) -> dict[str, Any]:
        modules: dict[str, Any] = (await self._call(_Call("GET", "/modules")))["modules"]
        return modules

    async def register_module(self, name: str, source: Any) -> str:
        return str((await self._call(_register(name, source)))["digest"])

    async def unregister_module(self, name: str) -> None:
        await self._call(_Call("DELETE", f"/modules/{name}"))

    async def complete(self, prompt: Any, **fields: Any) -> Answer:
        raw = await self._call(_generation(prompt, self._model, fields))
        return Answer([_choice(choice) for choice in raw["choices"]], raw)

    async def stream(self, prompt: Any, **fields: Any) -> AsyncGenerator[Choice, None]:
        call = _generation(prompt, self._model, {**fields, "stream": True})
        async with self._http.stream(**self._arguments(call)) as response:
            if response.status_code >= 400:
                await response.aread()
                _checked(response)
            async for line in response.aiter_lines():
                if event := _event(line):
                    for choice in map(_choice, event["choices"]):
                        yield choice
