# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders from files: activations of captured rows, and features as operations.

    sae = Autoencoder.load("gemma-scope/layer_12")         # SAELens's folder, or params.npz
    ids, values = sae.top(rows, 8)                          # of captured rows
    happy = sae.op(1234, "post_block", 12, value=8.0)       # for SamplingParams(steering=[happy])

With x the row, z = (x - b_dec) W_enc + b_enc where the file says that b_dec is subtracted, else
z = x W_enc + b_enc; the activations are z where z > threshold, else 0: ReLU with threshold 0,
JumpReLU else (Rajamanoharan et al. 2024, arXiv:2407.14435); of TopK the k largest of them stay (Gao
et al. 2024, arXiv:2406.04093). A factor of rows, the same for all, is folded into these; a scale
that depends on the row is computed for each. The engine computes the same: docs/features.md.

A transcoder reads what an MLP reads and decodes what it writes (Dunefsky et al. 2024,
arXiv:2406.11944), with a skip connection plus a matrix times the row (Paulo et al. 2025,
arXiv:2501.18823).
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from vllm.config.points import INPUT_POINTS
from vllm.config.steering import FeatureFile
from vllm.v1.features.files import read
from vllm.v1.features.scaling import SCALINGS, Scaled

_COLUMNS = 1 << 10
"""Number of features whose columns are multiplied together."""
TENSORS = ("encoder", "decoder", "gain", "decoder_gain", "bias", "decoder_bias", "threshold")
"""Names of the tensors of an autoencoder that activations and their decoding need."""


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A sparse autoencoder of one site. Its matrices are of the file's dtype, all else float32."""

    encoder: torch.Tensor
    """`W_enc`, [hidden, features], before `gain`."""
    decoder: torch.Tensor
    """`W_dec`, [features, hidden], before `decoder_gain`."""
    gain: torch.Tensor
    """[features]: what the encoder's columns are multiplied with."""
    decoder_gain: torch.Tensor
    """[features]: what the decoder's rows are multiplied with."""
    bias: torch.Tensor
    """[features]: `b_enc`, less `b_dec W_enc` where `b_dec` is subtracted from the row."""
    decoder_bias: torch.Tensor
    """`b_dec`, [hidden]."""
    threshold: torch.Tensor
    """[features], at least 0."""
    k: int
    """Number of features that stay active in a row; 0 for all."""
    scaling: str
    """Scaling of `SCALINGS`, which depends on the row; "" for none."""
    transcodes: bool | None
    """True for a transcoder; None if the file does not say."""
    skip: torch.Tensor | None
    """[hidden, hidden]: a transcoder adds it times the row to what it decodes."""
    source: str
    """The file, for errors."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of Gemma Scope (`params.npz`), or a folder of SAELens, sparsify,
        dictionary_learning, Gemma Scope 2 or Llama Scope, as `files` says.

        Raises:
            ValueError: a file cannot be read, its activation or scaling is another one, a tensor
                is missing, of another shape, or not finite; the message names file and tensor.
        """
        made = read(Path(path))
        bias, number = made.bias, len(made.bias)
        gain, decoder_gain = (
            torch.ones(number) if of_file is None else of_file
            for of_file in (made.gain, made.decoder_gain)
        )
        if made.subtracts:
            parts = made.encoder.split(_COLUMNS, dim=1)
            moved = torch.cat([made.decoder_bias @ part.float() for part in parts])
            bias = bias - gain * moved
        return cls(
            made.encoder,
            made.decoder,
            gain * made.input_scale,
            decoder_gain / made.output_scale,
            bias,
            made.decoder_bias / made.output_scale,
            torch.zeros(number) if made.threshold is None else made.threshold.clamp(min=0),
            made.k,
            made.scaling,
            made.transcodes,
            made.skip,
            made.source,
        )

    def at(self, point: str) -> Self:
        """Return it at a point: a file that does not say is a transcoder's where a branch's input
        is read."""
        if self.transcodes is not None:
            return self
        return replace(self, transcodes=point in INPUT_POINTS)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of all but the matrices, of which it has the first rows."""
        some = (self.gain, self.decoder_gain, self.bias, self.decoder_bias, self.threshold)
        rows = (self.encoder[0].float(), self.decoder[0].float())
        made = hashlib.sha256(f"{self.k}:{self.scaling}".encode())
        for tensor in (*some, *rows):
            made.update(tensor.contiguous().numpy().tobytes())
        return made.hexdigest()

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
        return self.active(self.scaled(rows).rows.float() @ self.encoder.float())

    def scaled(self, rows: torch.Tensor) -> Scaled:
        """Return rows as the encoder reads them."""
        return SCALINGS[self.scaling](rows.float()) if self.scaling else Scaled(rows)

    def active(self, products: torch.Tensor) -> torch.Tensor:
        """Return the activations of rows, of their products with the encoder, float32 [...,
        features]."""
        activations = self.above(products)
        if not self.k:
            return activations
        kept = activations.topk(self.k)
        return torch.zeros_like(activations).scatter_(-1, kept.indices, kept.values)

    def above(self, products: torch.Tensor) -> torch.Tensor:
        """Return activations as `active`, whether or not they are among the `k` largest."""
        before = torch.addcmul(self.bias, products, self.gain)
        return before.where(before > self.threshold, 0.0)

    def decode(self, activations: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows [..., hidden] that activations [..., features] stand for.

        Args:
            rows: [..., hidden], of which the activations are: needed where the scale depends on
                the row, and by a skip transcoder.

        Raises:
            ValueError: they are needed and missing.
        """
        decoded = (activations.float() * self.decoder_gain) @ self.decoder.float()
        decoded += self.decoder_bias
        if rows is None:
            if self.scaling or self.skip is not None:
                raise ValueError(f"{self.source} decodes with the rows that were read: give rows")
            return decoded
        if self.skip is not None:
            decoded += rows.float() @ self.skip.float().T
        return self.unscaled(decoded, self.scaled(rows))

    def reconstruct(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what is decoded of the activations of rows, float32 [n, hidden], by products in
        the matrices' dtype.

        Args:
            rows: [n, hidden], where the matrices are.
        """
        scaled = self.scaled(rows)
        return self.decoded(self.active(product(scaled.rows, self.encoder)), scaled)

    def decoded(self, activations: torch.Tensor, scaled: Scaled) -> torch.Tensor:
        """Return what activations [n, features] of scaled rows stand for, as `reconstruct`."""
        return self.unscaled(self.products(activations) + self.decoder_bias, scaled)

    def products(self, activations: torch.Tensor) -> torch.Tensor:
        """Return the products of activations [n, features] with the decoder."""
        weights = (activations * self.decoder_gain).to(self.decoder.dtype)
        return product(weights, self.decoder)

    def unscaled(self, decoded: torch.Tensor, scaled: Scaled) -> torch.Tensor:
        """Return what is decoded in the units of rows; of a transcoder as it is, whose decoder
        writes another site."""
        return decoded if self.transcodes else decoded * scaled.size + scaled.centre

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
        if direction.shape[-1] != self.decoder.shape[1]:
            raise ValueError(
                f"the direction is {direction.shape[-1]} wide, {self.source} writes rows of "
                f"{self.decoder.shape[1]}"
            )
        along = (direction.float() @ self.decoder.float().T) * self.decoder_gain
        size = 1.0 if self.transcodes else self.scaled(rows).size
        effects = self.encode(rows) * along * size
        found = effects.abs().topk(count).indices
        return found, effects.gather(-1, found)

    def direction(self, number: int) -> torch.Tensor:
        """Return what a feature adds to a row for each unit of its activation, float32 [hidden]:
        the decoder's row; where the scale depends on the row, in units of the scaled one.

        Raises:
            ValueError: there is no such feature.
        """
        if not 0 <= number < self.num_features:
            raise ValueError(f"feature: {number} is none of 0-{self.num_features - 1}")
        return self.decoder[number].float() * self.decoder_gain[number]

    def probe(self, number: int) -> dict[str, Any]:
        """Return what it takes to read a feature by itself: `encoder`, `bias`, `threshold`.

        Raises:
            ValueError: there is no such feature, what is active depends on all others, or the
                scale depends on the row.
        """
        self.direction(number)
        if self.k:
            raise ValueError(
                f"{self.source} is TopK: whether a feature is active depends on all others, which "
                "an operation does not read; add its decoder's row ('add'), or read features alone"
            )
        if self.scaling:
            raise ValueError(
                f"{self.source} scales each row by itself ({self.scaling}), which an operation "
                "does not compute; add its decoder's row ('add'), or read features alone"
            )
        return {
            "encoder": self.encoder[:, number].float() * self.gain[number],
            "bias": float(self.bias[number]),
            "threshold": float(self.threshold[number]),
        }

    def feature(self, number: int) -> dict[str, Any]:
        """Return what the operation `feature` needs to know of a feature.

        Raises:
            ValueError: as `probe`, or it is a transcoder's.
        """
        found = self.probe(number)
        if self.transcodes:
            raise ValueError(
                f"{self.source} is a transcoder, which reads one site and writes another: an "
                "operation does both at one; add its decoder's row at post_block ('add')"
            )
        return {**found, "decoder": self.direction(number)}

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
        return site | self.at(point).feature(feature) | fields


def product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply rows with a matrix, in its dtype; the result is float32."""
    if matrix.dtype == torch.float32:
        return rows.float() @ matrix
    return torch.mm(rows.to(matrix.dtype), matrix, out_dtype=torch.float32)


_OPEN: dict[FeatureFile, Autoencoder] = {}
"""Autoencoders that this process has open."""


def opened(file: FeatureFile) -> Autoencoder:
    """Return the autoencoder of a file that an operator names; its matrices stay in the file. With
    another stamp it is read anew. Raises ValueError as `Autoencoder.load`."""
    file = file._replace(place=0)
    found = _OPEN.get(file)
    if found is None:
        found = _OPEN[file] = Autoencoder.load(file.path).at(file.point)
    return found


def close(file: FeatureFile) -> None:
    """Forget what `opened` has of a file."""
    _OPEN.pop(file._replace(place=0), None)
