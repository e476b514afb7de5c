# SPDX-License-Identifier: Apache-2.0
"""The demo's engine, and texts with the rows of their tokens.

Everything here goes through the public interface (`LLM`, `SamplingParams`, `vllm.pilot`), as any
program would use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from vllm.pilot.bench import EngineBench, Steering

POINT = "post_block"
MAX_LENGTH = 256  # tokens of prompt and answer; every prompt of the demo is much shorter


def start(model: Path, dtype: Literal["auto", "float32"], heads: bool = False) -> EngineBench:
    """An engine on a directory in Hugging Face format; `heads`: attention can be captured, too."""
    from vllm import LLM

    return EngineBench(
        LLM(
            model=str(model),
            dtype=dtype,
            enable_steering=True,
            max_steering_configs=32,
            capture_consumers=["inline"],
            capture_points=[POINT, *(["q", "z"] if heads else [])],  # which weights need
            enforce_eager=True,  # compiling would take longer than the demo runs
            max_model_len=MAX_LENGTH,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=1 << 30,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
        )
    )


def close(bench: EngineBench) -> None:
    """Ends the engine and frees what it holds."""
    bench.llm.llm_engine.engine_core.shutdown()


def trace(
    bench: EngineBench,
    prompts: Sequence[str],
    steerings: Sequence[Steering | None],
    layer: int,
    tokens: int,
    temperature: float,
) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Answers of all prompts under all steerings, prompts slowest, in one call.

    Each is the prompt, the tokens of the answer, and float32 [answer - 1, hidden], `post_block` of
    `layer`. Row i has read token i of the answer; the last token is never fed back.
    """
    asked = [(i, p, s) for i, p in enumerate(prompts) for s in steerings]
    read = {"inline": {"hooks": {POINT: [layer]}, "positions": "all_generated"}}
    common = {"max_tokens": tokens, "temperature": temperature, "capture": read}
    fields = [
        {**common, **({"seed": i} if temperature else {}), **(s.fields() if s else {})}
        for i, _, s in asked
    ]
    replies = bench.ask([bench.encode(p) for _, p, _ in asked], fields)
    return [
        (p, reply.token_ids, reply.rows[POINT, layer])
        for (_, p, _), reply in zip(asked, replies, strict=True)
    ]


def last_rows(bench: EngineBench, texts: Sequence[str], layer: int) -> torch.Tensor:
    """float32 [texts, hidden]: `post_block` of `layer` at the last token of each."""
    read = {"inline": {"hooks": {POINT: [layer]}, "positions": "last_prompt"}}
    fields = {"max_tokens": 1, "temperature": 0.0, "capture": read}
    replies = bench.ask([bench.encode(text) for text in texts], [fields] * len(texts))
    return torch.cat([reply.rows[POINT, layer] for reply in replies])
