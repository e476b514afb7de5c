# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders from files: activations of captured rows, and features as operations.

    sae = Autoencoder.load("gemma-scope/layer_12")         # SAELens's folder, or params.npz
    ids, values = sae.top(rows, 8)                          # of captured rows
    happy = sae.op(1234, "post_block", 12, value=8.0)       # for SamplingParams(steering=[happy])

With x the row, z = (x - b_dec) W_enc + b_enc where the file says that b_dec is subtracted, else
z = x W_enc + b_enc; the activations are z where z > threshold, else 0: ReLU with threshold 0,
JumpReLU else (Rajamanoharan et al. 2024, arXiv:2407.14435); of TopK the k largest of them stay (Gao
et al. 2024, arXiv:2406.04093). The engine computes the same: docs/features.md.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

from vllm.v1.features.files import read

_COLUMNS = 1 << 10
"""Number of features whose columns are multiplied together."""


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A sparse autoencoder of one site. Its matrices are of the file's dtype, all else float32."""

    encoder: torch.Tensor
    """`W_enc`, [hidden, features]."""
    decoder: torch.Tensor
    """`W_dec`, [features, hidden]."""
    bias: torch.Tensor
    """[features]: `b_enc`, less `b_dec W_enc` where `b_dec` is subtracted from the row."""
    decoder_bias: torch.Tensor
    """`b_dec`, [hidden]."""
    threshold: torch.Tensor
    """[features], at least 0."""
    k: int
    """Number of features that stay active in a row; 0 for all."""
    source: str
    """The file, for errors."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of Gemma Scope (`params.npz`), or a folder of SAELens, sparsify or
        dictionary_learning, as `files` says.

        Raises:
            ValueError: a file cannot be read, its activation or scaling is another one, a tensor
                is missing, of another shape, or not finite; the message names file and tensor.
        """
        made = read(Path(path))
        bias, number = made.bias, len(made.bias)
        if made.subtracts:
            parts = made.encoder.split(_COLUMNS, dim=1)
            bias = bias - torch.cat([made.decoder_bias @ part.float() for part in parts])
        threshold = torch.zeros(number) if made.threshold is None else made.threshold.clamp(min=0)
        matrices = made.encoder, made.decoder
        return cls(*matrices, bias, made.decoder_bias, threshold, made.k, made.source)

    @property
    def hidden_size(self) -> int:
        """Width of the rows that it reads."""
        return self.encoder.shape[0]

    @property
    def num_features(self) -> int:
        """Number of features."""
        return self.encoder.shape[1]

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the activations of rows.

        Args:
            rows: [..., hidden], of any dtype.

        Returns:
            float32 [..., features].

        Raises:
            ValueError: the rows are of another width.
        """
        if rows.shape[-1] != self.hidden_size:
            raise ValueError(
                f"rows are {rows.shape[-1]} wide, {self.source} reads rows of {self.hidden_size}"
            )
        return self.active(rows.float() @ self.encoder.float())

    def active(self, products: torch.Tensor) -> torch.Tensor:
        """Return the activations of rows, of their products with the encoder, float32 [...,
        features]."""
        before = products + self.bias
        activations = before.where(before > self.threshold, 0.0)
        if not self.k:
            return activations
        kept = activations.topk(self.k)
        return torch.zeros_like(activations).scatter_(-1, kept.indices, kept.values)

    def decode(self, activations: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., hidden] that activations [..., features] stand for."""
        return activations.float() @ self.decoder.float() + self.decoder_bias

    def top(self, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most active features of each row: ids, int64, and activations, float32, both
        [..., count]."""
        found = self.encode(rows).topk(count)
        return found.indices, found.values

    def effects(
        self, rows: torch.Tensor, direction: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features that move the rows most along a direction: the direct effect of a
        feature is its activation times the product of its decoder's row with the direction.

        With the last block's rows, and `lm_head.weight[token] * norm.weight / rms(row)` as each
        row's direction, this is the direct effect on the token's logit, the final norm held fixed
        (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits").

        Args:
            rows: [..., hidden], of any dtype.
            direction: [hidden], or one for each row, [..., hidden].
            count: number of features.

        Returns:
            ids, int64, and effects, float32, both [..., count], the largest in size first.

        Raises:
            ValueError: rows or direction are of another width.
        """
        if direction.shape[-1] != self.hidden_size:
            raise ValueError(
                f"the direction is {direction.shape[-1]} wide, {self.source} writes rows of "
                f"{self.hidden_size}"
            )
        effects = self.encode(rows) * (direction.float() @ self.decoder.float().T)
        found = effects.abs().topk(count).indices
        return found, effects.gather(-1, found)

    def feature(self, number: int) -> dict[str, Any]:
        """Return what the operation `feature` needs to know of a feature.

        Raises:
            ValueError: there is no such feature, or what is active depends on all others.
        """
        if not 0 <= number < self.num_features:
            raise ValueError(f"feature: {number} is none of 0-{self.num_features - 1}")
        if self.k:
            raise ValueError(
                f"{self.source} is TopK: whether a feature is active depends on all others, which "
                "an operation does not read; add its decoder's row ('add'), or read features alone"
            )
        return {
            "encoder": self.encoder[:, number].float().clone(),
            "decoder": self.decoder[number].float().clone(),
            "bias": float(self.bias[number]),
            "threshold": float(self.threshold[number]),
        }

    def op(
        self, feature: int, point: str, layers: int | str | list[int], **fields: Any
    ) -> dict[str, Any]:
        """Return the operation `feature` for `SamplingParams(steering=[...])` and for requests.

        Args:
            feature: its number.
            point: the point that the autoencoder was trained on.
            layers: the layer likewise.
            fields: what it does, such as `value=8.0` or `add=4.0`: docs/features.md.

        Raises:
            ValueError: as `feature`.
        """
        site = {"op": "feature", "point": point, "layers": layers}
        return site | self.feature(feature) | fields


@cache
def opened(path: str) -> Autoencoder:
    """Return the autoencoder of a file that an option names; its matrices stay in the file."""
    return Autoencoder.load(path)
