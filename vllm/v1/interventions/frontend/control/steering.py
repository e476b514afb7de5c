# SPDX-License-Identifier: Apache-2.0
"""`llm.steering` and `engine.steering`: the global state, read and changed at run time."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import msgspec

from vllm.v1.engine.core_client import InprocClient, SyncMPClient
from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.errors import InterventionError, reject
from vllm.v1.interventions.frontend.control.changes import ChangeBuilder
from vllm.v1.interventions.frontend.control.running import ID, RunningRequests
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.global_state import Change
from vllm.v1.steering.modules import Module, Told

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
    from vllm.v1.engine.output_processor import OutputProcessor

BUSY_SECONDS = 60.0
"""Seconds to wait for another frontend's change before giving up."""

Replies = list[dict[str, Any]]
"""The replies of all engines, one each."""

T = TypeVar("T")
P = ParamSpec("P")


def _verdict(replies: Replies) -> str:
    """Return what all engines together say, "ok" or "busy"; raise the error of one that refuses."""
    for reply in replies:
        if "error" in reply:
            raise InterventionError(reply["error"], parameter=reply.get("parameter"))
    return "busy" if any("busy" in reply for reply in replies) else "ok"


def _decoded(told: dict[str, bytes]) -> dict[str, Any]:
    """Decode the descriptions of modules anew, so that whoever gets them may change them."""
    return {name: msgspec.json.decode(each, type=Told) for name, each in told.items()}


class _Known:
    """Global state as far as this frontend knows it without a question."""

    def __init__(
        self, config: "VllmConfig", catalog: ModuleCatalog, processor: "OutputProcessor"
    ) -> None:
        self._changes = ChangeBuilder(config, catalog)
        self._catalog = catalog
        self._running = RunningRequests(config, catalog, processor)

    def module(self, name: str) -> Module:
        """Return the module registered under a name, to save or export (vllm.v1.steering.files)."""
        return self._catalog.get(name, "name")

    def layers(self) -> dict[int, tuple[str, ...]]:
        """Layer -> the points at which it can be steered; in an engine that only captures, read."""
        return self._changes.layers()

    def heads(self) -> dict[int, dict[str, tuple[int, int]]]:
        """Layer -> point of attention (q, k, v, z) -> number of heads and width of each, for layers
        whose heads can be captured."""
        return self._changes.heads()


class _Coroutines(_Known, ABC):
    """Methods of `llm.steering`, said once, as coroutines."""

    _shared = False
    """True if other API servers change the state of the same engines."""

    @abstractmethod
    async def _call(self, call: SteeringCall) -> Replies:
        """Ask the engines; for news, which all have, one is enough."""

    async def _work(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what takes long without an engine."""
        return work(*args, **kwargs)

    async def set(self, vectors: Any, tier: str = "base", replace: bool = False) -> int:
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
        return await self._make(await self._work(self._changes.set, tiers, replace, fields))

    async def clear(self, tier: str | None = None) -> int:
        """Clear one tier, "ops", or all of these. Returns the version."""
        return await self._make(self._changes.clear(tier))

    async def register_module(self, name: str, source: Any) -> None:
        """Name vectors and ops, for `SamplingParams.steering_modules`.

        Running requests keep what the name meant when they came; later ones get the new meaning.

        Args:
            source: a path (.safetensors, .gguf, .npz); `{point: {layers: vector}}`; or a mapping
                with "vectors", "prefill_vectors", "decode_vectors" and "ops".
        """
        await self._make(await self._work(self._changes.register, name, source))

    async def register_content(self, name: str, content: Mapping[str, Any] | bytes) -> str:
        """Name vectors and ops that came over a network. Returns the digest.

        Args:
            content: the fields of a module, or the content of a safetensors file; never a path.
        """
        change = await self._work(self._changes.register_content, name, content)
        await self._make(change)
        return change.put.modules[name].digest

    async def unregister_module(self, name: str) -> None:
        """Remove a name. Requests that came before keep what it meant."""
        await self._make(self._changes.unregister(name))

    async def register_features(
        self, name: str, path: str, point: str, layer: int, reconstruct: bool = False
    ) -> None:
        """Name a sparse autoencoder, to read by, and for operations, gates and rules. Workers load
        it beside their steps; if one cannot, none keeps it, and the error says why.

        Requests that came before keep what the name meant. Names of the start stay.

        Args:
            path: of its file or folder, within the folder of `features_root`.
            point: the point of its rows.
            layer: the layer likewise.
            reconstruct: whether the operation `reconstruct` may name it, too: it takes one of the
                places of `features_reconstruct`.
        """
        given = {"name": name, "path": path, "point": point, "layer": layer}
        self._need_alone()
        await self._work(self._catalog.load)
        asked = await self._work(
            self._changes.register_features, given | {"reconstruct": reconstruct}
        )
        change, num_bytes, _ = asked
        try:
            _verdict(await self._call(SteeringCall("load", change=change, num_bytes=num_bytes)))
            change = await self._claim(name, await self._work(self._changes.open_features, asked))
            while _verdict(await self._call(SteeringCall("loaded", change=change))) == "busy":
                await self._work(time.sleep, 0.05)
            await self._make(change)
        except BaseException:
            await self._call(SteeringCall("unload", change=change))  # unless it has its name
            self._catalog.close(change)
            raise

    async def _claim(self, name: str, choices: list[Change]) -> Change:
        """Return the first of some changes for which all engines have the place."""
        for change in choices:
            if _verdict(await self._call(SteeringCall("claim", change=change))) != "busy":
                return change
        reject(
            "reconstruct",
            f"{name} finds no place: those of features_reconstruct that it fits in are taken; "
            "unregister features, whose place is free a minute after their last request, or start "
            "the engine with more (--features-reconstruct)",
        )

    async def unregister_features(self, name: str) -> None:
        """Remove the name of an autoencoder that `register_features` gave."""
        self._need_alone()
        await self._make(self._changes.unregister_features(name))

    async def set_rules(self, rules: Any) -> None:
        """Set the rules that hold for all requests that come later, in the place of those before.

        Args:
            rules: as in `SamplingParams.rules`, over positions that any prompt has; or none. A
                rule with "module" takes the direction that the module has now.
        """
        await self._make(await self._work(self._changes.set_rules, rules))

    async def rules(self) -> list[dict[str, Any]]:
        """The rules that hold for all requests, as they are; of a probe its norm alone."""
        await self.refresh()
        return [rule.told() for rule in self._catalog.rules]

    async def modules(self) -> dict[str, Any]:
        """Registered modules: name -> digest, norms of its vectors, names of its ops."""
        await self.refresh()
        return await self._work(_decoded, self.told())

    def told(self) -> dict[str, bytes]:
        """Return what `modules` says, as far as this frontend knows: name -> JSON
        (`Module.told`)."""
        assert self._changes.shape
        return self._catalog.told()

    async def state(self) -> dict[str, Any]:
        """Version, norms and digests of the global tiers, modules, slots and rows in use, of the
        first engine."""
        return (await self.states())[0] | {"modules": await self.modules()}

    async def states(self) -> Replies:
        """State of each engine, without the modules: they differ in slots and rows in use."""
        assert self._changes.shape
        return await self._call(SteeringCall("state"))

    async def refresh(self) -> None:
        """Learn of the modules and rules that other API servers of these engines have set."""
        if self._shared:
            [news] = await self._call(SteeringCall("news", since=self._catalog.changes))
            await self._work(self._catalog.load)
            self._catalog.learn(news)

    def _need_alone(self) -> None:
        if self._shared:
            reject(
                "features",
                "get names while the engine serves where one API server asks it; start the server "
                "with one",
            )

    def _need_asking(self, change: Change) -> None:
        for field in ("ops", "rules"):
            if change.put.of(field) and self._shared and not self._catalog.asks_others:
                reject(
                    field,
                    "with several API servers each has to ask what is set, which it does if the "
                    "server is started with default_steering_modules, whatever it names, or with "
                    "rules (--rules), of an empty list too",
                )

    async def _make(self, change: Change) -> int:
        self._need_asking(change)
        if change.learned:
            await self._work(self._catalog.load)
        token = uuid.uuid4().hex
        deadline = time.monotonic() + BUSY_SECONDS
        try:
            while _verdict(await self._call(SteeringCall("prepare", token, change))) == "busy":
                await self._call(SteeringCall("cancel", token))  # others may have said yes
                if time.monotonic() > deadline:
                    raise TimeoutError("another change of global steering is under way")
                await self._work(time.sleep, 0.05)
        except BaseException:
            await self._call(SteeringCall("cancel", token))
            raise
        return await self._commit(token, change)

    async def _commit(self, token: str, change: Change) -> int:
        replies = await self._call(SteeringCall("commit", token))
        _verdict(replies)
        self._catalog.made(change, replies[0]["changes"])
        return int(replies[0]["version"])


class AsyncSteering(_Coroutines):
    """Global steering of an `AsyncLLM`: the methods of `Steering` as coroutines. With several
    data-parallel engines all make a change or none does."""

    def __init__(
        self,
        config: "VllmConfig",
        catalog: ModuleCatalog,
        core: "AsyncMPClient",
        processor: "OutputProcessor",
    ) -> None:
        super().__init__(config, catalog, processor)
        self._core, self._thread = core, ThreadPoolExecutor(1, "change")
        changes = config.steering_config.enable_steering or config.capture_config.enabled
        self._shared = changes and core.client_count > 1
        catalog.refresh = self.refresh

    async def change(self, request_id: str, fields: Mapping[str, Any]) -> dict[int, int]:
        """Change the steering of a running request, while its answer goes on.

        What it has from now on takes the place of all that its own fields said; its rows so far,
        its capture and its rules stay. The token that is being computed comes as it would have;
        the change acts from the row of the last token given out on. The engine computes what
        the prefix cache does not have of the request once more.

        Args:
            request_id: as it was given to `generate`.
            fields: fields of `SamplingParams` that steer, by name; {} for no steering.

        Returns:
            Completion -> the position from which on it acts, without those that ended before.

        Raises:
            ValueError: it cannot be changed exactly, or a field is wrong.
            LookupError: no such request of this client is running, or it ended meanwhile.
        """
        return (await self.change_each([request_id], fields))[request_id]

    async def change_each(
        self, request_ids: Sequence[str], fields: Mapping[str, Any]
    ) -> dict[str, dict[int, int]]:
        """Change the steering of several running requests as `change` does, by their ids. What is
        wrong with one is found before any is changed.

        Returns:
            What `change` does, for each request that goes on.

        Raises:
            LookupError: all ended.
        """
        if self._core.client_count > 1:
            reject(ID, "is known to one of several API servers; start the server with one")
        found = self._running.find(request_ids)
        work, ids = partial(self._running.joined, [*found.values()], fields), [*found]
        joined = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        futures = self._running.ask([*found.values()], joined)
        del found, work  # they would keep requests that end, and with them the word that they ended
        answers = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        for one in answers:
            if isinstance(one, BaseException) and not isinstance(one, LookupError):
                raise one
        made = {
            name: one
            for name, one in zip(ids, answers, strict=True)
            if not isinstance(one, BaseException)
        }
        if not made and isinstance(answers[0], BaseException):
            raise answers[0]
        return made

    def ids(self, known: str) -> list[str]:
        """Return the ids of the requests that an answer over HTTP, of the id `known`, is made
        of."""
        return self._running.ids(known)

    async def _call(self, call: SteeringCall) -> Replies:
        if call.phase == "news":
            return [await self._core.call_utility_async("steering", call)]
        return await self._core.call_utility_all_async("steering", call)

    async def _work(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(work, *args, **kwargs)

    async def _commit(self, token: str, change: Change) -> int:
        # Nothing between the phases may cut them apart: a caller that goes away, for one.
        return await asyncio.shield(super()._commit(token, change))


class _Direct(_Coroutines):
    """Coroutines that never wait for an event loop: one engine, and the caller's thread."""

    def __init__(
        self,
        config: "VllmConfig",
        catalog: ModuleCatalog,
        core: "EngineCoreClient",
        processor: "OutputProcessor",
    ) -> None:
        super().__init__(config, catalog, processor)
        self._core = core

    async def _call(self, call: SteeringCall) -> Replies:
        if isinstance(self._core, InprocClient):
            return [self._core.engine_core.steering(call)]
        assert isinstance(self._core, SyncMPClient)
        return [self._core.call_utility("steering", call)]


def _blocking(
    method: Callable[Concatenate[_Coroutines, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Steering", P], T]:
    """Make a method of `Steering` of a coroutine."""

    @wraps(method)
    def call(self: "Steering", *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            method(self._direct, *args, **kwargs).send(None)
        except StopIteration as end:
            return cast(T, end.value)
        raise AssertionError("it waits for an event loop")

    return call


class Steering(_Known):
    """Global steering of an `LLM`. Every method raises ValueError for what cannot be done exactly.

    A change acts from the next scheduled step on, on all ranks at once, also on running requests.
    It raises TimeoutError if another one is under way for longer than `BUSY_SECONDS`.
    """

    def __init__(
        self,
        config: "VllmConfig",
        catalog: ModuleCatalog,
        core: "EngineCoreClient",
        processor: "OutputProcessor",
    ) -> None:
        super().__init__(config, catalog, processor)
        self._direct = _Direct(config, catalog, core, processor)

    def change(self, request_id: str, fields: Mapping[str, Any]) -> Future[dict[int, int]]:
        """Change the steering of a running request, as `AsyncSteering.change` does.

        Returns:
            What that returns, once the engine has stepped on.
        """
        found = [*self._running.find([request_id]).values()]
        [future] = self._running.ask(found, self._running.joined(found, fields))
        return future

    set = _blocking(_Coroutines.set)
    set_tiers = _blocking(_Coroutines.set_tiers)
    clear = _blocking(_Coroutines.clear)
    register_module = _blocking(_Coroutines.register_module)
    unregister_module = _blocking(_Coroutines.unregister_module)
    register_features = _blocking(_Coroutines.register_features)
    unregister_features = _blocking(_Coroutines.unregister_features)
    set_rules = _blocking(_Coroutines.set_rules)
    rules = _blocking(_Coroutines.rules)
    modules = _blocking(_Coroutines.modules)
    state = _blocking(_Coroutines.state)
