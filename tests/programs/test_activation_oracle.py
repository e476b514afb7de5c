# SPDX-License-Identifier: Apache-2.0
"""The activation oracle on SmolLM2: what is answered is the row that was injected, and with a LoRA
adapter beside plain requests it is what transformers computes with the formula and merged weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.activation_oracle import QUESTION, inject, read
from tests.conformance.engine import make_llm, shut_down
from tests.support.real import model_folder
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.full

WORDS = ["elephant", "guitar", "doctor", "winter"]
TEXTS = [f"I saw a picture of the {word}" for word in WORDS]
RAISED = 6.0
"""Nats that a row raises its word by, at least, against a random row. Seen: 9 to 13."""
CLOSE = 1e-3
"""Nats, fifty times what was seen; twins are off by a hundred times as much."""
RANK = 4
Weights = dict[str, torch.Tensor]


def save_adapter(folder: Path) -> Weights:
    """Save a random adapter as peft does. Returns what it adds to each weight."""
    generator = torch.Generator().manual_seed(0)
    tensors, deltas = {}, {}
    for layer in range(30):
        name = f"model.layers.{layer}.self_attn.o_proj"
        down = torch.randn(RANK, 576, generator=generator) * 0.2
        up = torch.randn(576, RANK, generator=generator) * 0.2
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        deltas[f"{name}.weight"] = up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    config |= {"lora_dropout": 0.0, "bias": "none", "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = make_llm(
        model_folder(),
        skip_tokenizer_init=False,
        enable_steering=True,
        steering_families=["norm_match"],
        capture_consumers=["inline"],
        enable_lora=True,
        # Upstream's CPU kernels take -1, no adapter, for an index: the last place must be empty.
        max_loras=2,
        max_lora_rank=8,
        max_model_len=64,
    )
    yield made
    shut_down(made)


@pytest.fixture(scope="module")
def rows(llm: LLM) -> torch.Tensor:
    """[2, words, hidden]: of the words, and random ones."""
    of_words = read(llm, TEXTS)
    return torch.stack(
        [of_words, torch.randn(of_words.shape, generator=torch.Generator().manual_seed(0))]
    )


def ids_of(llm: LLM) -> list[int]:
    return [llm.get_tokenizer().encode(f" {w}", add_special_tokens=False)[0] for w in WORDS]


def answers(llm: LLM, asked: list[dict[str, Any]], adapters: Any = None) -> torch.Tensor:
    """[requests, words]: log P of each word as the answer, all in one batch."""
    ids = ids_of(llm)
    params = [SamplingParams(max_tokens=1, logprob_token_ids=ids, **one) for one in asked]
    outputs = llm.generate([QUESTION] * len(asked), params, use_tqdm=False, lora_request=adapters)
    tables: list[Any] = [output.outputs[0].logprobs for output in outputs]
    return torch.tensor([[table[0][i].logprob for i in ids] for table in tables])


def test_the_row_is_what_is_answered(llm: LLM, rows: torch.Tensor) -> None:
    """Each word is likelier with its own row than with a random one, or another word's."""
    asked = [inject(llm, row[None]) for kind in rows for row in kind]
    own, noise = answers(llm, asked).view(2, len(WORDS), len(WORDS))
    assert (own - noise).diagonal().min() > RAISED, own - noise
    assert own.argmax(-1).tolist() == list(range(len(WORDS)))
    others = own.masked_fill(torch.eye(len(WORDS)).bool(), -torch.inf).max(-1).values
    assert (own.diagonal() - others).min() > RAISED, own


def by_hand(folder: Path, deltas: Weights, rows: list[torch.Tensor | None]) -> torch.Tensor:
    """[rows, vocabulary]: log-probabilities of transformers, with a row added by the formula."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, delta in deltas.items():
        model.get_parameter(name).data += delta
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    [at] = (ids[0] == tokenizer.encode(" ?")[0]).nonzero()[:, 0].tolist()
    given = iter(rows)

    def add(_: Any, __: Any, h: torch.Tensor) -> torch.Tensor:
        if (row := next(given)) is not None:
            h = h.clone()
            h[0, at] += 2.0 * h[0, at].norm() * row / row.norm()
        return h

    model.model.layers[1].register_forward_hook(add)
    with torch.no_grad():
        return torch.stack([model(ids).logits[0, -1].log_softmax(-1) for _ in rows])


def test_an_adapter_answers_beside_plain_requests(
    llm: LLM, rows: torch.Tensor, tmp_path: Path
) -> None:
    """With and without adapter, with and without row, in one batch."""
    deltas = save_adapter(tmp_path / "adapter")
    lora = LoRARequest("oracle", 1, str(tmp_path / "adapter"))
    cases: list[torch.Tensor | None] = [rows[0, 0], None]
    asked = [{} if row is None else inject(llm, row[None]) for row in cases]
    got = answers(llm, asked * 2, [lora, lora, None, None])
    want = torch.cat([by_hand(model_folder(), each, cases) for each in (deltas, {})])
    want = want[:, ids_of(llm)]
    assert (got - want).abs().max() < CLOSE, got - want
    apart = (want[:, None] - want[None]).abs().amax(-1)  # the twins: the other cases
    assert apart[~torch.eye(len(apart)).bool()].min() > 100 * CLOSE, apart
