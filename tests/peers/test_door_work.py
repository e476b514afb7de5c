# SPDX-License-Identifier: Apache-2.0
"""What a door of `--compat` does with a costly body: nothing on the event loop that grows with it,
and nothing before it is counted.

Work is counted, not timed: lines that the thread of the event loop runs, calls, and the most memory
that is held. Each costly body has a twin that is legal.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import tracemalloc
from collections.abc import AsyncGenerator
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import HIDDEN, VECTOR, config_of
from vllm import SamplingParams
from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.steering import capture_results, serving
from vllm.v1.capture.results import CapturedRows, CaptureResult
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.compat import lens, wire
from vllm.v1.interventions.frontend.compat.doors import (
    DOORS,
    EASYSTEER,
    LENS,
    is_asked,
    read_args,
    read_fields,
)
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.plan_threads import PlanThreads
from vllm.v1.interventions.plan import PLAN_FIELDS
from vllm.v1.interventions.shape import LayerShape, TapShape

zstandard = pytest.importorskip("zstandard")

pytestmark = pytest.mark.quick

CONFIG = config_of(compat=[LENS, EASYSTEER])
WIDE = config_of(
    TapShape(hidden_size=2048, dtype="bfloat16", layers={0: LayerShape(STREAM_POINTS)}),
    compat=[LENS, EASYSTEER],
)
ROW_BYTES = 4 * 2048
STEER = "vllm_xargs.apply_steering_vectors"


def spec(*vectors: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A body in EasySteer's words."""
    given = [{"data": VECTOR, "layers": [1], **vector} for vector in vectors]
    return {"steering": {"vectors": given, "conflict": "priority", **more}}


def told(activations: Any, **more: Any) -> dict[str, Any]:
    """A body in vLLM-Lens's words."""
    entry = {"activations": activations, "layer_indices": [0], **more}
    return {"vllm_xargs": {"apply_steering_vectors": json.dumps([entry])}}


def ones(rows: int) -> dict[str, Any]:
    """[1, rows, 2048] of bfloat16 ones, compressed: at most 30 kB."""
    frames = zstandard.ZstdCompressor(level=1)
    raw = frames.compress(torch.ones(rows, 2048, dtype=torch.bfloat16).view(torch.uint8).numpy())
    return {
        "data": base64.b64encode(raw).decode(),
        "dtype": "int16",
        "original_dtype": "torch.bfloat16",
        "shape": [1, rows, 2048],
        "compression": "zstd",
    }


class Lines:
    """Counts the lines of Python that this thread runs while it is entered."""

    def __enter__(self) -> Lines:
        self.count = 0
        sys.settrace(self._line)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self._line


def intervene(fields: dict[str, Any]) -> tuple[int, SamplingParams | str]:
    """What becomes of a body, and how many lines the event loop ran for it."""
    fields = {**fields}
    args = fields.pop("vllm_xargs", None)
    params = SamplingParams(extra_args=args)
    threads = PlanThreads(lambda *_: None, ModuleCatalog(CONFIG), lambda params: False)

    async def refresh() -> None:
        pass

    engine = SimpleNamespace(
        vllm_config=CONFIG,
        input_processor=SimpleNamespace(
            plan_threads=threads, renderer=SimpleNamespace(mm_processor_cache=None)
        ),
        steering=SimpleNamespace(refresh=refresh),
    )
    server: Any = SimpleNamespace(engine_client=engine, request_logger=None)
    body = CompletionRequest.model_construct(stream=False, vllm_xargs=args, **fields)

    async def run() -> tuple[int, SamplingParams | str]:
        with Lines() as lines:
            try:
                await serving.intervene(server, body, "0", params, {})  # type: ignore[arg-type]
            except InterventionError as error:
                return lines.count, str(error)
        return lines.count, params

    return asyncio.run(run())


def wire_form(rows: int) -> dict[str, Any]:
    return wire.encoded(torch.ones(1, rows, HIDDEN))


BODIES: dict[str, Any] = {
    "tokens": lambda n: spec({"apply": {"prompt_tokens": [*range(n)]}}),
    "positions": lambda n: spec({"apply": {"prompt_positions": [*range(n)]}}, {}),
    "vectors": lambda n: spec(*[{} for _ in range(n)]),
    "data": lambda n: spec({"data": {str(i): VECTOR for i in range(n)}}),
    "layers": lambda n: spec({"layers": [1] * n}),
    "keys": lambda n: spec({str(i): 0 for i in range(n)}),
    "lens": lambda n: told(wire_form(n)),
    "lens, text": lambda n: {"vllm_xargs": {"output_residual_stream": f"[{'0,' * n}0]"}},
    "lens, list": lambda n: {"vllm_xargs": {"output_residual_stream": [0] * n}},
    "another tool's operations": lambda n: {"steering": [{"op": "add"}] * n + [{"scope": 1}]},
    "operations": lambda n: {"steering": [{}] * n},
    "rules": lambda n: {"rules": [{}] * n},
    "captures": lambda n: {"capture": {"inline": [{}] * n}},
}
"""Name -> makes a body that has `n` of something."""


@pytest.mark.parametrize("name", BODIES)
def test_the_event_loop_does_as_much_for_a_large_body_as_for_a_small_one(name: str) -> None:
    """Twenty thousand entries, or ten: whether they are refused or not, a thread looks at them."""
    intervene(BODIES[name](2))  # a first time, for what is made once
    small, _ = intervene(BODIES[name](10))
    large, _ = intervene(BODIES[name](20_000))
    assert large < small + 1000, (small, large)


def test_lines_of_the_event_loop_are_counted() -> None:
    """The twin: the same work, in the thread that is counted."""
    with Lines() as lines:
        read_fields(BODIES["positions"](20_000), CONFIG)
        read_fields(BODIES["layers"](20_000), CONFIG)
    assert lines.count > 20_000


class Cost:
    """What a body comes to, or its error; the most bytes that were held meanwhile."""

    def __init__(self, fields: dict[str, Any], num_prompts: int = 1) -> None:
        self.error = ""
        self.fields: dict[str, Any] = {}
        params = SamplingParams(extra_args=fields.get("vllm_xargs"))
        tracemalloc.start()
        try:
            if "steering" in fields:
                self.fields = {**read_fields(fields, WIDE, num_prompts)}
            else:
                opened = read_args(params, WIDE, "vllm_xargs.", num_prompts)
                self.fields = {name: getattr(opened, name) for name in PLAN_FIELDS}
        except InterventionError as error:
            self.error = str(error)
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def test_rows_are_counted_before_they_are_unpacked() -> None:
    """65,536 rows of 30 kB are refused; 1,000 are not, and take what they are in float32 and in the
    dtype that they came in, beside what one row takes."""
    for rows in (1 << 16, 1 << 15):
        hostile = Cost(told(ones(rows)))
        assert f"{STEER}[0].activations: takes the request past max_request_work" in hostile.error
        assert hostile.peak < 1 << 20
    legal = Cost(told(ones(1000)))
    [op] = legal.fields["steering"]
    assert op["values"].shape == (1000, 2048) and op["values"].dtype == np.float32
    assert (op["values"] == 1).all()
    assert legal.peak < 3 * 1000 * ROW_BYTES
    assert not Cost(told(ones(1000)), num_prompts=8).error
    many = Cost(told(ones(1000)), num_prompts=64)
    assert "takes the request past max_request_work" in many.error and many.peak < 1 << 20


def test_prompts_of_one_specification_have_one_budget() -> None:
    """Also where the parameters have it, and not the body."""
    params = SamplingParams()
    params.steering = spec({"apply": {"prompt_positions": [*range(20_000)]}})["steering"]
    assert read_args(params, WIDE, num_prompts=8).steering
    with pytest.raises(InterventionError, match="past max_request_work"):
        read_args(params, WIDE, num_prompts=1000)


def test_text_is_counted_before_it_is_read() -> None:
    costly = {"vllm_xargs": {"apply_steering_vectors": f"[{'[],' * 600_000}[]]"}}
    refused = Cost(costly)
    assert refused.error.startswith(f"{STEER}: takes the request past max_request_work")
    assert refused.peak < 1 << 20
    read = Cost({"vllm_xargs": {"apply_steering_vectors": f"[{'[],' * 60_000}[]]"}})
    assert read.error.startswith(f"{STEER}[0]: lacks")
    assert read.peak > 2 << 20


def test_selectors_are_counted_before_they_are_made() -> None:
    """Tokens become a selector each, and `priority` takes those of all vectors before."""
    many = [*range(200_000)]
    costly = {
        "apply.prompt_tokens": spec({"apply": {"prompt_tokens": many}}),
        "apply.exclude_prompt_positions": spec({"apply": {"exclude_prompt_positions": many * 3}}),
        "layers": spec({"layers": many * 3}),
        "data": spec({"data": dict.fromkeys(range(1 << 20), VECTOR)}),
    }
    for field, body in costly.items():
        refused = Cost(body)
        path = f"steering.vectors[0].{field}"
        assert refused.error.startswith(f"{path}: takes the request past max_request_work")
        assert refused.peak < 1 << 20, field
    tokens = {"apply": {"prompt_tokens": [*range(1000)]}}
    assert len(Cost(spec(tokens)).fields["steering"][0]["positions"]) == 1001
    assert not Cost(spec(*[tokens] * 8)).error
    refused = Cost(spec(*[tokens] * 32))
    assert "takes the request past max_request_work" in refused.error
    assert refused.peak < 32 << 20


class Layer(int):
    """A number that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Layer.compared += 1
        return int(self) == other


def test_layers_of_data_are_looked_up_once() -> None:
    """As many layers as there are vectors: not each beside each."""
    n = 1000
    by_layer = {str(i): VECTOR for i in range(n)}
    Layer.compared = 0
    made = read_fields(spec({"layers": [*map(Layer, range(n))], "data": by_layer}), CONFIG)
    assert len(made["steering"]) == n and Layer.compared < 3 * n
    one = read_fields(spec({"layers": [1], "data": by_layer}), CONFIG)
    assert [op["layers"] for op in one["steering"]] == [[1]]


@pytest.mark.parametrize(
    ("fields", "in_thread"),
    [
        ({"extra_args": {"output_residual_stream": [0]}}, True),
        ({"steering": {"vectors": []}}, True),
        ({"steering": []}, True),
        ({"extra_args": {"kv_transfer_params": {}}}, False),
        ({}, False),
    ],
)
def test_other_callers_of_an_engine_have_it_done_in_a_thread_too(
    fields: dict[str, Any], in_thread: bool
) -> None:
    """Endpoints that know nothing of doors, and `AsyncLLM`."""
    threads = PlanThreads(
        lambda *_, **__: threading.get_ident(),
        ModuleCatalog(CONFIG),
        lambda params: is_asked(params, CONFIG),
    )
    params = SamplingParams(**fields)
    did = asyncio.run(threads.process_inputs("0", "x", params))
    assert (did != threading.get_ident()) == in_thread


def test_a_stream_is_put_together_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as the server writes them, the last one without rows."""
    did: list[int] = []
    encoded = wire.encoded

    def noted(tensor: torch.Tensor) -> dict[str, Any]:
        did.append(threading.get_ident())
        return encoded(tensor)

    monkeypatch.setattr(lens, "encoded", noted)
    request: Any = SimpleNamespace(vllm_xargs={"output_residual_stream": "[1]"})

    def events(rows: torch.Tensor) -> AsyncGenerator[str, None]:
        async def chunks() -> AsyncGenerator[str, None]:
            for first in range(0, len(rows) + 2, 2):
                part = rows[first : first + 2]
                captured = CapturedRows(
                    positions=np.arange(first, first + len(part)),
                    token_ids=np.ones(len(part), np.int64),
                    versions=np.ones(len(part), np.int64),
                    values=part,
                )
                result = CaptureResult("ok", None, {("post_block", 1): captured})
                shown = capture_results.ShownResults({"inline": result}, True)
                choice = {"index": 0, "capture_results": shown.model_dump()}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield 'data: {"error": {}}\n\n'
            yield "data: [DONE]\n\n"

        return capture_results.streamed(chunks(), request)

    async def gathered(rows: torch.Tensor) -> list[str]:
        return [event async for event in events(rows)]

    rows = torch.randn(5, 8).bfloat16()
    said = asyncio.run(gathered(rows))
    assert said[-1] == "data: [DONE]\n\n" and len(said) == 7
    last = json.loads(said[-2].removeprefix("data: "))
    assert torch.equal(wire.decoded(last["activations"]["residual_stream"], "x")[0], rows)
    assert did and threading.get_ident() not in did


def test_a_door_says_all_that_it_reads() -> None:
    """`Door.reads` has what errors call the fields."""
    fields = {"steering", "steering[]", "vllm_xargs", "capture"}
    for name, door in DOORS.items():
        assert len(door.reads) == len(set(door.reads)) >= 5, name
        assert {path.split(".")[0] for path in door.reads} <= fields
