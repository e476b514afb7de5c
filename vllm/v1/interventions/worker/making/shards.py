# SPDX-License-Identifier: Apache-2.0
"""Features of an autoencoder in equal shards, one a tensor-parallel rank, in the ranks' order.

Each rank has the encoder's columns and the decoder's rows of its features, and the same rows of the
model. What is asked of all features takes a gather or a sum, which all ranks enter in one order.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.v1.features.autoencoder import Autoencoder

SPARE = 8
"""Number of activations beyond the last of the largest that are looked at, should they be equal to
it: which of equal ones `topk` finds is its own business."""


class Shards(NamedTuple):
    """The shard of this rank among all."""

    rank: int = 0
    ranks: int = 1

    def part(self, whole: Autoencoder) -> Autoencoder:
        """Return the shard of an autoencoder, views of its tensors where nothing is missing. Where
        shards are not full, the last ones have features that are never active."""
        if self.ranks == 1:
            return whole
        size = -(-whole.num_features // self.ranks)
        own = slice(self.rank * size, (self.rank + 1) * size)
        missing = size - len(whole.bias[own])

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return pad(tensor[own], (0, missing)) if missing else tensor[own]

        encoder, decoder = whole.encoder[:, own], whole.decoder[own]
        return replace(
            whole,
            encoder=pad(encoder, (0, missing)) if missing else encoder,
            decoder=pad(decoder, (0, 0, 0, missing)) if missing else decoder,
            gain=cut(whole.gain),
            decoder_gain=cut(whole.decoder_gain),
            bias=cut(whole.bias),
            threshold=cut(whole.threshold),
        )

    def best(self, activations: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest of all activations, of equal ones the first features first:
        the same on one rank as on several, unless more than `SPARE` are equal to the last one.

        Args:
            activations: float32 [n, features of a shard].
            count: number of them, at most of all features.

        Returns:
            Values, float32, and the numbers of features, int64, both [n, count].
        """
        width = activations.shape[1]
        values, ids = activations.topk(min(count + SPARE, width))
        ids = ids + self.rank * width
        if self.ranks > 1:
            both = torch.stack([values, ids.int().view(torch.float32)], dim=2).flatten(1)
            both = tensor_model_parallel_all_gather(both).unflatten(1, (-1, 2))
            values = both[:, :, 0].contiguous()
            ids = both[:, :, 1].contiguous().view(torch.int32).long()
        ids, order = ids.sort(dim=1)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        return values[:, :count], ids.gather(1, order)[:, :count]

    def kept(self, activations: torch.Tensor, k: int) -> torch.Tensor:
        """Return activations [n, features of a shard] of which only those among the `k` largest of
        all features are left."""
        width = activations.shape[1]
        values, ids = self.best(activations, k)
        # What is another's goes to a column that is cut off.
        ids = self.local(ids, width)
        kept = activations.new_zeros(len(activations), width + 1).scatter_(1, ids, values)
        return kept[:, :width].contiguous()

    def of(self, activations: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the activations of features, by their numbers among all: [n, len(ids)], zeros of
        those of other ranks."""
        width = activations.shape[1]
        local = self.local(ids, width)
        return activations[:, local.clamp(max=width - 1)].where(local < width, 0.0)

    def local(self, ids: torch.Tensor, width: int) -> torch.Tensor:
        """Return places in a shard of `width` features; `width` for those of other ranks."""
        local = ids - self.rank * width
        return local.where((local >= 0) & (local < width), width)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of a tensor that each has a part of."""
        return part if self.ranks == 1 else tensor_model_parallel_all_reduce(part)
