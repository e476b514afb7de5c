# SPDX-License-Identifier: Apache-2.0
"""The engine core in a process of its own: plans and rows cross by message, outputs stream."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from tests.conformance import models
from tests.conformance.engine import MAX_MODEL_LEN, make_llm
from tests.conformance.runner import READ_TOLERANCE, Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    ConsumerContext,
    Location,
    RequestInfo,
)
from vllm.v1.capture.transport.landing import ReceivedPlaces
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

PROMPT, LONG = prompt_of(17, 120), prompt_of(41, 121)
STEERED = {"steering_vectors": {"post_attn": {1: vector(120)}}}
DECODE = {"decode_steering_vectors": {"post_block": {2: vector(121)}}}


def judge_of(tiny_models: TinyModels) -> Judge:
    row = tiny_models.row("llama")
    return Judge(Reference(row, models.load(row, tiny_models.path("llama"))))


@dataclass(frozen=True)
class Server:
    """An `AsyncLLM` and the loop it lives in."""

    engine: AsyncLLM
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 300))

    async def stream(
        self, name: str, ask: Ask, kind: RequestOutputKind, late: bool = False
    ) -> list[Any]:
        """All outputs of one request; `late`: nobody reads the second before the last is there."""
        params = ask.params()
        params.output_kind = kind
        outputs = []
        async for output in self.engine.generate({"prompt_token_ids": ask.prompt}, params, name):
            outputs.append(output)
            # A cumulative output's list of tokens is upstream's own, which goes on growing.
            output.outputs[0].token_ids = list(output.outputs[0].token_ids)
            while late and self.engine.output_processor.has_unfinished_requests():
                await asyncio.sleep(0.01)
        return outputs

    def in_pieces(
        self, name: str, ask: Ask, kind: RequestOutputKind, least: int, late: bool = False
    ) -> list[Any]:
        """All outputs of one request that came in at least so many: on a busy machine a reader may
        be so late that they were merged, and then it is asked again."""
        for _ in range(20):
            outputs: list[Any] = self.run(self.stream(name, ask, kind, late))
            if len(outputs) >= least:
                return outputs
        raise AssertionError(f"never in {least} outputs")


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels) -> Iterator[Server]:
    loop = asyncio.new_event_loop()

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(tiny_models.path("llama")),
                enforce_eager=True,
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=8,
                max_num_batched_tokens=24,
                kv_cache_memory_bytes=16 << 20,
                block_size=32,
                skip_tokenizer_init=True,
                max_logprobs=-1,
                enable_steering=True,
                max_steering_configs=2,
                capture_consumers=["inline"],
                disable_log_stats=True,
            )
        )

    engine = loop.run_until_complete(start())
    yield Server(engine, loop)
    engine.shutdown()
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()


@pytest.fixture(scope="module")
def judge(tiny_models: TinyModels) -> Judge:
    return judge_of(tiny_models)


def rows_of(output: Any) -> Any:
    return output.outputs[0].capture_results["inline"].payload["post_block", 1]


@pytest.mark.parametrize("late", [False, True], ids=["prompt reader", "late reader"])
@pytest.mark.parametrize("positions", ["all", ["last_prompt", 19, "last_generated"]], ids=str)
def test_delta(server: Server, judge: Judge, positions: Any, late: bool) -> None:
    """Each row once, in order, with the output that makes it known; also for deltas that were
    merged because nobody read them."""
    ask = Ask(LONG[:17], {"max_tokens": 12, **STEERED, **capture(positions)})
    outputs = server.in_pieces("delta", ask, RequestOutputKind.DELTA, 2 if late else 3, late)
    assert not late or len(outputs) == 2
    tokens = [t for output in outputs for t in output.outputs[0].token_ids]
    assert len(tokens) == 12
    sequence = [*ask.prompt, *tokens][:-1]
    got = [p for output in outputs for p in rows_of(output).positions.tolist()]
    assert got == serving.expected_positions(positions, 17, 12)
    expected = judge.reference.run(sequence, serving.deltas_of(ask, len(sequence))).rows
    seen = len(ask.prompt)
    for output in outputs:
        seen += len(output.outputs[0].token_ids)
        for site, rows in output.outputs[0].capture_results["inline"].payload.items():
            at = rows.positions.tolist()
            assert all(p < seen - 1 for p in at)
            assert rows.token_ids.tolist() == [sequence[p] for p in at]
            assert serving.worst_row(rows.values, expected[site][at]) <= READ_TOLERANCE
    assert outputs[-1].outputs[0].capture_results["inline"].status == "ok"


def test_cumulative(server: Server, judge: Judge) -> None:
    """Every output has all rows so far, and the last is judged like any."""
    ask = Ask(PROMPT, {**DECODE, **capture("all")})
    outputs = server.in_pieces("cumulative", ask, RequestOutputKind.CUMULATIVE, least=2)
    for output in outputs:
        known = len(PROMPT) + len(output.outputs[0].token_ids) - 1
        assert rows_of(output).positions.tolist() == list(range(known))
    judge.check(ask, outputs[-1])


def test_many_at_once(server: Server, judge: Judge) -> None:
    """Chunked prompts, more contents than slots, several kinds of request."""
    fields: list[dict[str, Any]] = [
        {**STEERED, **capture("all")},
        {},
        {**DECODE, **capture("predicting")},
        {"steering_vectors": {"pre_attn": {0: vector(122)}}, **capture("last_generated")},
        capture([0, 7, 23, 24, 40]),
        STEERED,
    ]
    asks = [Ask(LONG, f) for f in fields]

    async def together() -> list[Any]:
        final = RequestOutputKind.FINAL_ONLY
        streams = [server.stream(f"many-{i}", ask, final) for i, ask in enumerate(asks)]
        return list(await asyncio.gather(*streams))

    for ask, outputs in zip(asks, server.run(together()), strict=True):
        assert len(outputs) == 1
        judge.check(ask, outputs[0])


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE], ids=str)
def test_abort(server: Server, judge: Judge, kind: RequestOutputKind) -> None:
    """The last output of an aborted request says what is there; others go on; slots are free."""
    long = Ask(PROMPT, {"max_tokens": 70, **STEERED, **capture("all")})
    other = Ask(LONG, {"max_tokens": 20, **DECODE, **capture("all")})

    async def aborted() -> list[Any]:
        params = long.params()
        params.output_kind = kind
        outputs = []
        async for output in server.engine.generate({"prompt_token_ids": PROMPT}, params, "long"):
            outputs.append(output)
            if len(outputs) == 5 and not output.finished:
                stopped.append(output)
                await server.engine.abort("long")
        return outputs

    async def together() -> Any:
        final = RequestOutputKind.FINAL_ONLY
        return await asyncio.gather(aborted(), server.stream("other", other, final))

    # Whoever reads late finds outputs merged, and may find the last before it can abort.
    for _ in range(20):
        stopped: list[Any] = []
        outputs, (finished,) = server.run(together())
        judge.check(other, finished)
        if stopped:
            break
    last = outputs[-1].outputs[0]
    assert last.finish_reason == "abort"
    assert last.capture_results["inline"].status == "ok"
    if kind == RequestOutputKind.DELTA:
        tokens = [t for output in outputs for t in output.outputs[0].token_ids]
        got = [p for output in outputs for p in rows_of(output).positions.tolist()]
    else:
        tokens, got = list(last.token_ids), rows_of(outputs[-1]).positions.tolist()
    assert 5 <= len(tokens) < 70
    assert got == list(range(len(PROMPT) + len(tokens) - 1))
    ask = Ask(PROMPT, {"steering_vectors": {"pre_attn": {1: vector(123)}}, **capture("all")})
    (after,) = server.run(server.stream("after", ask, RequestOutputKind.FINAL_ONLY))
    judge.check(ask, after)


def test_errors_reach_the_caller_and_nobody_else(server: Server, judge: Judge) -> None:
    """A bad request is refused before it is sent; the engine serves on."""
    final = RequestOutputKind.FINAL_ONLY
    for number, fields in enumerate(
        (
            {"steering_vectors": {"post_block": {99: vector(1)}}},
            {"steering_vectors": {"post_block": {1: vector(1)[:-1]}}},
            capture([200]),
        )
    ):
        with pytest.raises(ValueError, match=r"^(steering_vectors|capture)\."):
            server.run(server.stream(f"bad-{number}", Ask(PROMPT, fields), final))
    ask = Ask(PROMPT, {**STEERED, **capture("all")})
    (output,) = server.run(server.stream("good", ask, final))
    judge.check(ask, output)


class Unready(CaptureConsumer):
    location: ClassVar[Location] = "engine"

    def start(self, context: ConsumerContext) -> None:
        raise OSError("no disk for this consumer")

    def open(self, request: RequestInfo) -> CaptureSession:
        raise AssertionError("opened")


@pytest.mark.v2("long")
def test_the_last_exception_says_why_the_engine_core_did_not_start(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(RuntimeError, match="failed: OSError: no disk for this consumer"):
        make_llm(tiny_models.path("llama"), capture_consumers=[{"consumer": Unready}])


@pytest.mark.v2("long")
def test_the_last_exception_says_why_a_worker_did_not_start(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of an engine core that has workers of its own, in processes."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    model = tmp_path / "model"
    shutil.copytree(tiny_models.path("llama"), model)
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    with pytest.raises(RuntimeError, match=r"failed: RuntimeError: worker did not start: .*eader"):
        make_llm(model, distributed_executor_backend="mp")


def test_what_can_be_seen_early_is_refused_before_there_is_an_engine_core(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[object] = []
    monkeypatch.setattr(core_client.EngineCoreClient, "make_client", made.append)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="'filesystem' cannot be made: NotADirectoryError"):
        consumers = [f"filesystem:root={tmp_path}/file/a"]
        make_llm(tiny_models.path("llama"), capture_consumers=consumers)
    assert not made


@pytest.mark.long  # the asynchronous one, below, has an engine already
def test_a_request_that_cannot_be_sent_fails_alone(
    tiny_models: TinyModels, judge: Judge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody waits for it, with consumers or several completions either; one that can be sent is
    served before and after."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    consumers = ["inline", f"filesystem:root={tmp_path}"]
    llm = make_llm(tiny_models.path("llama"), capture_consumers=consumers)
    files = {"capture": {"filesystem": {"hooks": {"post_block": [0]}}}}
    several = {"n": 2, "temperature": 1.0}
    try:
        for fields in ({}, several, files, several | files):
            asks = [Ask(PROMPT, fields | {"extra_args": {"a": 1}})]
            serve(llm, asks)
            asks += [Ask(PROMPT, fields | {"extra_args": {"a": object()}})]
            with pytest.raises(TypeError, match="is not serializable"):
                serve(llm, asks)
            processor = llm.llm_engine.output_processor
            assert not (processor.request_states or processor.parent_requests)
            ask = Ask(PROMPT, capture("all"))
            judge.check(ask, serve(llm, [ask])[0])
    finally:
        llm.llm_engine.engine_core.shutdown()
        gc.collect()


def test_an_async_request_that_cannot_be_sent_fails_alone(server: Server, judge: Judge) -> None:
    final = RequestOutputKind.FINAL_ONLY
    for number, n in enumerate((1, 2)):
        several = {"n": n, "temperature": 1.0}
        bad = Ask(PROMPT, {**several, "extra_args": {"a": object()}, **capture("all")})
        with pytest.raises(EngineGenerateError):
            server.run(server.stream(f"unsent-{number}", bad, final))
        assert not server.engine.output_processor.has_unfinished_requests()
    ask = Ask(PROMPT, {"extra_args": {"a": 1}, **capture("all")})
    (output,) = server.run(server.stream("sent", ask, final))
    judge.check(ask, output)


@pytest.mark.parametrize(
    "landing", [None, *(pytest.param(size, marks=pytest.mark.long) for size in (100_000, 0))]
)
def test_offline(
    tiny_models: TinyModels, judge: Judge, monkeypatch: pytest.MonkeyPatch, landing: int | None
) -> None:
    """`LLM` with its engine core in another process, as it starts by default. Rows are read where
    they landed; those that find no place there come by the message."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    shared: list[int] = []

    class Counted(ReceivedPlaces):
        def __call__(self, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> Any:
            tensor = super().__call__(dtype, shape, meta)
            shared.append(tensor.nbytes)
            return tensor

    monkeypatch.setattr(core_client, "ReceivedPlaces", Counted)
    options = {"enable_steering": True, "capture_consumers": ["inline"]}
    options["capture_landing_bytes"] = landing
    llm = make_llm(tiny_models.path("llama"), max_num_batched_tokens=1024, **options)
    assert not hasattr(llm.llm_engine.engine_core, "engine_core"), "in this process"
    try:
        fields = [{**STEERED, **capture("all")}, {}, {**DECODE, **capture("predicting")}]
        asks = [Ask(LONG, f) for f in fields] + [Ask(PROMPT, capture("all"))]
        asks += [Ask(prompt_of(60, i), capture("all")) for i in range(12)]
        for ask, output in zip(asks, serve(llm, asks), strict=True):
            judge.check(ask, output)
        assert bool(shared) == (landing != 0)
    finally:
        llm.llm_engine.engine_core.shutdown()
        gc.collect()
