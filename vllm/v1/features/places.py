# SPDX-License-Identifier: Apache-2.0
"""A place for one autoencoder after the other, at tensors that stay where they are: what was
compiled and recorded with a place computes by whichever autoencoder is there."""

from dataclasses import dataclass
from typing import Self

import torch

from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.features.scaling import SCALINGS, Scaled

_ROWS = 1 << 8
"""Number of rows of a matrix that are copied together."""
_NAMES = ("", *SCALINGS)


@dataclass(frozen=True, eq=False)
class Place(Autoencoder):
    """An autoencoder as it is computed with until another is `put` in its place.

    `k` is the most that a TopK autoencoder may have here, 0 if none fits; `scaling` says nothing.
    Features beyond those of what is here have gains, biases and thresholds of zeros, so they are
    never active, whatever the matrices have there.
    """

    chosen: torch.Tensor
    """int32 [2]: `k` of what is here, and which of the scalings it has."""

    @classmethod
    def empty(
        cls, hidden: int, features: int, k: int, device: torch.device, dtype: torch.dtype
    ) -> Self:
        """Make a place for at most so many features, of zeros; its matrices are of a dtype."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            encoder=zeros(hidden, features, dtype=dtype),
            decoder=zeros(features, hidden, dtype=dtype),
            gain=zeros(features),
            decoder_gain=zeros(features),
            bias=zeros(features),
            decoder_bias=zeros(hidden),
            threshold=zeros(features),
            k=k,
            scaling="",
            transcodes=False,
            skip=None,
            source="",
            chosen=zeros(2, dtype=torch.int32),
        )

    def fits(self, autoencoder: Autoencoder) -> bool:
        """Tell whether an autoencoder, of rows as wide, has room here."""
        return autoencoder.num_features <= self.num_features and autoencoder.k <= self.k

    def put(self, autoencoder: Autoencoder) -> None:
        """Copy an autoencoder that `fits` here, over the one that is."""
        assert self.fits(autoencoder)
        number = autoencoder.num_features
        for name in ("gain", "decoder_gain", "bias", "threshold"):
            own = getattr(self, name)
            own[:number].copy_(getattr(autoencoder, name))
            own[number:].zero_()
        self.decoder_bias.copy_(autoencoder.decoder_bias)
        # A part at a time: a copy that changes the dtype may take as much memory again.
        for into, of in (
            (self.encoder[:, :number], autoencoder.encoder),
            (self.decoder[:number], autoencoder.decoder),
        ):
            for part, given in zip(into.split(_ROWS), of.split(_ROWS), strict=True):
                part.copy_(given)
        numbers = [autoencoder.k, _NAMES.index(autoencoder.scaling)]
        self.chosen.copy_(torch.tensor(numbers, dtype=torch.int32))

    def scaled(self, rows: torch.Tensor) -> Scaled:
        """Return rows as the encoder of what is here reads them."""
        rows = rows.float()
        made, size, centre = rows, torch.ones_like(rows[..., :1]), torch.zeros_like(rows[..., :1])
        for number, scaling in enumerate(SCALINGS.values(), 1):
            some, is_chosen = scaling(rows), self.chosen[1] == number
            made = torch.where(is_chosen, some.rows, made)
            size = torch.where(is_chosen, some.size, size)
            centre = torch.where(is_chosen, some.centre, centre)
        return Scaled(made, size, centre)

    def active(self, products: torch.Tensor) -> torch.Tensor:
        """Return the activations of rows, of their products with the encoder."""
        activations = self.above(products)
        if not self.k:
            return activations
        found = activations.topk(self.k)
        ranks = torch.arange(self.k, device=products.device)
        values = found.values.where(ranks < self.chosen[0], 0.0)
        kept = torch.zeros_like(activations).scatter_(-1, found.indices, values)
        return kept.where(self.chosen[0] > 0, activations)
