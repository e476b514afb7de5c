# SPDX-License-Identifier: Apache-2.0
"""`llm.steering` and `engine.steering`: global tiers and named modules, at run time."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.v1.engine.core_client import InprocClient, SyncMPClient
from vllm.v1.interventions.calls import Change, SteeringCall
from vllm.v1.interventions.errors import InterventionError, reject
from vllm.v1.interventions.frontend.control.changes import OPS, ChangeBuilder
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.steering.modules import Module, Told

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

BUSY_SECONDS = 60.0
"""Seconds to wait for another frontend's change before giving up."""

Replies = list[dict[str, Any]]
"""The replies of all engines, one each."""


def _verdict(replies: Replies) -> str:
    """Return what all engines together say, "ok" or "busy"; raise the error of one that refuses."""
    for reply in replies:
        if "error" in reply:
            raise InterventionError(reply["error"], parameter=reply.get("parameter"))
    return "busy" if any("busy" in reply for reply in replies) else "ok"


def _decoded(told: dict[str, bytes]) -> dict[str, Any]:
    """Decode the descriptions of modules anew, so that whoever gets them may change them."""
    return {name: msgspec.json.decode(each, type=Told) for name, each in told.items()}


class Steering:
    """Global steering of an `LLM`. Every method raises ValueError for what cannot be done exactly.

    A change acts from the next scheduled step on, on all ranks at once, also on running requests.
    It raises TimeoutError if another one is under way for longer than `BUSY_SECONDS`.
    """

    def __init__(
        self, config: "VllmConfig", catalog: ModuleCatalog, core: "EngineCoreClient"
    ) -> None:
        self._changes = ChangeBuilder(config, catalog)
        self._core = core

    def set(self, vectors: Any, tier: str = "base", replace: bool = False) -> int:
        """Set global vectors: `{point: {layers: vector}}`, as in `SamplingParams.steering_vectors`.
        Or, with "ops" as tier, operations, as in `SamplingParams.steering`: they act on requests
        that come later, in the place of those that were set before.

        Args:
            vectors: each overwrites the one at its tier, point and layer.
            tier: base (all positions), prefill (of the prompt), decode (generated) or ops.
            replace: whether all that is not named is cleared, in all tiers.

        Returns:
            The version, which captured rows report.
        """
        return self.set_tiers({tier: vectors}, replace)

    def set_tiers(self, tiers: dict[str, Any], replace: bool = False) -> int:
        """Set several tiers at once: `{tier: vectors, "ops": operations}`. Returns the version."""
        return self._make(self._changes.set(tiers, replace))

    def clear(self, tier: str | None = None) -> int:
        """Clear one tier, "ops", or all of these. Returns the version."""
        return self._make(self._changes.clear(tier))

    def register_module(self, name: str, source: Any) -> None:
        """Name vectors and ops, for `SamplingParams.steering_modules`.

        Running requests keep what the name meant when they came; later ones get the new meaning.

        Args:
            source: a path (.safetensors, .gguf, .npz); `{point: {layers: vector}}`; or a mapping
                with "vectors", "prefill_vectors", "decode_vectors" and "ops".
        """
        self._make(self._changes.register(name, source))

    def unregister_module(self, name: str) -> None:
        """Remove a name. Requests that came before keep what it meant."""
        self._make(self._changes.unregister(name))

    def set_rules(self, rules: Any) -> None:
        """Set the rules that hold for all requests that come later, in the place of those before.

        Args:
            rules: as in `SamplingParams.rules`, over positions that any prompt has; or none. A
                rule with "module" takes the direction that the module has now.
        """
        self._make(self._changes.set_rules(rules))

    def rules(self) -> list[dict[str, Any]]:
        """The rules that hold for all requests, as they are; of a probe its norm alone."""
        return self._changes.rules()

    def modules(self) -> dict[str, Any]:
        """Registered modules: name -> digest, norms of its vectors, names of its ops."""
        return _decoded(self._changes.told())

    def module(self, name: str) -> Module:
        """Return the module registered under a name, to save or export (vllm.v1.steering.files)."""
        return self._changes.module(name)

    def state(self) -> dict[str, Any]:
        """Version, norms and digests of the global tiers, modules, slots and rows in use."""
        assert self._changes.shape
        return self._call(SteeringCall("state"))[0] | {"modules": self.modules()}

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        return self._changes.layers()

    def _make(self, change: Change) -> int:
        token = uuid.uuid4().hex
        deadline = time.monotonic() + BUSY_SECONDS
        while _verdict(self._call(SteeringCall("prepare", token, change))) == "busy":
            if time.monotonic() > deadline:
                raise TimeoutError("another change of global steering is under way")
            time.sleep(0.05)
        replies = self._call(SteeringCall("commit", token))
        _verdict(replies)
        self._changes.made(change, replies[0]["changes"])
        return int(replies[0]["version"])

    def _call(self, call: SteeringCall) -> Replies:
        if isinstance(self._core, InprocClient):
            return [self._core.engine_core.steering(call)]
        assert isinstance(self._core, SyncMPClient)
        return [self._core.call_utility("steering", call)]


class AsyncSteering:
    """Global steering of an `AsyncLLM`: the methods of `Steering` as coroutines. With several
    data-parallel engines all make a change or none does."""

    def __init__(self, config: "VllmConfig", catalog: ModuleCatalog, core: "AsyncMPClient") -> None:
        self._changes = ChangeBuilder(config, catalog)
        self._core = core
        catalog.refresh = self.refresh

    async def set(self, vectors: Any, tier: str = "base", replace: bool = False) -> int:
        """Set global vectors of one tier, see `Steering.set`. Returns the version."""
        return await self.set_tiers({tier: vectors}, replace)

    async def set_tiers(
        self,
        tiers: dict[str, Any],
        replace: bool = False,
        fields: Mapping[str, str] | None = None,
    ) -> int:
        """Set several tiers at once: `{tier: vectors, "ops": operations}`. Returns the version.

        Args:
            fields: tier -> what errors call it, if not its name.
        """
        change = await asyncio.to_thread(self._changes.set, tiers, replace, fields)
        if change.module is not None:
            self._need_asking(OPS)
        return await self._make(change)

    def _need_asking(self, field: str) -> None:
        if self._core.client_count > 1 and not self._changes.asks_others:
            reject(
                field,
                "with several API servers each has to ask what is set, which it does if the server "
                "is started with default_steering_modules, whatever it names, or with rules "
                "(--rules), of an empty list too",
            )

    async def set_rules(self, rules: Any) -> None:
        """Set the rules that hold for all requests that come later, see `Steering.set_rules`."""
        change = await asyncio.to_thread(self._changes.set_rules, rules)
        self._need_asking("rules")
        await self._make(change)

    async def rules(self) -> list[dict[str, Any]]:
        """The rules that hold for all requests, see `Steering.rules`."""
        await self.refresh()
        return self._changes.rules()

    async def clear(self, tier: str | None = None) -> int:
        """Clear one tier, "ops", or all of these. Returns the version."""
        return await self._make(self._changes.clear(tier))

    async def register_module(self, name: str, source: Any) -> None:
        """Name vectors and ops, see `Steering.register_module`."""
        await self._make(await asyncio.to_thread(self._changes.register, name, source))

    async def register_content(self, name: str, content: Mapping[str, Any] | bytes) -> str:
        """Name vectors and ops that came over a network. Returns the digest.

        Args:
            content: the fields of a module, or the content of a safetensors file; never a path.
        """
        change = await asyncio.to_thread(self._changes.register_content, name, content)
        await self._make(change)
        assert change.module is not None
        return change.module.digest

    async def unregister_module(self, name: str) -> None:
        """Remove a name. Requests that came before keep what it meant."""
        await self._make(self._changes.unregister(name))

    async def refresh(self) -> None:
        """Learn of the modules and rules that other API servers of these engines have set."""
        if self._core.client_count > 1 and self._changes.has_shared:
            call = SteeringCall("modules", since=self._changes.known())
            self._changes.learn(await self._core.call_utility_async("steering", call))

    async def modules(self) -> dict[str, Any]:
        """Registered modules: name -> digest, norms of its vectors, names of its ops."""
        await self.refresh()
        return await asyncio.to_thread(_decoded, self.told())

    def told(self) -> dict[str, bytes]:
        """Return what `modules` says, as far as this frontend knows: name -> JSON
        (`Module.told`)."""
        return self._changes.told()

    def module(self, name: str) -> Module:
        """Return the module registered under a name, to save or export (vllm.v1.steering.files)."""
        return self._changes.module(name)

    async def state(self) -> dict[str, Any]:
        """State of the first engine, see `Steering.state`."""
        return (await self.states())[0] | {"modules": await self.modules()}

    async def states(self) -> Replies:
        """State of each engine, without the modules: they differ in slots and rows in use."""
        assert self._changes.shape
        return await self._call(SteeringCall("state"))

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        return self._changes.layers()

    async def _make(self, change: Change) -> int:
        token = uuid.uuid4().hex
        deadline = time.monotonic() + BUSY_SECONDS
        try:
            while _verdict(await self._call(SteeringCall("prepare", token, change))) == "busy":
                await self._call(SteeringCall("cancel", token))  # others may have said yes
                if time.monotonic() > deadline:
                    raise TimeoutError("another change of global steering is under way")
                await asyncio.sleep(0.05)
        except BaseException:
            await self._call(SteeringCall("cancel", token))
            raise
        # Nothing between the phases may cut them apart: a caller that goes away, for one.
        return await asyncio.shield(self._commit(token, change))

    async def _commit(self, token: str, change: Change) -> int:
        replies = await self._call(SteeringCall("commit", token))
        _verdict(replies)
        self._changes.made(change, replies[0]["changes"])
        return int(replies[0]["version"])

    async def _call(self, call: SteeringCall) -> Replies:
        return await self._core.call_utility_all_async("steering", call)
