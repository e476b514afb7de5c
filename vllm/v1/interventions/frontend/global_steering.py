# SPDX-License-Identifier: Apache-2.0
"""`llm.steering` and `engine.steering`: global tiers and named modules, at run time."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.core_client import InprocClient, SyncMPClient
from vllm.v1.interventions.calls import GLOBAL_OPS, Change, SteeringCall
from vllm.v1.interventions.errors import InterventionError, reject, show
from vllm.v1.interventions.frontend.module_catalog import ModuleCatalog
from vllm.v1.interventions.plan import TIERS, TapShape
from vllm.v1.interventions.sites import need_steered_points
from vllm.v1.interventions.values import plain
from vllm.v1.interventions.vectors import parse_vectors, vector_set_of
from vllm.v1.steering.files import load, parse_safetensors
from vllm.v1.steering.modules import (
    Module,
    make_module,
    need_module_name,
    no_positions,
    parse_module,
    parse_module_ops,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

BUSY_SECONDS = 60.0
"""How long to wait for another frontend's change before giving up."""

OPS = "ops"
"""What stands in the place of a tier for the operations of all requests."""

Replies = list[dict[str, Any]]
"""The replies of all engines, one each."""


class ChangeBuilder:
    """Makes and checks changes; knows nothing of how they get to the engines."""

    def __init__(self, config: "VllmConfig", catalog: ModuleCatalog) -> None:
        self._config = config
        self._catalog = catalog

    @property
    def shape(self) -> TapShape:
        """What the model offers; raises ValueError if steering is not enabled."""
        shape = self._config.tap_shape
        if not self._config.steering_config.enable_steering or shape is None:
            reject(
                "steering",
                "steering is not enabled; start the engine with enable_steering=True "
                "(--enable-steering)",
            )
        return shape

    def set(
        self, tiers: dict[str, Any], replace: bool, fields: Mapping[str, str] | None = None
    ) -> Change:
        """Make a change that sets vectors, or the operations of all requests.

        Args:
            tiers: tier -> `{point: {layers: vector}}`; "ops" -> a list of operations.
            replace: whether all that is not named is cleared.
            fields: tier -> what errors call it, if not its name.

        Raises:
            ValueError: an unknown tier, or vectors or operations that this engine cannot add.
        """
        sets, config = {}, self._config.steering_config
        tiers = dict(tiers)
        ops, module = tiers.pop(OPS, None), None
        if ops is not None and len(parsed := parse_module_ops(ops, OPS, self.shape, config)):
            module = make_module({}, parsed, OPS, self.shape)
            need_steered_points(module.sites, OPS, config)
        for key, value in tiers.items():
            tier = _need_tier(key)
            path = (fields or {}).get(tier, tier)
            if isinstance(value, list) or (isinstance(value, Mapping) and "ops" in value):
                reject(
                    path,
                    "a tier has vectors only; operations of all requests are 'ops', in the place "
                    "of a tier",
                )
            [(vectors, _)] = parse_vectors(value, path, self.shape, no_positions)
            need_steered_points(vectors, path, config)
            if vectors:
                sets[tier] = vector_set_of(vectors)
        name = GLOBAL_OPS if replace or ops is not None else ""
        return Change("set", tiers=sets, replace=replace, name=name, module=module)

    def clear(self, tier: str | None) -> Change:
        """Make a change that clears one tier, "ops", or all for None."""
        if tier == OPS:
            return Change("set", name=GLOBAL_OPS)
        name = GLOBAL_OPS if tier is None else ""
        return Change("clear", tier=None if tier is None else _need_tier(tier), name=name)

    def register(self, name: Any, source: Any) -> Change:
        """Make a change that names a module: a path to load, or a mapping."""
        name = need_module_name(name, "name")
        config = self._config.steering_config
        if isinstance(source, str | Path):
            module = load(str(source), self.shape, config)
        else:
            module = parse_module(source, "source", self.shape, config)
        need_steered_points(module.sites, "source", config)
        return Change("register", name=name, module=module)

    def register_content(self, name: Any, content: Mapping[str, Any] | bytes) -> Change:
        """Make a change like `register`, of content that came over a network: no path is opened."""
        name = need_module_name(name, "name")
        config = self._config.steering_config
        if isinstance(content, bytes):
            module = parse_safetensors(content, "safetensors", self.shape, config)
        else:
            module = parse_module(content, "", self.shape, config)
        need_steered_points(module.sites, "module", config)
        return Change("register", name=name, module=module)

    def unregister(self, name: str) -> Change:
        """Make a change that removes a name; the engines refuse one that is unknown."""
        return Change("unregister", name=plain(name))

    def made(self, change: Change) -> None:
        """Take over into the catalog a change that the engines have made."""
        if change.name:
            modules = dict(self._catalog.modules)
            modules.pop(change.name, None)
            if change.module is not None:
                modules[change.name] = change.module
            self._catalog.replace(modules)

    @property
    def enabled(self) -> bool:
        """Whether the engine steers."""
        return self._config.steering_config.enable_steering

    def known(self) -> dict[str, str]:
        """The modules of this frontend, `GLOBAL_OPS` among them: name -> digest."""
        return {name: module.digest for name, module in self._catalog.modules.items()}

    def learn(self, news: dict[str, Any]) -> None:
        """Take over modules that other frontends registered, see `ModuleCatalog.learn`."""
        self._catalog.learn(news)

    def module(self, name: str) -> Module:
        """The module of a name; raises ValueError if there is none."""
        return self._catalog.get(name, "name")

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        config, shape = self._config, self._config.tap_shape
        points = config.steering_config.steering_points
        if not self.enabled and shape is not None:
            points = config.capture_config.capture_points
        shape = shape or self.shape
        return {n: tuple(p for p in shape.offers(n) if p in points) for n in shape.points}


def _need_tier(value: Any) -> str:
    if (tier := plain(value)) not in TIERS:
        reject("tier", f"unknown tier {show(tier)}; tiers are {', '.join(TIERS)}")
    return str(tier)


def _verdict(replies: Replies) -> str:
    """What all engines together say, "ok" or "busy"; raises the error of one that refuses."""
    for reply in replies:
        if "error" in reply:
            raise InterventionError(reply["error"], parameter=reply.get("parameter"))
    return "busy" if any("busy" in reply for reply in replies) else "ok"


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

    def modules(self) -> dict[str, Any]:
        """Registered modules: name -> digest, norms of its vectors, names of its ops."""
        modules: dict[str, Any] = self.state()["modules"]
        return modules

    def module(self, name: str) -> Module:
        """What is registered under a name, to save or export (vllm.v1.steering.files)."""
        return self._changes.module(name)

    def state(self) -> dict[str, Any]:
        """Version, norms and digests of the global tiers, modules, slots and rows in use."""
        assert self._changes.shape
        return self._call(SteeringCall("state"))[0]

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        return self._changes.layers()

    def _make(self, change: Change) -> int:
        assert self._changes.shape
        token = uuid.uuid4().hex
        deadline = time.monotonic() + BUSY_SECONDS
        while _verdict(self._call(SteeringCall("prepare", token, change))) == "busy":
            if time.monotonic() > deadline:
                raise TimeoutError("another change of global steering is under way")
            time.sleep(0.05)
        replies = self._call(SteeringCall("commit", token))
        _verdict(replies)
        self._changes.made(change)
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
        self._refreshes = bool(config.steering_config.default_steering_modules)
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
        if change.module is not None and self._core.client_count > 1 and not self._refreshes:
            reject(
                OPS,
                "with several API servers each has to ask what is set, which it does if the server "
                "is started with default_steering_modules, whatever it names",
            )
        return await self._make(change)

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
        """Learn of the modules that other API servers of these engines have registered."""
        if self._core.client_count > 1 and self._changes.enabled:
            known = self._changes.known()
            call = SteeringCall("modules", known=known)
            self._changes.learn(await self._core.call_utility_async("steering", call))

    async def modules(self) -> dict[str, Any]:
        """Registered modules: name -> digest, norms of its vectors, names of its ops."""
        modules: dict[str, Any] = (await self.state())["modules"]
        return modules

    def module(self, name: str) -> Module:
        """What is registered under a name, to save or export (vllm.v1.steering.files)."""
        return self._changes.module(name)

    async def state(self) -> dict[str, Any]:
        """State of the first engine, see `Steering.state`."""
        return (await self.states())[0]

    async def states(self) -> Replies:
        """State of each engine: they differ in slots and rows in use."""
        assert self._changes.shape
        return await self._call(SteeringCall("state"))

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        return self._changes.layers()

    async def _make(self, change: Change) -> int:
        assert self._changes.shape
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
        replies = await asyncio.shield(self._call(SteeringCall("commit", token)))
        _verdict(replies)
        self._changes.made(change)
        return int(replies[0]["version"])

    async def _call(self, call: SteeringCall) -> Replies:
        return await self._core.call_utility_all_async("steering", call)
