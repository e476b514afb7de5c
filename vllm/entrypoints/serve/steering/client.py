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
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

Site = tuple[str, int]
"""A point and a layer, such as ("post_block", 12)."""

_FLOATS = {"float16": "<f2", "float32": "<f4"}

_FIELDS = {
    "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors", "steering_modules",
    "steering", "steering_inherit_global", "capture", "rules", "add_special_tokens",
    "allowed_token_ids", "bad_words", "cache_salt", "ec_transfer_params", "echo",
    "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logit_bias",
    "logprob_token_ids", "logprobs", "max_tokens", "min_p", "min_tokens", "mm_payload", "model",
    "n", "presence_penalty", "priority", "prompt_logprobs", "repetition_detection",
    "repetition_penalty", "request_id", "response_format", "return_mm_kwargs", "return_token_ids",
    "return_token_offsets", "return_tokens_as_token_ids", "routed_experts_prompt_start", "seed",
    "session_id", "skip_special_tokens", "spaces_between_special_tokens", "stop",
    "stop_token_ids", "stream", "stream_interval", "stream_options", "structured_outputs",
    "temperature", "thinking_token_budget", "top_k", "top_p", "truncate_prompt_tokens",
    "truncation_side", "use_beam_search", "user", "vllm_xargs", "watermarking",
}  # fmt: skip
"""The fields of completions and of chats."""

_ONLY_COMPLETIONS = {"prompt", "prompt_embeds", "suffix"}
_ONLY_CHATS = {
    "add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "include_reasoning", "max_completion_tokens", "media_io_kwargs", "messages",
    "mm_processor_kwargs", "parallel_tool_calls", "reasoning_effort", "return_prompt_text",
    "tool_choice", "tools", "top_logprobs",
}  # fmt: skip


class SteeringError(Exception):
    """Raised when the server refuses a request."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        """The status of HTTP: 400 where something cannot be done, 403 where the key is wrong."""
        self.param = param
        """The path of the wrong field, `steering_vectors.post_block.12`, if there is one."""


def pack(values: Any) -> dict[str, Any]:
    """Pack an array as `{"dtype", "shape", "data"}`, which a request may have in place of numbers.

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
    """Return the array of a packed one; bfloat16, which numpy lacks, becomes float32, exactly."""
    raw = base64.b64decode(packed["data"])
    if packed["dtype"] == "bfloat16":
        halves = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return halves.view(np.float32).reshape(packed["shape"])
    dtype = _FLOATS.get(packed["dtype"], packed["dtype"])
    return np.frombuffer(raw, dtype).reshape(packed["shape"])


def pack_layers(
    vectors: Mapping[int, Any], scales: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Pack all vectors of a point as one array, in place of `{layer: vector}`.

    Args:
        vectors: layer -> [hidden].
        scales: layer -> scale; 1 for layers that are not named.
    """
    layers = list(vectors)
    packed = pack(np.stack([np.asarray(vectors[layer]) for layer in layers]))
    packed["layers"] = layers
    if scales:
        packed["scales"] = [float(scales.get(layer, 1.0)) for layer in layers]
    return packed


def packed_fields(value: Any) -> Any:
    """Return a request with every numpy array in it packed."""
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
    """The positions of the rows, int64 [n]. A row has read its token and predicts the next."""
    token_ids: np.ndarray
    """The token that each row has read, int64 [n]."""
    values: np.ndarray
    """The rows, [n, hidden], float16 or float32; at q, k, v and z [n, heads, width]; with `project`
    their scores, [n, k]."""
    versions: np.ndarray
    """The version of the global steering that each row ran under, int64 [n]."""
    heads: tuple[int, ...] = ()
    """The numbers of the heads, at q, k, v and z."""
    tokens: tuple[str, ...] = ()
    """The text of each row's token, where the capture says `"tokens": true`."""

    def at(self, position: int) -> np.ndarray:
        """Return the row of one absolute position, [hidden].

        Raises:
            KeyError: that position was not captured.
        """
        found = np.flatnonzero(self.positions == position)
        if not len(found):
            raise KeyError(f"position {position} was not captured, these were: {self.positions}")
        row: np.ndarray = self.values[int(found[0])]
        return row


@dataclass
class Made:
    """What the server made of rows, in position order."""

    positions: np.ndarray
    """The positions of the rows, int64 [n]."""
    token_ids: np.ndarray
    """The token of each, int64 [n]."""
    versions: np.ndarray
    """The version of the global steering that each ran under, int64 [n]."""
    given: dict[str, np.ndarray]
    """What was asked for, by name."""


@dataclass
class Lens(Made):
    """The rows of one point of one layer under a lens. `given` has what was asked for of "top_ids"
    and "top_logprobs" [n, top_k], "token_logprobs" and "token_ranks" [n, tokens], and "entropy"
    [n]."""

    lens: str
    """The name of the lens."""
    asked: tuple[int, ...]
    """The ids of the tokens that were asked for."""
    tokens: tuple[str, ...] = ()
    """The text of each row's token, where the capture says `"tokens": true`."""


@dataclass
class Attention(Made):
    """What was asked of the attention weights of one layer, query by query. `given` has what was
    asked for of "mass" and "peak" [n, heads, ranges], and of "top_positions" and "top_weights"
    [n, heads, top]."""

    heads: tuple[int, ...]
    """The numbers of the heads."""
    ranges: tuple[str, ...]
    """The names of the key ranges."""
    weights: list[np.ndarray] = field(default_factory=list)
    """The weights of all keys up to each query's own, t: n arrays [heads, t + 1], summed
    [t + 1]."""


@dataclass
class Choice:
    """One completion; of a stream, what came in one chunk."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    captures: dict[str, dict[Site, Rows]] = field(default_factory=dict)
    """The rows of each capture for the consumer `inline`, by site: of `inline`, or where a list was
    asked for of `inline[0]` and so on."""
    attention: dict[str, dict[int | None, Attention]] = field(default_factory=dict)
    """The attention of each such capture, by layer; by None with `"sum": "all"`."""
    lenses: dict[str, dict[Site, Lens]] = field(default_factory=dict)
    """What each such capture read under a lens, by site."""
    stop_reason: int | str | None = None
    """The stop string, token or rule (`"rule:NAME"`) that ended it."""
    rules: dict[str, Any] = field(default_factory=dict)
    """What came of each rule, by name, once the choice has ended: {"fired_at", ...}; None for one
    of the operator that fired."""
    capture_results: dict[str, Any] = field(default_factory=dict)
    """The result of each consumer as the server sent it, {"status", "error", "payload"}, by name.
    The status is None before the last chunk of a stream."""

    @property
    def rows(self) -> dict[Site, Rows]:
        """The rows that the consumer `inline` returned, by site; empty where it was asked for a
        list of captures."""
        return self.captures.get("inline", {})

    @property
    def capture_status(self) -> dict[str, str | None]:
        """The status of each consumer's result, by consumer."""
        return {name: result["status"] for name, result in self.capture_results.items()}


@dataclass
class Answer:
    """The answer to a request, with its completions."""

    choices: list[Choice]
    raw: dict[str, Any]
    """The whole body of the answer."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def rows(self) -> dict[Site, Rows]:
        """The rows of the first choice, by site."""
        return self.choices[0].rows


def read_rows(payload: Sequence[Mapping[str, Any]] | None) -> dict[Site, Rows]:
    """Read the payload of the consumer `inline`."""
    made = {}
    for entry in payload or ():
        if entry["point"] == "attn" or "lens" in entry:
            continue
        positions = np.array(entry["positions"], dtype=np.int64)
        made[entry["point"], entry["layer"]] = Rows(
            positions=positions,
            token_ids=np.array(entry["token_ids"], dtype=np.int64),
            values=unpack(entry),
            versions=np.array(entry.get("versions", [0] * len(positions)), dtype=np.int64),
            heads=tuple(entry.get("heads", ())),
            tokens=tuple(entry.get("tokens", ())),
        )
    return made


def read_attention(payload: Sequence[Mapping[str, Any]] | None) -> dict[int | None, Attention]:
    """Read what of the payload of the consumer `inline` is attention."""
    made = {}
    for entry in payload or ():
        if entry["point"] != "attn":
            continue
        positions = np.array(entry["positions"], dtype=np.int64)
        names = ("mass", "peak", "top_positions", "top_weights")
        weights = unpack(entry["weights"]) if "weights" in entry else np.empty(0)
        made[entry["layer"]] = Attention(
            positions=positions,
            token_ids=np.array(entry["token_ids"], dtype=np.int64),
            versions=np.array(entry.get("versions", [0] * len(positions)), dtype=np.int64),
            heads=tuple(entry.get("heads", ())),
            ranges=tuple(entry.get("ranges", ())),
            given={name: unpack(entry[name]) for name in names if name in entry},
            weights=[row[..., : t + 1] for row, t in zip(weights, positions, strict=False)],
        )
    return made


def read_lenses(payload: Sequence[Mapping[str, Any]] | None) -> dict[Site, Lens]:
    """Read what of the payload of the consumer `inline` was read under lenses."""
    made = {}
    names = ("top_ids", "top_logprobs", "token_logprobs", "token_ranks", "entropy")
    for entry in payload or ():
        if "lens" not in entry:
            continue
        positions = np.array(entry["positions"], dtype=np.int64)
        made[entry["point"], entry["layer"]] = Lens(
            positions=positions,
            token_ids=np.array(entry["token_ids"], dtype=np.int64),
            versions=np.array(entry.get("versions", [0] * len(positions)), dtype=np.int64),
            given={name: unpack(entry[name]) for name in names if name in entry},
            lens=entry["lens"],
            asked=tuple(entry["asked"]),
            tokens=tuple(entry.get("tokens", ())),
        )
    return made


def joined(chunks: Sequence[Choice]) -> Choice:
    """Join the chunks of one choice of a stream.

    Raises:
        ValueError: there are none.
    """
    if not chunks:
        raise ValueError("no chunks")
    made = Choice(chunks[0].index, "".join(chunk.text for chunk in chunks))
    parts: dict[tuple[str, Site], list[Rows]] = {}
    for chunk in chunks:
        made.finish_reason = chunk.finish_reason or made.finish_reason
        made.stop_reason = chunk.stop_reason if made.stop_reason is None else made.stop_reason
        made.rules |= chunk.rules
        made.capture_results |= chunk.capture_results
        for name, layers in chunk.attention.items():
            for layer, attention in layers.items():
                mine = made.attention.setdefault(name, {})
                mine[layer] = _with(mine[layer], attention) if layer in mine else attention
        for name, under in chunk.lenses.items():
            for site, lens in under.items():
                read = made.lenses.setdefault(name, {})
                read[site] = _with(read[site], lens) if site in read else lens
        for name, sites in chunk.captures.items():
            for site, rows in sites.items():
                parts.setdefault((name, site), []).append(rows)
    for (name, site), several in parts.items():
        arrays = {
            what: np.concatenate([getattr(rows, what) for rows in several])
            for what in ("positions", "token_ids", "values", "versions")
        }
        tokens = tuple(text for rows in several for text in rows.tokens)
        made.captures.setdefault(name, {})[site] = Rows(
            **arrays, heads=several[0].heads, tokens=tokens
        )
    return made


_M = TypeVar("_M", Lens, Attention)


def _with(made: _M, later: _M) -> _M:
    """Join what two chunks have of a layer."""
    arrays = {
        what: np.concatenate([getattr(made, what), getattr(later, what)])
        for what in ("positions", "token_ids", "versions")
    }
    given = {name: np.concatenate([a, later.given[name]]) for name, a in made.given.items()}
    # Lists and tuples: a row's weights, or its text.
    own = "weights" if isinstance(made, Attention) else "tokens"
    rest: dict[str, Any] = {own: getattr(made, own) + getattr(later, own)}
    return replace(made, **arrays, given=given, **rest)


def _choice(raw: Mapping[str, Any]) -> Choice:
    """Read a choice of an answer, or of a chunk of a stream."""
    message = raw.get("message") or raw.get("delta") or {}
    results = raw.get("capture_results") or {}
    inline = {name: r for name, r in results.items() if name.partition("[")[0] == "inline"}
    return Choice(
        index=raw["index"],
        text=raw.get("text") or message.get("content") or "",
        finish_reason=raw.get("finish_reason"),
        captures={name: read_rows(result["payload"]) for name, result in inline.items()},
        attention={name: read_attention(result["payload"]) for name, result in inline.items()},
        lenses={name: read_lenses(result["payload"]) for name, result in inline.items()},
        stop_reason=raw.get("stop_reason"),
        rules=raw.get("rules") or {},
        capture_results=results,
    )


def _checked(response: httpx.Response) -> dict[str, Any]:
    """Return the body of a response, or raise SteeringError if the server refused."""
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
    """Read the JSON of a line of a stream of events; None if the line holds none."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if error := event.get("error"):
        raise SteeringError(error.get("code", 500), error["message"], error.get("param"))
    return event


@dataclass(frozen=True)
class _Call:
    """A request of HTTP; the two clients differ in how they send it."""

    method: str
    path: str
    body: Any = None


def _set(vectors: Any, prefill_vectors: Any, decode_vectors: Any, ops: Any, replace: bool) -> _Call:
    body = {
        "vectors": vectors,
        "prefill_vectors": prefill_vectors,
        "decode_vectors": decode_vectors,
        "ops": ops,
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
    """Make the request for completions; it is a chat if the prompt is a list of messages."""
    chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    path, name = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
    known = _FIELDS | (_ONLY_CHATS if chat else _ONLY_COMPLETIONS)
    for field_name in fields.keys() - known:
        # The server would ignore it.
        alike = get_close_matches(field_name, known, 1)
        hint = f"; {alike[0]!r} is one" if alike else ""
        raise TypeError(f"{field_name!r} is not a field of {path}{hint}")
    body = {name: prompt, **fields}
    if model is not None:
        body["model"] = model
    return _Call("POST", path, body)


def _sweep(prompt: Any, model: str | None, fields: Mapping[str, Any]) -> _Call:
    return _Call(
        "POST", "/sweep", {"prompt": prompt, **({"model": model} if model else {}), **fields}
    )


class _Settings:
    """The address and keys of a server, which both clients have."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        steering_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Note the settings; nothing is sent.

        Args:
            url: the server's address, with or without `/v1` at its end.
            api_key: the server's key (`--api-key`).
            steering_key: a key that may change steering (`--steering-api-key`).
            model: the model's name to send; a server with one model needs none.
            timeout: the seconds to wait for an answer.
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
        """Return the keywords with which httpx sends a request."""
        path = call.path if call.path.startswith("/v1") else f"/v1/steering{call.path}"
        given: dict[str, Any] = {"method": call.method, "url": self._url + path}
        if call.body is not None:
            given["json"] = packed_fields(call.body)
        return given


class SteeringClient(_Settings):
    """Calls a server and waits for its answers.

    All methods that call it raise `SteeringError` when it refuses, and httpx's errors when it
    cannot be reached.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        """Make a client.

        Args:
            url: the server's address, with or without `/v1` at its end.
            settings: `api_key` (`--api-key`), `steering_key`, which may change steering
                (`--steering-api-key`), `model`, the name to send, which a server with one model
                does not need, and `timeout`, the seconds to wait for an answer (600).
        """
        super().__init__(url, **settings)
        self._http = httpx.Client(headers=self._headers, timeout=self._timeout)

    def __enter__(self) -> "SteeringClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, call: _Call) -> dict[str, Any]:
        return _checked(self._http.request(**self._arguments(call)))

    def state(self) -> dict[str, Any]:
        """Return the version, the tiers' norms and digests, the modules, and the slots in use."""
        return self._call(_Call("GET", ""))

    def layers(self) -> dict[str, Any]:
        """Return hidden_size, dtype, num_layers, and the points that each layer has."""
        return self._call(_Call("GET", "/layers"))

    def set(
        self,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        ops: Any = None,
        replace: bool = False,
    ) -> int:
        """Set global vectors and operations.

        Args:
            vectors: `{point: {layer: vector}}` for all positions.
            prefill_vectors: such vectors for positions of prompts.
            decode_vectors: such vectors for generated positions.
            ops: operations of all requests that come later, as `steering` of a request has them.
            replace: whether tiers that are not given are cleared.

        Returns:
            The new version.
        """
        return int(
            self._call(_set(vectors, prefill_vectors, decode_vectors, ops, replace))["version"]
        )

    def clear(self, tier: str | None = None) -> int:
        """Clear a tier ("base", "prefill", "decode"), "ops", or all; return the new version."""
        return int(self._call(_Call("POST", "/clear", {"tier": tier} if tier else {}))["version"])

    def modules(self) -> dict[str, Any]:
        """Return the digest, norms and operations of each module, by name."""
        modules: dict[str, Any] = self._call(_Call("GET", "/modules"))["modules"]
        return modules

    def register_module(self, name: str, source: Any) -> str:
        """Name vectors and operations, so that requests can use them.

        Args:
            source: the path of a safetensors file on this machine, `{point: {layer: vector}}`, or a
                mapping with "vectors", "prefill_vectors", "decode_vectors" and "ops".

        Returns:
            The module's digest.
        """
        return str(self._call(_register(name, source))["digest"])

    def unregister_module(self, name: str) -> None:
        """Forget a name; running requests keep the module."""
        self._call(_Call("DELETE", f"/modules/{name}"))

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules that hold for all requests, without their probes; this takes a key."""
        rules: list[dict[str, Any]] = self._call(_Call("GET", "/rules"))["rules"]
        return rules

    def set_rules(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """Set the rules that hold for all requests that come later, in the place of those before.

        Args:
            rules: as the field `rules` of a request; none to have none.
        """
        self._call(_Call("POST", "/rules", {"rules": list(rules)}))

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """Generate completions.

        Args:
            prompt: a text, token ids, several of these, or the messages of a chat.
            fields: further fields of the body; those that steer and capture may have numpy arrays.

        Raises:
            TypeError: a field is none of the endpoint's, which would ignore it.
        """
        raw = self._call(_generation(prompt, self._model, fields))
        return Answer([_choice(choice) for choice in raw["choices"]], raw)

    def stream(self, prompt: Any, **fields: Any) -> Generator[Choice, None, None]:
        """Generate as `complete`, and give out choices chunk by chunk as they come.

        `joined` puts the chunks of one index together.
        """
        call = _generation(prompt, self._model, {**fields, "stream": True})
        with self._http.stream(**self._arguments(call)) as response:
            if response.status_code >= 400:
                response.read()
                _checked(response)
            for line in response.iter_lines():
                if event := _event(line):
                    yield from map(_choice, event["choices"])

    def sweep(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Ask `/v1/steering/sweep` what an operation changes of the next token, at each place.

        Args:
            prompt: a text, token ids or the messages of a chat.
            fields: further fields of the body; the operation may have numpy arrays.
        """
        return self._call(_sweep(prompt, self._model, fields))


class AsyncSteeringClient(_Settings):
    """Has the methods of `SteeringClient` as coroutines."""

    def __init__(self, url: str, **settings: Any) -> None:
        """Make a client; the arguments are those of `SteeringClient`."""
        super().__init__(url, **settings)
        self._http = httpx.AsyncClient(headers=self._headers, timeout=self._timeout)

    async def __aenter__(self) -> "AsyncSteeringClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, call: _Call) -> dict[str, Any]:
        return _checked(await self._http.request(**self._arguments(call)))

    async def state(self) -> dict[str, Any]:
        """Return what `SteeringClient.state` does."""
        return await self._call(_Call("GET", ""))

    async def layers(self) -> dict[str, Any]:
        """Return what `SteeringClient.layers` does."""
        return await self._call(_Call("GET", "/layers"))

    async def set(
        self,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        ops: Any = None,
        replace: bool = False,
    ) -> int:
        """Set global vectors and operations, as `SteeringClient.set`; return the new version."""
        call = _set(vectors, prefill_vectors, decode_vectors, ops, replace)
        return int((await self._call(call))["version"])

    async def clear(self, tier: str | None = None) -> int:
        """Clear a global tier, or all; return the new version."""
        call = _Call("POST", "/clear", {"tier": tier} if tier else {})
        return int((await self._call(call))["version"])

    async def modules(self) -> dict[str, Any]:
        """Return what `SteeringClient.modules` does."""
        modules: dict[str, Any] = (await self._call(_Call("GET", "/modules")))["modules"]
        return modules

    async def register_module(self, name: str, source: Any) -> str:
        """Name vectors and operations, as `SteeringClient.register_module`; return the digest."""
        return str((await self._call(_register(name, source)))["digest"])

    async def unregister_module(self, name: str) -> None:
        """Forget a name; running requests keep the module."""
        await self._call(_Call("DELETE", f"/modules/{name}"))

    async def rules(self) -> list[dict[str, Any]]:
        """Return the rules that hold for all requests, as `SteeringClient.rules`."""
        rules: list[dict[str, Any]] = (await self._call(_Call("GET", "/rules")))["rules"]
        return rules

    async def set_rules(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """Set the rules that hold for all requests, as `SteeringClient.set_rules`."""
        await self._call(_Call("POST", "/rules", {"rules": list(rules)}))

    async def complete(self, prompt: Any, **fields: Any) -> Answer:
        """Generate completions, as `SteeringClient.complete`."""
        raw = await self._call(_generation(prompt, self._model, fields))
        return Answer([_choice(choice) for choice in raw["choices"]], raw)

    async def stream(self, prompt: Any, **fields: Any) -> AsyncGenerator[Choice, None]:
        """Generate chunk by chunk, as `SteeringClient.stream`."""
        call = _generation(prompt, self._model, {**fields, "stream": True})
        async with self._http.stream(**self._arguments(call)) as response:
            if response.status_code >= 400:
                await response.aread()
                _checked(response)
            async for line in response.aiter_lines():
                if event := _event(line):
                    for choice in map(_choice, event["choices"]):
                        yield choice

    async def sweep(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Ask what an operation changes at each place, as `SteeringClient.sweep`."""
        return await self._call(_sweep(prompt, self._model, fields))
