# SPDX-License-Identifier: Apache-2.0
"""Keys of other tools offline: `LLM.generate`, `LLM.chat` and `AsyncLLM` refuse each by its name.

Over HTTP: `tests/http/test_peer_fields.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.engine import make_llm, shut_down
from tests.http.server import save_model
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.interventions.frontend.compat.peers import FIELDS, KNOWN
from vllm.v1.interventions.plan import PLAN_FIELDS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = "Today I went"
SAID: list[Any] = [{"role": "user", "content": PROMPT}]
SPEC: Any = {"vectors": []}
REFUSED: dict[str, dict[str, Any]] = {
    **{f"extra_args.{key}": {"extra_args": {key: [1]}} for key in (*KNOWN, *PLAN_FIELDS)},
    "steering": {"steering": SPEC},
}
"""Fields of `SamplingParams` by the path that the error names."""
NOTHING = SamplingParams(max_tokens=1, extra_args={"run_id": "a", **dict.fromkeys(KNOWN)})
"""What asks for nothing: the twin."""
ENGINE: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 96,
    "kv_cache_memory_bytes": 1 << 24, "disable_log_stats": True, "enable_steering": True,
}  # fmt: skip


def said(path: str) -> str:
    ours = path.removeprefix("extra_args.") in PLAN_FIELDS and path != "steering"
    return rf"^{path}: is not read here" if ours else rf"^{path}: is for .*coming-from\.md#"


def test_generate_and_chat(tiny_models: TinyModels, tmp_path: Any) -> None:
    llm = make_llm(
        save_model(tiny_models, tmp_path / "model"), enable_steering=True, skip_tokenizer_init=False
    )
    for path, fields in REFUSED.items():
        params = SamplingParams(max_tokens=1, **fields)
        with pytest.raises(ValueError, match=said(path)):
            llm.generate(PROMPT, params, use_tqdm=False)
        with pytest.raises(ValueError, match=said(path)):
            llm.chat(SAID, params, use_tqdm=False)
    assert llm.generate(PROMPT, NOTHING, use_tqdm=False)[0].finished
    assert llm.chat(SAID, NOTHING, use_tqdm=False)[0].finished
    shut_down(llm)


def test_an_engine_without_steering_and_capture_leaves_them_alone(
    tiny_models: TinyModels, tmp_path: Any
) -> None:
    """Its answers are those of a request without them, to the bit of a log-probability."""
    llm = make_llm(save_model(tiny_models, tmp_path / "model"), skip_tokenizer_init=False)
    asked = [
        SamplingParams(temperature=0, max_tokens=4, logprobs=2, extra_args=args)
        for args in (None, *({key: [1]} for key in (*KNOWN, *PLAN_FIELDS)))
    ]
    plain, *others = (
        [(step.text, step.token_ids, step.logprobs) for step in output.outputs]
        for params in asked
        for output in llm.generate(PROMPT, params, use_tqdm=False)
    )
    assert plain[0][2] and all(other == plain for other in others)
    shut_down(llm)


def test_async(tiny_models: TinyModels, tmp_path: Any) -> None:
    model = str(save_model(tiny_models, tmp_path / "model"))

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **ENGINE))
        try:
            for path, fields in REFUSED.items():
                params = SamplingParams(max_tokens=1, **fields)
                with pytest.raises(ValueError, match=said(path)):
                    async for _ in engine.generate(PROMPT, params, path):
                        pass
            outputs = [output async for output in engine.generate(PROMPT, NOTHING, "plain")]
            assert outputs[-1].finished
        finally:
            engine.shutdown()

    asyncio.run(run())


@pytest.mark.quick
@pytest.mark.parametrize("field", [*FIELDS, "capture_wait", "conversation_id"])
def test_fields_of_bodies_are_none_of_the_parameters(field: str) -> None:
    """Of the type itself, so by its name: by ours where a field is alike, else by Python's text."""
    given: dict[str, Any] = {field: "x"}
    with pytest.raises(TypeError, match=f"^{field}: is not a field of |'{field}'"):
        SamplingParams(**given)
