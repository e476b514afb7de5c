# SPDX-License-Identifier: Apache-2.0
"""Tensors of an autoencoder's file in one form, and checks of what a file says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

Tensors = Mapping[str, torch.Tensor]
"""Name in the file -> tensor."""
_ROWS = 1 << 12
"""Number of rows of a matrix that are looked at together."""


class Read(NamedTuple):
    """Tensors of a file, in one form. With x the row times `input_scale`, the encoder makes
    z = gain * ((x - b_dec) W_enc) + b_enc, or x W_enc where `b_dec` is not subtracted."""

    source: str
    """The file, for errors."""
    encoder: torch.Tensor
    """[hidden, features], of the file's dtype."""
    decoder: torch.Tensor
    """[features, width], likewise; the width is hidden but of a transcoder."""
    bias: torch.Tensor
    """float32 [features]."""
    decoder_bias: torch.Tensor
    """float32 [width]."""
    threshold: torch.Tensor | None = None
    """float32 [features]; None for 0."""
    k: int = 0
    """Number of features that stay active in a row; 0 for all."""
    subtracts: bool = False
    """True if `b_dec` is subtracted from the row."""
    gain: torch.Tensor | None = None
    """float32 [features]: what the encoder's columns are multiplied with; None for 1."""
    decoder_gain: torch.Tensor | None = None
    """float32 [features]: what the decoder's rows are multiplied with; None for 1."""
    input_scale: float = 1.0
    output_scale: float = 1.0
    """Number by which the decoded row is divided."""
    scaling: str = ""
    """A scaling of `scaling.SCALINGS`; "" for none."""
    transcodes: bool | None = False
    """True if the decoder writes another site than the encoder reads; None if the file does not
    say."""
    skip: torch.Tensor | None = None
    """[width, hidden]: a transcoder adds it times the row to what it decodes."""


def of_columns(
    source: str, tensors: Tensors, *, jumps: bool = False, transcodes: bool | None = False
) -> Read:
    """Check tensors by the names of SAELens, where features are columns of the encoder.

    Args:
        jumps: True if there must be a threshold.
    """
    encoder = tensor_of(source, tensors, "W_enc", None, None)
    hidden, number = encoder.shape
    decoder = tensor_of(source, tensors, "W_dec", number, None if transcodes else hidden)
    made = Read(
        source,
        encoder,
        decoder,
        tensor_of(source, tensors, "b_enc", number).float(),
        tensor_of(source, tensors, "b_dec", decoder.shape[1]).float(),
        transcodes=transcodes,
    )
    if jumps or "threshold" in tensors:
        made = made._replace(threshold=tensor_of(source, tensors, "threshold", number).float())
    return made


def of_rows(
    file: Path,
    tensors: Tensors,
    names: tuple[str, ...],
    turned: bool = False,
    transcodes: bool = False,
) -> Read:
    """Check an autoencoder whose encoder is [features, hidden], as `torch.nn.Linear` has it.

    Args:
        names: of encoder, its bias, decoder and its bias.
        turned: True if the decoder is [hidden, features].
    """
    encoder, decoder = (tensor_of(str(file), tensors, names[i], None, None) for i in (0, 2))
    decoder = decoder.T if turned else decoder
    made = {
        "W_enc": encoder.T,
        "b_enc": tensor_of(str(file), tensors, names[1], len(encoder)),
        "W_dec": decoder,
        "b_dec": tensor_of(str(file), tensors, names[3], decoder.shape[1]),
    }
    if "threshold" in tensors:
        made["threshold"] = tensors["threshold"].expand(len(encoder))
    return of_columns(str(file), made, transcodes=transcodes)


def with_k(made: Read, k: int) -> Read:
    """Return a TopK autoencoder. Raises ValueError if it has fewer features."""
    if k > len(made.bias):
        raise ValueError(f"{made.source}: k is {k}, there are {len(made.bias)} features")
    return made._replace(k=k)


def config_of(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{file.name} has no object")
    return config


def known(
    config: Mapping[str, Any], key: str, default: str, words: tuple[str, ...], remedy: str = ""
) -> str:
    """Return a word of a configuration, of some that are known."""
    word = config.get(key, default)
    word = default if word is None else word
    if word not in words:
        raise ValueError(f"{key} {str(word)[:60]!r} is not read, {', '.join(words)} are{remedy}")
    return str(word)


def count_of(config: Mapping[str, Any], key: str, file: str = "cfg.json") -> int:
    """Return a positive int of a configuration."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{file}: {key} must be a positive int, got {str(value)[:60]!r}")
    return value


def positive(config: Mapping[str, Any], key: str, file: str) -> float:
    """Return a positive number of a configuration, less than 1e30."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ValueError(f"{file}: {key} must be a positive number, got {str(value)[:60]!r}")
    return float(value)


def refuse_true(config: Mapping[str, Any], keys: tuple[str, ...], file: str) -> None:
    """Raise a ValueError for keys of a configuration that turn on what is not computed here."""
    for key in keys:
        if config.get(key):
            raise ValueError(f"{file}: {key} {str(config[key])[:60]!r} is not read")


def tensor_of(source: str, tensors: Tensors, name: str, *shape: int | None) -> torch.Tensor:
    """Return a tensor of a file.

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
    if not all(bool(some.isfinite().all()) for some in tensor.split(_ROWS)):
        raise ValueError(f"{source}: {name} has numbers that are not finite")
    return tensor
