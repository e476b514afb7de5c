# SPDX-License-Identifier: Apache-2.0
"""A LongCat Flash with embeddings of n-grams, which transformers has not, in plain PyTorch.

A token's embedding is the mean of its own and of W_e E_e[id] over tables e. Table e = i * k + j is
of n-grams of i + 2 tokens, the last of which is this one: with t[d] the token d back (0 before the
first), id = sum_d t[d] * vocab^d, modulo the table's size, m + 2 e + 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM


class NgramEmbeddings(nn.Module):
    """The tables."""

    def __init__(self, config: LongcatFlashConfig) -> None:
        super().__init__()
        self.k, self.vocab = config.emb_split_num, config.vocab_size
        count = self.k * (config.emb_neighbor_num - 1)
        width = config.hidden_size // count
        sizes = [config.ngram_vocab_size_ratio * self.vocab + 2 * e + 1 for e in range(count)]
        self.embedders = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.post_projs = nn.ModuleList(
            nn.Linear(width, config.hidden_size, bias=False) for _ in sizes
        )

    def forward(self, tokens: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """[1, n, hidden], of tokens [1, n] and their own embeddings [1, n, hidden]."""
        every = [own]
        for e, (table, project) in enumerate(zip(self.embedders, self.post_projs, strict=True)):
            assert isinstance(table, nn.Embedding)
            ids = torch.zeros_like(tokens)
            for back in range(e // self.k + 2):
                before = nn.functional.pad(tokens, (back, 0))[:, : tokens.shape[1]]
                ids = ids + before * self.vocab**back
            every.append(project(table(ids % table.num_embeddings)))
        return torch.stack(every).mean(0)


class LongcatNgram(LongcatFlashForCausalLM):
    """The model, of a LongCat Flash's config with the fields of n-grams."""

    def __init__(self, config: LongcatFlashConfig) -> None:
        super().__init__(config)
        self.model.ngram_embeddings = NgramEmbeddings(config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """As the other's, of the embeddings."""
        own = self.model.embed_tokens(input_ids)
        embeds = self.model.ngram_embeddings(input_ids, own)
        return super().forward(inputs_embeds=embeds, **kwargs)
