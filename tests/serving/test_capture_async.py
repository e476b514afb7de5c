# SPDX-License-Identifier: Apache-2.0
"""Consumers of an `AsyncLLM` whose engine core is a process of its own: outputs that are held,
streams, aborts, and a budget that is too small."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance.engine import MAX_MODEL_LEN
from tests.conformance.models import HIDDEN
from tests.serving.test_capture_consumers import Keep, KeepHere, assert_same_rows
from tests.support.consumers import PATIENCE
from tests.support.serving import prompt_of
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.interventions.frontend.compat.peers import ARGS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = prompt_of(17, 70)
HOOKS = {"pre_attn": [0], "post_block": "all"}
NUM_SITES = 5
ROW_BYTES = HIDDEN * 4
SMALL = NUM_SITES * ROW_BYTES * 40
"""Room for one request of 40 rows, and not for two of them."""


@dataclass(frozen=True)
class Server:
    """An engine, the loop it lives in, and the consumer of this process."""

    engine: AsyncLLM
    loop: asyncio.AbstractEventLoop
    here: Keep

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 300))

    async def stream(self, name: str, params: SamplingParams) -> list[Any]:
        prompt = TokensPrompt(prompt_token_ids=PROMPT)
        return [output async for output in self.engine.generate(prompt, params, name)]

    async def until_held(self) -> None:
        while not self.engine.output_processor.captures.num_held:
            await asyncio.sleep(0.01)


def start(tiny_models: TinyModels, **options: Any) -> Iterator[Server]:
    loop = asyncio.new_event_loop()
    here = KeepHere()
    consumers = [
        "inline",
        {"consumer": Keep, "instance_name": "core", "pending_bytes": SMALL},
        {"consumer": here, "instance_name": "here", "pending_bytes": SMALL},
    ]

    async def make() -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(tiny_models.path("llama")),
                enforce_eager=True,
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=8,
                kv_cache_memory_bytes=16 << 20,
                block_size=32,
                skip_tokenizer_init=True,
                capture_consumers=consumers,
                disable_log_stats=True,
                **options,
            )
        )

    engine = loop.run_until_complete(make())
    yield Server(engine, loop, here)
    engine.shutdown()
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels) -> Iterator[Server]:
    yield from start(tiny_models)


def asking(*names: str, kind: RequestOutputKind, **settings: Any) -> SamplingParams:
    request = {"hooks": HOOKS, "positions": "all"}
    base: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(
        capture={name: request for name in ("inline", *names)},
        detokenize=False,
        output_kind=kind,
        **{**base, **settings},
    )


DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("key", ARGS)
def test_a_field_of_another_tool_is_refused(server: Server, key: str) -> None:
    """With its twin: what belongs to none is upstream's, and passes."""
    with pytest.raises(ValueError, match=rf"^extra_args\.{key}: is for .*coming-from\.md#"):
        server.run(server.stream("foreign", SamplingParams(extra_args={key: [1]})))
    params = SamplingParams(max_tokens=1, detokenize=False, extra_args={"mine": [1], key: None})
    assert server.run(server.stream("own", params))[-1].finished


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_results_come_with_the_last_output(server: Server, kind: RequestOutputKind) -> None:
    outputs = server.run(server.stream("kinds", asking("core", "here", kind=kind)))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for output in outputs[:-1]:
        assert output.capture_results.keys() == {"inline"}
    results = outputs[-1].capture_results
    assert results.keys() == {"inline", "core", "here"}
    if kind != DELTA:
        assert_same_rows(results, "core")
        assert_same_rows(results, "here")
        return
    parts = [o.capture_results["inline"].payload["post_block", 1].values for o in outputs]
    for name in ("core", "here"):
        payload = results[name].payload
        at = payload["sites"].index(["post_block", 1])
        assert torch.equal(torch.tensor(payload["values"])[at], torch.cat(parts))


@pytest.mark.parametrize("inline", [False, True])
def test_a_reader_that_falls_behind(server: Server, inline: bool) -> None:
    """What waits becomes one output. The first ones, that nobody has read, know of no result."""
    server.here.gate.clear()
    params = asking("here", kind=DELTA, max_tokens=20)
    if not inline:
        params.capture = {n: r for n, r in params.capture.items() if n != "inline"}

    async def run() -> list[Any]:
        prompt = TokensPrompt(prompt_token_ids=PROMPT)
        stream = server.engine.generate(prompt, params, f"behind {inline}")
        outputs = [await anext(stream)]
        await server.until_held()
        server.here.gate.set()
        while server.engine.output_processor.captures.num_held:
            await asyncio.sleep(0.01)
        assert "here" not in (outputs[0].outputs[0].capture_results or {})
        return outputs + [output async for output in stream]

    outputs = server.run(run())
    assert len(outputs) == 2
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 20
    results = outputs[-1].capture_results
    assert results["here"].status == "ok"
    if inline:
        rows = [o.capture_results["inline"].payload["post_block", 1].positions for o in outputs]
        assert sum(map(len, rows)) == len(PROMPT) + 19


def test_every_completion_of_a_stream_ends(server: Server) -> None:
    params = asking("core", "here", kind=DELTA, n=3, temperature=1.0, seed=5)
    params.capture = {n: r for n, r in params.capture.items() if n != "inline"}
    outputs = server.run(server.stream("several", params))
    ended = [c for o in outputs for c in o.outputs if c.finished()]
    assert sorted(c.index for c in ended) == [0, 1, 2]
    for completion in ended:
        for name in ("core", "here"):
            payload = completion.capture_results[name].payload
            assert (payload["sample"], payload["num_samples"]) == (completion.index, 3)
    assert outputs[-1].finished


def test_an_idle_engine_delivers(server: Server) -> None:
    """The result comes when no step runs any more, and the output not before."""
    server.here.gate.clear()

    async def run() -> list[Any]:
        task = asyncio.create_task(server.stream("idle", asking("here", kind=FINAL)))
        await server.until_held()
        await asyncio.sleep(0.2)
        assert not task.done()
        server.here.gate.set()
        return await task

    [output] = server.run(run())
    assert_same_rows(output.capture_results, "here")


def test_an_abort_of_a_held_output_gives_one_output(server: Server) -> None:
    server.here.gate.clear()

    async def run() -> list[Any]:
        task = asyncio.create_task(server.stream("held", asking("here", kind=DELTA)))
        await server.until_held()
        await server.engine.abort("held")
        server.here.gate.set()
        return await task

    outputs = server.run(run())
    assert [o.finished for o in outputs].count(True) == 1
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].capture_results["here"].status == "ok"


def test_a_client_that_goes_away(server: Server) -> None:
    async def run(name: str) -> None:
        params = asking("core", "here", kind=DELTA, max_tokens=23)
        prompt = TokensPrompt(prompt_token_ids=PROMPT)
        async for _ in server.engine.generate(prompt, params, name):
            break
        # All that it held is free again, or this one could not start.
        await server.stream(f"next {name}", asking("core", "here", kind=FINAL, max_tokens=23))

    # On a busy machine one may be through before its client has read anything.
    for attempt in range(20):
        server.run(run(name := f"gone {attempt}"))
        if ("aborted", name) in server.here.seen:
            return
    raise AssertionError("none was aborted")


def test_a_request_waits_for_room(server: Server) -> None:
    """Policy "block": two that fit one after the other; one that captures nothing passes them."""
    server.here.gate.clear()

    async def run() -> tuple[list[Any], list[Any], list[Any]]:
        big = asking("here", kind=FINAL, max_tokens=20)
        first = asyncio.create_task(server.stream("first", big))
        await server.until_held()
        second = asyncio.create_task(server.stream("second", big))
        plain = SamplingParams(max_tokens=9, detokenize=False, output_kind=FINAL)
        passed = await server.stream("plain", plain)
        assert not second.done()
        assert server.engine.output_processor.captures.num_held == 1
        server.here.gate.set()
        return await first, await second, passed

    first, second, passed = server.run(run())
    for [output] in (first, second):
        assert_same_rows(output.capture_results, "here")
    assert passed[0].capture_results is None


def test_what_can_never_fit_is_refused(server: Server) -> None:
    rows = NUM_SITES * (len(PROMPT) + 29)
    message = rf"capture\.core: up to {rows} rows are {rows * ROW_BYTES} bytes"
    with pytest.raises(ValueError, match=message):
        server.run(server.stream("large", asking("core", kind=FINAL, max_tokens=30)))


def test_policy_drop(tiny_models: TinyModels) -> None:
    """The request runs, and its result counts the rows that nobody got."""
    for server in start(tiny_models, capture_overload_policy="drop"):
        server.here.gate.clear()

        async def run(server: Server = server) -> tuple[list[Any], list[Any]]:
            big = asking("here", kind=FINAL, max_tokens=20)
            first = asyncio.create_task(server.stream("first", big))
            await server.until_held()
            second = await server.stream("second", big)
            server.here.gate.set()
            return await first, second

        [first], [second] = server.run(run())
        assert_same_rows(first.capture_results, "here")
        assert second.capture_results["inline"].status == "ok"
        result = second.capture_results["here"]
        assert (result.status, result.payload) == ("error", None)
        assert f"{NUM_SITES * (len(PROMPT) + 19)} rows were dropped" in result.error
        assert server.here.gate.wait(PATIENCE)
        assert threading.active_count() < 200


def test_who_waits_for_a_consumer_when_the_engine_is_shut_down_gets_an_error(
    tiny_models: TinyModels,
) -> None:
    """Twin: one that was answered before keeps its answer."""
    for server in start(tiny_models):
        assert server.run(server.stream("before", asking("here", kind=FINAL)))[-1].finished
        server.here.gate.clear()

        async def shut_down(server: Server = server) -> None:
            held = asyncio.create_task(server.stream("held", asking("here", kind=FINAL)))
            await server.until_held()
            await asyncio.get_running_loop().run_in_executor(None, server.engine.shutdown)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(held, PATIENCE)

        server.run(shut_down())
        server.here.gate.set()
