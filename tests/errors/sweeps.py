# SPDX-License-Identifier: Apache-2.0
"""What is refused of a sweep."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.errors.case import Case, path
from tests.support.plans import HIDDEN, config_of
from vllm.entrypoints.serve.steering.sweep_plan import Grid, SweepPlan
from vllm.entrypoints.serve.steering.sweep_request import parse_sweep
from vllm.entrypoints.serve.steering.sweep_router import _rendered
from vllm.entrypoints.serve.steering.sweep_run import _logprobs, _payload
from vllm.outputs import CompletionOutput
from vllm.v1.capture import CaptureResult

PROMPT = [100, 101, 102]
ABC: Any = SimpleNamespace(
    encode=lambda text, add_special_tokens: [100 + "abcde".index(c) for c in text],
    decode=lambda ids: "".join("abcde"[i - 100] for i in ids),
)
ASKED: dict[str, Any] = {"prompt": "abc", "clean": "bcd", "answer": "a", "other": "b"}
ADD: dict[str, Any] = {"clean": None, "op": {"op": "add", "vector": [1.0] * HIDDEN}}


def plan(ids: list[int] = PROMPT, mode: str = "raw_logprobs", **changed: Any) -> SweepPlan:
    config: Any = config_of(steering_families=["add", "replace"])
    config.model_config = SimpleNamespace(logprobs_mode=mode, get_vocab_size=lambda: 200)
    asked = {**ASKED, **changed}
    return parse_sweep(asked, PROMPT, ids if asked["clean"] else None, config, ABC)


def asked(ids: list[int] = PROMPT, **changed: Any) -> Any:
    return lambda: plan(ids, **changed)


def rendered(prompt: Any, model: Any = None, serving: Any = None) -> Any:
    """A prompt of a body, given to a server that serves nothing."""
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=20))
    state = SimpleNamespace(
        openai_serving_chat=serving,
        openai_serving_completion=serving,
        engine_client=SimpleNamespace(vllm_config=config),
    )
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
    body = {"prompt": prompt, "model": model}
    return lambda: asyncio.run(_rendered(request, body, "prompt"))


def ended(**fields: Any) -> CompletionOutput:
    return CompletionOutput(0, "", [], None, None, finish_reason="error", **fields)


async def _empty(request: object) -> list[dict[str, Any]]:
    return [{}]


EMPTY = SimpleNamespace(
    render_completion_request=_empty,
    _extract_prompt_components=lambda prompt: SimpleNamespace(token_ids=[]),
)

SWEEPS = [
    Case(path("prompt", "got 3"), do=rendered(3)),
    Case(path("prompt"), do=rendered([{"role": 3}], serving=EMPTY)),
    Case(path("prompt", "21", "20"), do=rendered([{}] * 21, serving=EMPTY)),
    Case(path("model", "3"), do=rendered("a", model=3)),
    Case(path("prompt"), do=rendered("a", serving=EMPTY)),
    Case(path("prompt", "chats"), do=rendered([{"role": "user"}])),
    Case(path("op.point", allowed="'points'"), do=asked(op={"op": "replace", "point": "q"})),
    Case(path("op.scale", allowed="'scales'"), do=asked(
        **{**ADD, "op": {**ADD["op"], "scale": 1.0}}, scales=[1.0])),
    Case(path("clean"), do=asked(clean=None)),
    Case(path("clean"), do=asked(op=ADD["op"])),
    Case(path("op.gate"), do=asked(op={"op": "replace", "gate": {}})),
    Case(path("clean", "2", "3"), do=asked([100, 101])),
    Case(path("align", "'start'"), do=asked(align="start")),
    Case(path("positions", "0", "1"), do=asked([100, 101], align="end", positions=[0, 2])),
    Case(path("positions"), do=asked(positions="all_generated")),
    Case(path("positions", "99999", "65536"), do=asked(
        **ADD, scales=[1.0] * 33333, layers=1, points=["post_block"])),
    Case(path("points"), do=asked(points=["post_block"] * 2)),
    Case(path("metric", "'odds'"), do=asked(metric="odds")),
    Case(path("metric", "raw_logits"), do=asked(mode="raw_logits")),
    Case(path("answer"), do=asked(answer=None)),
    Case(path("other"), do=asked(other=None, metric="diff")),
    Case(path("other"), do=asked(metric="logprob")),
    Case(path("metric"), do=asked(**ADD, metric="recovered")),
    Case(path("metric", "-1"), do=lambda: Grid(plan(metric="recovered"), -1.0, -1.0)),
    Case(path("other", "100"), do=asked(other=100)),
    Case(path("answer", "'ab'", size="2"), do=asked(answer="ab")),
    Case(path("answer", "list"), do=asked(answer=[1])),
    Case(path("other", "200", "200"), do=asked(other=200)),
    Case(path("scales", "1.0"), do=asked(**ADD, scales=1.0)),
    Case(path("scales", allowed="add, norm_match"), do=asked(scales=[1.0])),
    Case(path("scales"), do=asked(**ADD, scales=[1.0, 1])),
    Case(path("clean", reason="lost"), do=lambda: _payload(
        ended(capture_results={"inline": CaptureResult("error", error="lost", payload=None)}))),
    Case(path("prompt", "'error'"), do=lambda: _logprobs(ended())),
]  # fmt: skip
