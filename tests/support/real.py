# SPDX-License-Identifier: Apache-2.0
"""The real models of tests/real: an engine on one, and transformers beside it.

How far rounding alone moves a row is measured, not guessed: transformers runs the engine's weights
in float64, and in the engine's dtype. The engine may be `NOISES` times as far from float64 as
transformers is.

In float32 SmolLM2's engine is up to 4 times as far: oneDNN, which upstream's CPU build multiplies
matrices with, adds up long sums less exactly than torch does. Of the same numbers its product in
layer 10's down projection is off by 1.1e-6, torch's by 3.2e-7; norms, rotation, activation and
attention are as exact as transformers'. With torch's products in its place the same engine is 0.5
to 0.9 times as far from float64 as transformers is, at every point.

A row's error is relative L2, and once more without the row's largest channels:
SmolLM2's stream has rows with single numbers of some 22,000 beside others of order one, in which
all else could be wrong and the whole row's error would be small.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.conformance import reference
from tests.conformance.completions import GREEDY, weights_of
from tests.conformance.reference import Adapter, Forward, Site
from tests.conformance.tiny import LLAMA_LIKE
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.pilot.checkpoints import SMOLLM2, Packaged, Unavailable, checkpoint

NOISES = {torch.float32: 12, torch.bfloat16: 2}
"""Multiple of transformers' own rounding that an error may be, in the engine's dtype. In float32 it
is three times what was seen, because CPUs of other kinds add up in another order."""
LEAST = 1e-6
"""The error that is allowed in any case."""
LEAST_NATS = 1e-4
SHARE = 64
"""One channel in so many is left out of the second error of a row."""
GENERATED = 4
TOP = 20
"""Log-probabilities of each position."""

Rows = Mapping[Site, torch.Tensor]
Errors = tuple[float, float]
"""The worst row's, whole and without its largest channels."""

CHAT: list[Any] = [
    {"role": "system", "content": "Answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France, and which river is it on?"},
    {"role": "assistant", "content": "Paris, on the Seine."},
    {"role": "user", "content": "Now write one about the sea. Mention Paris again."},
]


def model_folder(packaged: Packaged = SMOLLM2) -> Path:
    """The converted model; a test that cannot have it is skipped, but not in CI."""
    try:
        return checkpoint(packaged)
    except Unavailable as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


def first_layers(folder: Path, count: int, target: Path) -> Path:
    """Write a model of the first layers of another one to a folder that is not there yet."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    tensors = load_file(folder / "model.safetensors")
    kept = {f"model.layers.{layer}." for layer in range(count)}
    save_file(
        {
            name: tensor
            for name, tensor in tensors.items()
            if ".layers." not in name or any(name.startswith(start) for start in kept)
        },
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


def errors(got: torch.Tensor, want: torch.Tensor) -> Errors:
    """Relative L2 of the worst row; both [n, ..., width]."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    off, size = got.double() - want.double(), want.double()
    largest = size.abs().topk(max(1, size.shape[-1] // SHARE), dim=-1).indices
    kept = torch.ones_like(size).scatter(-1, largest, 0.0)
    made = [(off * k).norm(dim=-1) / (size * k).norm(dim=-1) for k in (torch.ones(()), kept)]
    whole, rest = (float(error.nan_to_num(nan=torch.inf).max()) for error in made)
    return whole, rest


def worst(of: Sequence[Errors]) -> Errors:
    return max(whole for whole, _ in of), max(rest for _, rest in of)


@dataclass(frozen=True)
class Answer:
    """What an engine said of one prompt."""

    ids: list[int]
    """The tokens that were fed: prompt + generated - 1."""
    num_prompt: int
    top: list[dict[int, float]]
    """The log-probabilities after each position, or after those that generate."""
    captured: dict[str, Any]
    """Consumer or entry -> the payload of its capture."""
    output: Any

    @property
    def rows(self) -> dict[Site, torch.Tensor]:
        """Inline rows of all positions; weights of attention as [n, heads, n]."""
        made = {}
        for site, rows in self.captured["inline"].items():
            assert rows.positions.tolist() == list(range(len(self.ids))), site
            assert rows.token_ids.tolist() == self.ids, site
            made[site] = weights_of(rows) if site[0] == "attn" else rows.values
        return made


class _Rotary(nn.Module):
    """Rotary embeddings in float64.

    transformers has their frequencies in float32 whatever its dtype, and so has upstream, rounded
    otherwise: at position 90 an angle is off by 5e-6.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self.rope = config.rope_parameters

    def forward(
        self, states: torch.Tensor, position_ids: torch.Tensor, kind: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float64 [1, n, head_dim].

        Args:
            kind: of a layer, where layers have rotaries of their own.
        """
        parameters = self.rope if kind is None else self.rope[kind]
        frequencies = parameters["rope_theta"] ** -self.exponents
        angles = position_ids[..., None].double() * frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()


class _Norm(nn.Module):
    """A norm in the dtype of its rows: transformers computes it in float32 whatever they are."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        of_gemma = isinstance(norm, Gemma3RMSNorm)
        self.weight = 1.0 + norm.weight if of_gemma else norm.weight
        self.eps: float = norm.eps if of_gemma else norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the same shape [..., width]."""
        return self.weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)


def _softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax in the dtype of the scores: transformers' attention asks for float32."""
    return scores.softmax(dim)


class Real:
    """An engine on a real model, and transformers on the same folder."""

    def __init__(self, llm: LLM, folder: Path, adapter: Adapter = LLAMA_LIKE) -> None:
        self.llm = llm
        self.adapter = adapter
        self.layers = range(llm.llm_engine.model_config.get_total_num_hidden_layers())
        self._load = functools.partial(
            AutoModelForCausalLM.from_pretrained,
            folder,
            num_hidden_layers=len(self.layers),
            attn_implementation="eager",
        )
        dtype = llm.llm_engine.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        self.dtype = dtype
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._known: dict[tuple[str, tuple[int, ...]], Forward] = {}

    @cached_property
    def same(self) -> nn.Module:
        """transformers' model in the engine's dtype."""
        model = self._load(dtype=self.dtype)
        assert isinstance(model, nn.Module)
        return model.eval()

    @cached_property
    def exact(self) -> nn.Module:
        """The same weights, in float64."""
        model = self._load(dtype=self.dtype)
        assert isinstance(model, nn.Module)
        model = model.double().eval()
        model.model.rotary_emb = _Rotary(model.config)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, (LlamaRMSNorm, Gemma3RMSNorm)):
                    setattr(module, name, _Norm(child))
        return model

    def allowed(self, noise: Errors) -> Errors:
        """What an error may be where transformers' is this."""
        times = NOISES[self.dtype]
        return max(LEAST, times * noise[0]), max(LEAST, times * noise[1])

    def allowed_nats(
        self, top: Sequence[Mapping[int, float]], same: Forward, exact: Forward
    ) -> float:
        """What log-probabilities may be off."""
        return max(LEAST_NATS, NOISES[self.dtype] * noise_of(top, same, exact))

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def chat_text(self, chat: list[Any]) -> str:
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def run(self, name: str, ids: list[int], deltas: Rows | None = None) -> Forward:
        """transformers' forward pass; name is "same" or "exact"."""
        key = name, tuple(ids)
        if deltas is None and key in self._known:
            return self._known[key]
        model = getattr(self, name)
        typed = {site: delta.to(model.dtype) for site, delta in (deltas or {}).items()}
        with ExitStack() as stack:
            if name == "exact":
                stack.enter_context(mock.patch.object(nn.functional, "softmax", _softmax))
            made = reference.run(model, self.adapter, ids, typed)
        if deltas is None:
            self._known[key] = made
        return made

    def both(self, ids: list[int], deltas: Rows | None = None) -> tuple[Forward, Forward]:
        """In float64, and in the engine's dtype."""
        return self.run("exact", ids, deltas), self.run("same", ids, deltas)

    def ask(
        self,
        cases: Sequence[tuple[list[int], Mapping[str, Any]]],
        top: int | None = None,
        generated: int = GENERATED,
    ) -> list[Answer]:
        """Answer prompts greedily, in one batch.

        Args:
            top: the number of log-probabilities of each position, also of the prompt's; without,
                the prefix cache is read.
        """
        asked = {"max_tokens": generated, **GREEDY}
        if top is not None:
            asked |= {"logprobs": top, "prompt_logprobs": top}
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in cases],
            [SamplingParams(**{**asked, **fields}) for _, fields in cases],
            use_tqdm=False,
        )
        return [answer_of(output) for output in outputs]


def answer_of(output: Any) -> Answer:
    """Take an engine's output apart.

    Raises:
        AssertionError: a capture did not end well.
    """
    sample, prompt = output.outputs[0], list(output.prompt_token_ids)
    tables = [*(output.prompt_logprobs or [])[1:], *(sample.logprobs or [])]
    top = [{token: entry.logprob for token, entry in table.items()} for table in tables]
    captured = {}
    for name, result in (output.capture_results or {}).items():
        assert result.status == "ok", result.error
        captured[name] = result.payload
    return Answer([*prompt, *sample.token_ids][:-1], len(prompt), top, captured, output)


def rows_of(forward: Forward) -> dict[Site, torch.Tensor]:
    return forward.rows | forward.heads | forward.others


def log_prob_error(top: Sequence[Mapping[int, float]], forward: Forward) -> float:
    """The largest difference in nats, of the tokens that are named at each position."""
    table = forward.logits.double().log_softmax(-1)
    assert len(top) == len(table)
    return max(
        float((torch.tensor(list(one.values())) - row[list(one)]).abs().max())
        for one, row in zip(top, table, strict=True)
    )


def noise_of(top: Sequence[Mapping[int, float]], same: Forward, exact: Forward) -> float:
    """The same of transformers in the engine's dtype."""
    table = same.logits.double().log_softmax(-1)
    return log_prob_error(
        [{token: float(row[token]) for token in one} for one, row in zip(top, table, strict=True)],
        exact,
    )
