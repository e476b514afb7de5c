# SPDX-License-Identifier: Apache-2.0
"""A client of a vLLM server that steers and captures.

This folder stands alone, on numpy and httpx: copy it to where vLLM is not installed.

    client = SteeringClient("http://localhost:8000", steering_key="...")
    answer = client.complete("Today I went", max_tokens=8,
                             steering_vectors={"post_block": {12: vector}},
                             capture={"inline": {"hooks": {"post_block": [12]}}})
    answer.text, answer.rows["post_block", 12].values
"""

import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

import httpx

from .answers import (
    Answer,
    Attention,
    Choice,
    Features,
    Lens,
    Made,
    Rows,
    Site,
    joined,
    read_attention,
    read_choice,
    read_features,
    read_lenses,
    read_rows,
)
from .arrays import pack, pack_layers, packed_fields, unpack
from .requests import Call, features_call, generation_call, register_call, set_call, sweep_call

__all__ = [
    "Answer",
    "AsyncSteeringClient",
    "Attention",
    "Choice",
    "Features",
    "Lens",
    "Made",
    "Rows",
    "Site",
    "SteeringClient",
    "SteeringError",
    "joined",
    "pack",
    "pack_layers",
    "packed_fields",
    "read_attention",
    "read_features",
    "read_lenses",
    "read_rows",
    "unpack",
]


class SteeringError(Exception):
    """Raised when the server refuses a request."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        """The status of HTTP: 400 where something cannot be done, 403 where the key is wrong."""
        self.param = param
        """The path of the wrong field, `steering_vectors.post_block.12`, if there is one."""


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

    def _arguments(self, call: Call) -> dict[str, Any]:
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

    def _call(self, call: Call) -> dict[str, Any]:
        return _checked(self._http.request(**self._arguments(call)))

    def state(self) -> dict[str, Any]:
        """Return the version, the tiers' norms and digests, the modules, and the slots in use."""
        return self._call(Call("GET", ""))

    def layers(self) -> dict[str, Any]:
        """Return hidden_size, dtype, num_layers, and the points that each layer has."""
        return self._call(Call("GET", "/layers"))

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
            self._call(set_call(vectors, prefill_vectors, decode_vectors, ops, replace))["version"]
        )

    def clear(self, tier: str | None = None) -> int:
        """Clear a tier ("base", "prefill", "decode"), "ops", or all; return the new version."""
        return int(self._call(Call("POST", "/clear", {"tier": tier} if tier else {}))["version"])

    def modules(self) -> dict[str, Any]:
        """Return the digest, norms and operations of each module, by name."""
        modules: dict[str, Any] = self._call(Call("GET", "/modules"))["modules"]
        return modules

    def register_module(self, name: str, source: Any) -> str:
        """Name vectors and operations, so that requests can use them.

        Args:
            source: the path of a safetensors file on this machine, `{point: {layer: vector}}`, or a
                mapping with "vectors", "prefill_vectors", "decode_vectors" and "ops".

        Returns:
            The module's digest.
        """
        return str(self._call(register_call(name, source))["digest"])

    def register_features(
        self, name: str, path: str, point: str, layer: int, reconstruct: bool = False
    ) -> None:
        """Name a sparse autoencoder; `path` is of its file in the server's `--features-root`, and
        `reconstruct` gives it a place of `--features-reconstruct`."""
        self._call(features_call(name, path, point, layer, reconstruct))

    def unregister_features(self, name: str) -> None:
        """Forget the name of an autoencoder; running requests keep what it meant."""
        self._call(Call("DELETE", f"/features/{name}"))

    def unregister_module(self, name: str) -> None:
        """Forget a name; running requests keep the module."""
        self._call(Call("DELETE", f"/modules/{name}"))

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules that hold for all requests, without their probes; this takes a key."""
        rules: list[dict[str, Any]] = self._call(Call("GET", "/rules"))["rules"]
        return rules

    def set_rules(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """Set the rules that hold for all requests that come later, in the place of those before.

        Args:
            rules: as the field `rules` of a request; none to have none.
        """
        self._call(Call("POST", "/rules", {"rules": list(rules)}))

    def change(self, answer_id: str, **fields: Any) -> list[dict[str, int]]:
        """Change the steering of a request that is being answered.

        Args:
            answer_id: the answer's id, as its first chunk has it.
            fields: those that steer, in the place of all that the request said; none for none.

        Returns:
            The prompt, completion and position from which on it acts, of each completion that goes
            on.
        """
        return list(self._call(Call("POST", f"/requests/{answer_id}", fields))["changed"])

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """Generate completions.

        Args:
            prompt: a text, token ids, several of these, or the messages of a chat.
            fields: further fields of the body; those that steer and capture may have numpy arrays.

        Raises:
            TypeError: a field is none of the endpoint's, which would ignore it.
        """
        raw = self._call(generation_call(prompt, self._model, fields))
        return Answer([read_choice(choice) for choice in raw["choices"]], raw)

    def stream(self, prompt: Any, **fields: Any) -> Generator[Choice, None, None]:
        """Generate as `complete`, and give out choices chunk by chunk as they come.

        `joined` puts the chunks of one index together.
        """
        call = generation_call(prompt, self._model, {**fields, "stream": True})
        with self._http.stream(**self._arguments(call)) as response:
            if response.status_code >= 400:
                response.read()
                _checked(response)
            for line in response.iter_lines():
                if event := _event(line):
                    yield from map(read_choice, event["choices"])

    def sweep(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Ask `/v1/steering/sweep` what an operation changes of the next token, at each place.

        Args:
            prompt: a text, token ids or the messages of a chat.
            fields: further fields of the body; the operation may have numpy arrays.
        """
        return self._call(sweep_call(prompt, self._model, fields))


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

    async def _call(self, call: Call) -> dict[str, Any]:
        return _checked(await self._http.request(**self._arguments(call)))

    async def state(self) -> dict[str, Any]:
        """Return what `SteeringClient.state` does."""
        return await self._call(Call("GET", ""))

    async def layers(self) -> dict[str, Any]:
        """Return what `SteeringClient.layers` does."""
        return await self._call(Call("GET", "/layers"))

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
        call = set_call(vectors, prefill_vectors, decode_vectors, ops, replace)
        return int((await self._call(call))["version"])

    async def clear(self, tier: str | None = None) -> int:
        """Clear a global tier, or all; return the new version."""
        call = Call("POST", "/clear", {"tier": tier} if tier else {})
        return int((await self._call(call))["version"])

    async def modules(self) -> dict[str, Any]:
        """Return what `SteeringClient.modules` does."""
        modules: dict[str, Any] = (await self._call(Call("GET", "/modules")))["modules"]
        return modules

    async def register_module(self, name: str, source: Any) -> str:
        """Name vectors and operations, as `SteeringClient.register_module`; return the digest."""
        return str((await self._call(register_call(name, source)))["digest"])

    async def register_features(
        self, name: str, path: str, point: str, layer: int, reconstruct: bool = False
    ) -> None:
        """Name a sparse autoencoder, as `SteeringClient.register_features`."""
        await self._call(features_call(name, path, point, layer, reconstruct))

    async def unregister_features(self, name: str) -> None:
        """Forget the name of an autoencoder; running requests keep what it meant."""
        await self._call(Call("DELETE", f"/features/{name}"))

    async def unregister_module(self, name: str) -> None:
        """Forget a name; running requests keep the module."""
        await self._call(Call("DELETE", f"/modules/{name}"))

    async def rules(self) -> list[dict[str, Any]]:
        """Return the rules that hold for all requests, as `SteeringClient.rules`."""
        rules: list[dict[str, Any]] = (await self._call(Call("GET", "/rules")))["rules"]
        return rules

    async def set_rules(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """Set the rules that hold for all requests, as `SteeringClient.set_rules`."""
        await self._call(Call("POST", "/rules", {"rules": list(rules)}))

    async def change(self, answer_id: str, **fields: Any) -> list[dict[str, int]]:
        """Change the steering of a running request, as `SteeringClient.change`."""
        changed = await self._call(Call("POST", f"/requests/{answer_id}", fields))
        return list(changed["changed"])

    async def complete(self, prompt: Any, **fields: Any) -> Answer:
        """Generate completions, as `SteeringClient.complete`."""
        raw = await self._call(generation_call(prompt, self._model, fields))
        return Answer([read_choice(choice) for choice in raw["choices"]], raw)

    async def stream(self, prompt: Any, **fields: Any) -> AsyncGenerator[Choice, None]:
        """Generate chunk by chunk, as `SteeringClient.stream`."""
        call = generation_call(prompt, self._model, {**fields, "stream": True})
        async with self._http.stream(**self._arguments(call)) as response:
            if response.status_code >= 400:
                await response.aread()
                _checked(response)
            async for line in response.aiter_lines():
                if event := _event(line):
                    for choice in map(read_choice, event["choices"]):
                        yield choice

    async def sweep(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Ask what an operation changes at each place, as `SteeringClient.sweep`."""
        return await self._call(sweep_call(prompt, self._model, fields))
