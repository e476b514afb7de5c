# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders from files: activations of captured rows, and features as operations.

    sae = Autoencoder.load("gemma-scope/layer_12")         # SAELens's folder, or params.npz
    ids, values = sae.top(rows, 8)                          # of captured rows
    happy = sae.op(1234, "post_block", 12, value=8.0)       # for SamplingParams(steering=[happy])

With x the row, z = (x - b_dec) W_enc + b_enc where the file says that b_dec is subtracted, else
z = x W_enc + b_enc; the activations are z where z > threshold, else 0: ReLU with threshold 0,
JumpReLU else (Rajamanoharan et al. 2024, arXiv:2407.14435). The engine computes the same of one
feature: docs/steering.md, "Features".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

_WEIGHTS = "sae_weights.safetensors"
_ARCHITECTURES = ("standard", "jumprelu")


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A sparse autoencoder of one site, in float32."""

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
    source: str
    """The file, for errors."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of Gemma Scope (`params.npz`), or a folder of SAELens (`cfg.json` and
        `sae_weights.safetensors`).

        Raises:
            ValueError: a file cannot be read, its architecture or scaling is another one, a tensor
                is missing, of another shape, or not finite; the message names file and tensor.
        """
        path = Path(path)
        try:
            if path.is_dir():
                config = json.loads((path / "cfg.json").read_text())
                if not isinstance(config, dict):
                    raise ValueError("cfg.json has no object")
                _need_known(path / "cfg.json", config)
                tensors, file = load_file(path / _WEIGHTS), path / _WEIGHTS
                subtracts = bool(config.get("apply_b_dec_to_input", False))
            else:
                with np.load(path, allow_pickle=False) as archive:
                    tensors = {name: torch.from_numpy(archive[name]) for name in archive.files}
                file, subtracts = path, False
        except (OSError, EOFError, BadZipFile, SafetensorError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as an autoencoder: {error}") from error
        return cls._made(str(file), tensors, subtracts)

    @classmethod
    def _made(cls, source: str, tensors: Mapping[str, torch.Tensor], subtracts: bool) -> Self:
        encoder = _tensor(source, tensors, "W_enc", None, None)
        hidden, number = encoder.shape
        decoder = _tensor(source, tensors, "W_dec", number, hidden)
        bias, decoder_bias = (
            _tensor(source, tensors, name, size)
            for name, size in (("b_enc", number), ("b_dec", hidden))
        )
        if subtracts:
            bias = bias - decoder_bias @ encoder
        threshold = torch.zeros(number)
        if "threshold" in tensors:
            threshold = _tensor(source, tensors, "threshold", number).clamp(min=0)
        return cls(encoder, decoder, bias, decoder_bias, threshold, source)

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
        before = rows.float() @ self.encoder + self.bias
        return torch.where(before > self.threshold, before, 0.0)

    def decode(self, activations: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., hidden] that activations [..., features] stand for."""
        return activations.float() @ self.decoder + self.decoder_bias

    def top(self, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most active features of each row: ids, int64, and activations, float32, both
        [..., count]."""
        found = self.encode(rows).topk(count)
        return found.indices, found.values

    def op(
        self, feature: int, point: str, layers: int | str | list[int], **fields: Any
    ) -> dict[str, Any]:
        """Return the operation `feature` for `SamplingParams(steering=[...])` and for requests.

        Args:
            feature: its number.
            point: the point that the autoencoder was trained on.
            layers: the layer likewise.
            fields: what it does, such as `value=8.0` or `add=4.0`: docs/steering.md, "Features".

        Raises:
            ValueError: there is no such feature.
        """
        if not 0 <= feature < self.num_features:
            raise ValueError(f"feature: {feature} is none of 0-{self.num_features - 1}")
        return {
            "op": "feature",
            "point": point,
            "layers": layers,
            "encoder": self.encoder[:, feature].clone(),
            "decoder": self.decoder[feature].clone(),
            "bias": float(self.bias[feature]),
            "threshold": float(self.threshold[feature]),
            **fields,
        }


def _need_known(file: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError where a configuration asks for what is not computed here."""
    architecture = config.get("architecture", "standard")
    if architecture not in _ARCHITECTURES:
        known = " and ".join(_ARCHITECTURES)
        raise ValueError(f"{file.name}: architecture {str(architecture)[:60]!r}; {known} are read")
    scaling = config.get("normalize_activations", "none")
    if scaling not in ("none", None):
        raise ValueError(
            f"{file.name}: normalize_activations {str(scaling)[:60]!r} is not read: fold the "
            "scale into the weights, as SAELens does when it saves for inference"
        )


def _tensor(
    source: str, tensors: Mapping[str, torch.Tensor], name: str, *shape: int | None
) -> torch.Tensor:
    """Return a tensor of a file in float32.

    Args:
        shape: None for any size.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"{source} lacks {name}; it has {sorted(tensors)[:12]}")
    fits = tensor.dim() == len(shape) and all(
        size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits or not tensor.is_floating_point() or not tensor.numel():
        wanted = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"{source}: {name} is {tensor.dtype} {list(tensor.shape)}, needed are floats {wanted}"
        )
    made = tensor.float()
    if not made.isfinite().all():
        raise ValueError(f"{source}: {name} has numbers that are not finite")
    return made
