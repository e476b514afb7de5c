# SPDX-License-Identifier: Apache-2.0
"""Asks an engine, and takes what it returns apart: tokens, log-probabilities and captured rows.

Logits are full-vocabulary log-probabilities, which the engine reports for each position
(`prompt_logprobs=-1` and `logprobs=-1`, with `max_logprobs=-1` at start-up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm import SamplingParams
from vllm.config.points import STREAM_POINTS

from .pictures import Shown
from .reference import Site

GENERATED = 6
"""Tokens of each completion."""
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
"""Sampling parameters of completions that are the same each time, and as long as asked."""


class Engine(Protocol):
    """The part of `vllm.LLM` that is used here."""

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[Any]: ...


@dataclass(frozen=True)
class Completion:
    """What the engine returned for one prompt, as tensors with one row per token that was fed."""

    token_ids: list[int]
    """n = prompt + generated - 1 ids: the last generated token is never fed back."""
    num_prompt: int
    log_probs: torch.Tensor | None
    """float32 [n, vocab], or None when they were not asked for."""
    rows: dict[Site, torch.Tensor]
    """(point, layer) -> float32 [n, hidden]; empty when nothing was captured."""


def complete(
    llm: Engine,
    cases: Sequence[tuple[list[int], Mapping[str, Any]]],
    *,
    log_probs: bool = True,
    capture: Mapping[str, Any] | None = None,
) -> list[Completion]:
    """Greedy generation of (prompt, extra sampling parameters) cases, in one batch.

    Args:
        log_probs: ask for full-vocabulary log-probabilities of every position.
        capture: an inline capture request made of every case.
    """
    fields: dict[str, Any] = {"max_tokens": GENERATED, **GREEDY}
    if log_probs:
        fields |= {"logprobs": -1, "prompt_logprobs": -1}
    if capture is not None:
        fields["capture"] = {"inline": dict(capture)}
    params = [SamplingParams(**fields, **_only_words(prompt), **extra) for prompt, extra in cases]
    outputs = llm.generate([as_prompt(prompt) for prompt, _ in cases], params, use_tqdm=False)
    return [
        _completion(prompt, output, log_probs, capture is not None)
        for (prompt, _), output in zip(cases, outputs, strict=True)
    ]


def as_prompt(prompt: list[int]) -> dict[str, Any]:
    """A prompt as an engine takes it: images not expanded."""
    if isinstance(prompt, Shown):
        images = {"multi_modal_data": {"image": prompt.images}} if prompt.images else {}
        return {"prompt": prompt.text, **images}
    return {"prompt_token_ids": prompt}


def _only_words(prompt: list[int]) -> dict[str, Any]:
    """Keeps a model from writing tokens that stand for images; probabilities are not changed."""
    return {"allowed_token_ids": list(range(prompt.num_words))} if isinstance(prompt, Shown) else {}


def _completion(prompt: list[int], output: Any, log_probs: bool, captured: bool) -> Completion:
    sample = output.outputs[0]
    if output.prompt_token_ids != list(prompt):
        raise AssertionError(f"the engine read {output.prompt_token_ids}, not {list(prompt)}")
    token_ids = [*prompt, *sample.token_ids[:-1]]
    table = None
    if log_probs:
        # Entry i of prompt_logprobs is the distribution that position i - 1 gave token i.
        entries = [*output.prompt_logprobs[1:], *sample.logprobs]
        table = torch.tensor([[e[i].logprob for i in range(len(e))] for e in entries])
    rows = _captured_rows(output, token_ids) if captured else {}
    return Completion(token_ids, len(prompt), table, rows)


def _captured_rows(output: Any, token_ids: list[int]) -> dict[Site, torch.Tensor]:
    result = output.capture_results["inline"]
    if result.status != "ok":
        raise AssertionError(f"capture status {result.status}: {result.error}")
    rows = {}
    for site, captured in result.payload.items():
        positions = torch.as_tensor(captured.positions).tolist()
        if positions != list(range(len(token_ids))):
            raise AssertionError(f"{site}: captured positions {positions}, of {len(token_ids)}")
        if torch.as_tensor(captured.token_ids).tolist() != token_ids:
            raise AssertionError(f"{site}: token ids of the rows are not those of the sequence")
        rows[site] = weights_of(captured) if site[0] == "attn" else captured.values.float()
        if site[0] in STREAM_POINTS and rows[site].ndim > 2:  # lanes, as the reference has them
            rows[site] = rows[site].flatten(1)
    return rows


def weights_of(rows: Any) -> torch.Tensor:
    """The weights of queries at 0, 1, ..., n - 1: float32 [n, heads, n], zeros for later keys."""
    made = torch.zeros(len(rows), len(rows.heads), len(rows))
    for t, weights in enumerate(rows.weights):
        made[t, :, : t + 1] = weights
    return made


def log_probs_of(completion: Completion) -> torch.Tensor:
    if completion.log_probs is None:
        raise AssertionError("the completion was asked for without log-probabilities")
    return completion.log_probs
