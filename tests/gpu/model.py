# SPDX-License-Identifier: Apache-2.0
"""The model of the GPU checks, and prompts for it. Imports no vllm: upstream's tree uses it too."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HIDDEN, VOCAB, HEADS = 8, 512, 2048, 8


def save_model(path: Path, layers: int = LAYERS, vocab: int = VOCAB, hidden: int = HIDDEN) -> None:
    """A random Llama with activations of order one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    model.bfloat16().save_pretrained(path)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 90, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
