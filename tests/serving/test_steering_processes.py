# SPDX-License-Identifier: Apache-2.0
"""Global tiers and modules of an engine core in a process of its own: `await engine.steering...`
while answers stream, and from several callers at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.conformance.engine import MAX_MODEL_LEN
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE
from tests.serving.test_processes import Server, judge_of
from tests.support import serving
from tests.support.consumers import PATIENCE
from tests.support.serving import Ask, Judge, capture, deltas_of, prompt_of, vector
from tests.support.timeline import Globals, added
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import input_processor
from vllm.v1.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = prompt_of(41, 800)
A = {"post_block": {1: vector(800)}}
B = {"pre_attn": {2: vector(801)}}
FINAL = RequestOutputKind.FINAL_ONLY


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
                max_num_seqs=4,
                kv_cache_memory_bytes=16 << 20,
                block_size=32,
                skip_tokenizer_init=True,
                max_logprobs=-1,
                enable_steering=True,
                capture_consumers=["inline"],
                enable_prefix_caching=True,
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


def check(judge: Judge, known: Globals, ask: Ask, output: Any) -> list[int]:
    """The rows are those of the versions they report. Returns the positions where it changes."""
    (completion,) = output.outputs
    sequence = [*ask.prompt, *completion.token_ids][:-1]
    payload = completion.capture_results["inline"].payload
    versions = next(iter(payload.values())).versions.tolist()
    assert len(versions) == len(sequence)
    index = {state.version: i for i, state in enumerate(known.states)}
    states = [index[version] for version in versions]
    assert states == sorted(states)
    deltas = added(known.deltas(states, len(ask.prompt)), deltas_of(ask, len(sequence)))
    want = judge.reference.run(sequence, deltas).rows
    for site, rows in payload.items():
        assert rows.versions.tolist() == versions
        assert serving.worst_row(rows.values, want[site]) <= READ_TOLERANCE, site
    return [p for p in range(1, len(states)) if states[p] != states[p - 1]]


def test_changes_while_answers_stream(server: Server, judge: Judge) -> None:
    """Every row is right under the version it reports, wherever a change falls in the answer; and
    in one of some attempts it falls there: the engine does not wait for this process."""
    steering, known = server.engine.steering, Globals()
    known.clear(server.run(steering.clear()))
    ask = Ask(PROMPT, {"max_tokens": 50, **capture("all")})
    steered = Ask(PROMPT, {**ask.fields, "decode_steering_vectors": B})

    async def changing(name: str) -> Any:
        params = ask.params(log_probs=False)
        params.output_kind = RequestOutputKind.CUMULATIVE
        outputs: list[Any] = []
        async for output in server.engine.generate({"prompt_token_ids": PROMPT}, params, name):
            outputs.append(output)
            if len(outputs) == 1:
                known.set(await steering.set(A), {"base": A})
            elif len(outputs) == 2:
                known.set(await steering.set(B, tier="decode"), {"decode": B})
        known.clear(await steering.clear())
        return outputs[-1]

    async def together(attempt: int) -> Any:
        other = server.stream(f"other-{attempt}", steered, FINAL)
        return await asyncio.gather(changing(f"first-{attempt}"), other)

    for attempt in range(20):
        output, (other,) = server.run(together(attempt))
        ends = check(judge, known, ask, output)
        assert all(end >= len(PROMPT) for end in ends)
        check(judge, known, steered, other)
        if ends:
            break
    else:
        raise AssertionError("no change ever fell into an answer")
    state = server.run(steering.state())
    assert state["version"] == known.states[-1].version and not state["tiers"]


def test_hashed_in_the_input_thread(server: Server, judge: Judge) -> None:
    """Requests and changes race; a block is never one of other tiers, a hit never lost for good."""
    steering, known = server.engine.steering, Globals()
    version = server.run(steering.clear())
    known.clear(version)

    async def racing() -> list[tuple[Ask, Any]]:
        ask = Ask(PROMPT, {"max_tokens": 4, **capture([-1, 41, 42])})
        asks = []
        for i in range(8):
            tiers = {"base": A if i % 2 else B}
            sent = asyncio.gather(*(server.stream(f"race-{i}-{n}", ask, FINAL) for n in range(3)))
            await asyncio.sleep(0)
            known.set(await steering.set_tiers(tiers, replace=True), tiers, replace=True)
            asks += [(ask, output) for (output,) in await sent]
        return asks

    answers = server.run(racing())
    index = {state.version: i for i, state in enumerate(known.states)}
    for ask, output in answers:
        (completion,) = output.outputs
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        payload = completion.capture_results["inline"].payload
        versions = next(iter(payload.values())).versions.tolist()
        # The prompt runs in one step, or comes from the cache: all of it under one version.
        states = [index[v] for v in [*[versions[0]] * len(PROMPT), *versions[1:]]]
        states += [states[-1]] * (len(sequence) - len(states))
        want = judge.reference.run(sequence, known.deltas(states, len(PROMPT))).rows
        for site, rows in payload.items():
            at = rows.positions.tolist()
            assert serving.worst_row(rows.values, want[site][at]) <= READ_TOLERANCE, site
    assert sum(output.num_cached_tokens > 0 for _, output in answers) >= 8
    server.run(steering.clear())


def test_many_callers(server: Server) -> None:
    """Each change is made once, in some order; a bad one changes nothing."""
    steering = server.engine.steering

    async def all_at_once() -> list[Any]:
        changes = [steering.set({"post_block": {i % 4: vector(810 + i)}}) for i in range(8)]
        bad = steering.set({"post_block": {9: vector(1)}})
        return await asyncio.gather(*changes, bad, return_exceptions=True)

    before = server.run(steering.state())["version"]
    *versions, refused = server.run(all_at_once())
    assert isinstance(refused, ValueError)
    assert sorted(versions) == list(range(before + 1, before + 9))
    state = server.run(steering.state())
    assert state["version"] == before + 8
    assert state["tiers"]["base"]["norms"]["post_block"].keys() == {0, 1, 2, 3}
    server.run(steering.clear())


def test_modules(server: Server, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request on its way keeps what its module meant when it came; much later it is an error of
    that request alone."""
    steering, core = server.engine.steering, server.engine.engine_core
    ask = Ask(PROMPT, {"steering_modules": [("mood", 0.5)], **capture("all")})
    meant = {
        name: Ask(PROMPT, {"steering_vectors": {p: {n: 0.5 * v for n, v in at.items()}}})
        for name, (p, at) in {"a": next(iter(A.items())), "b": next(iter(B.items()))}.items()
    }

    def check_meaning(output: Any, name: str) -> None:
        sequence = [*PROMPT, *output.outputs[0].token_ids][:-1]
        want, other = (
            judge.reference.run(sequence, deltas_of(meant[n], len(sequence))).rows
            for n in (name, "a" if name == "b" else "b")
        )
        rows = serving.row_tensors(output.outputs[0])
        assert max(serving.worst_row(rows[s], want[s]) for s in rows) <= READ_TOLERANCE
        assert max(serving.relative(other[s], want[s]) for s in rows) >= LEAST_MOVE

    send, on_its_way = core.add_request_async, asyncio.Event()

    async def told(request: Any) -> None:
        await send(request)
        on_its_way.set()

    async def re_registered() -> Any:
        await steering.register_module("mood", A)
        sent = asyncio.ensure_future(server.stream("early", ask, FINAL))
        await on_its_way.wait()
        await steering.register_module("mood", B)
        return (await sent)[0], (await server.stream("late", ask, FINAL))[0]

    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request_async", told)
        early, late = server.run(re_registered())
    check_meaning(early, "a")
    check_meaning(late, "b")
    with pytest.raises(ValueError, match=r"steering_modules\[0\]: unknown module 'none'"):
        server.run(server.stream("none", Ask(PROMPT, {"steering_modules": ["none"]}), FINAL))

    async def too_late(request: Any) -> None:
        await steering.unregister_module("mood")
        await send(request)

    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request_async", too_late)
        (gone,) = server.run(server.stream("gone", ask, FINAL))
    check_meaning(gone, "b")

    async def unheard_of(request: Any) -> None:
        shared = request.plan.steering
        sums = [msgspec.structs.replace(c, sets=[("0" * 64, 1.0)]) for c in shared.sums]
        shared = msgspec.structs.replace(shared, sums=sums)
        request.plan = msgspec.structs.replace(request.plan, steering=shared)
        await send(request)

    server.run(steering.register_module("mood", A))
    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request_async", unheard_of)
        outcome = server.run(outcome_of(server, ask))
    assert "error" in outcome.lower(), outcome
    (after,) = server.run(server.stream("after", ask, FINAL))
    check_meaning(after, "a")


async def outcome_of(server: Server, ask: Ask) -> str:
    """How a request ends: the reason of its end, or the exception."""
    try:
        outputs = await server.stream("gone", ask, FINAL)
    except Exception as error:
        return repr(error)
    return str(outputs[-1].outputs[0].finish_reason)


@pytest.mark.parametrize("hostile", [{"steering_vectors": A}, capture("all")])
def test_a_costly_request_is_worked_on_beside_the_event_loop(
    server: Server, hostile: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fields are not done before a plain request has its answer."""
    answered, in_time = threading.Event(), []
    resolve = input_processor.resolve

    def slow(params: Any, *rest: Any, **named: Any) -> Any:
        if params.steering_vectors is not None or params.capture is not None:
            in_time.append(answered.wait(PATIENCE))
        return resolve(params, *rest, **named)

    monkeypatch.setattr(input_processor, "resolve", slow)

    async def ask(name: str, fields: dict[str, Any]) -> Any:
        params = Ask(PROMPT, {"max_tokens": 2, **fields}).params(log_probs=False)
        params.output_kind = FINAL
        prompt: Any = {"type": "token", "prompt_token_ids": PROMPT}  # as the HTTP server has it
        return [output async for output in server.engine.generate(prompt, params, name)][-1]

    async def both() -> Any:
        costly = asyncio.create_task(ask("costly", hostile))
        await asyncio.sleep(0)
        plain = await ask("plain", {})
        answered.set()
        return plain, await costly

    plain, costly = server.run(both())
    assert in_time == [True]
    assert plain.finished and costly.finished
    wrong = {"steering_vectors": {"post_block": {99: vector(800)}}}
    with pytest.raises(ValueError, match="layer 99"):
        server.run(ask("wrong", wrong))
