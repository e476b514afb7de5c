# SPDX-License-Identifier: Apache-2.0
"""Files of sparse autoencoders, as the tools that train them write them, as tensors of one kind.

SAELens              folder with cfg.json, sae_weights.safetensors: ReLU, JumpReLU, TopK, Gated
Gemma Scope          params.npz: JumpReLU
sparsify             folder with cfg.json, sae.safetensors: TopK
dictionary_learning  folder with config.json, ae.pt: ReLU, JumpReLU, BatchTopK by its threshold

Tensors of safetensors and .pt are mapped from the file: what is not used takes no memory.
"""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]
"""Name in the file -> tensor."""
_ROWS = 1 << 12
"""Number of rows of a matrix that are looked at together."""


class Read(NamedTuple):
    """Tensors of a file, in one form."""

    source: str
    """The file, for errors."""
    encoder: torch.Tensor
    """[hidden, features], of the file's dtype."""
    decoder: torch.Tensor
    """[features, hidden], likewise."""
    bias: torch.Tensor
    """float32 [features]; `b_dec` is subtracted from the row before, unless `subtracts` is
    False."""
    decoder_bias: torch.Tensor
    """float32 [hidden]."""
    threshold: torch.Tensor | None
    """float32 [features]; None for 0."""
    k: int
    """Number of features that stay active in a row; 0 for all."""
    subtracts: bool


def read(path: Path) -> Read:
    """Read a file, or a folder, of a sparse autoencoder.

    Raises:
        ValueError: it cannot be read, is of none of the kinds above, has an activation or a scaling
            that is not computed here, or a tensor is missing, of another shape, or not finite.
    """
    try:
        if not path.is_dir():
            with np.load(path, allow_pickle=False) as archive:
                tensors = {name: torch.from_numpy(archive[name]) for name in archive.files}
            return _of_columns(str(path), tensors, subtracts=False)
        for name, reader in _FOLDERS.items():
            if (path / name).exists():
                return reader(path / name)
        raise ValueError(f"the folder has none of {', '.join(_FOLDERS)}")
    except (
        OSError,
        EOFError,
        BadZipFile,
        SafetensorError,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
    ) as error:
        raise ValueError(f"{path} cannot be read as an autoencoder: {error}") from error


def _saelens(file: Path) -> Read:
    config = _config(file.parent / "cfg.json")
    kind = _known(config, "architecture", "standard", ("standard", "jumprelu", "topk", "gated"))
    _known(config, "normalize_activations", "none", ("none",), "; fold the scale into the weights")
    if config.get("rescale_acts_by_decoder_norm"):
        raise ValueError(
            "cfg.json: rescale_acts_by_decoder_norm is not read: fold the decoder's norms into "
            "the weights, as SAELens does when it saves for inference"
        )
    # The tool's own default is to subtract, yet files of Gemma Scope say False: no guess is safe.
    subtracts = config.get("apply_b_dec_to_input")
    if not isinstance(subtracts, bool):
        raise ValueError("cfg.json lacks apply_b_dec_to_input: say true or false there")
    tensors: Tensors = load_file(file)
    k = _count(config, "k") if kind == "topk" else 0
    if kind != "gated":
        return _of_columns(str(file), tensors, subtracts, k)
    return _gated(str(file), tensors, subtracts)


def _gated(source: str, tensors: Tensors, subtracts: bool) -> Read:
    """Return a gated autoencoder as the JumpReLU that it is, since its two encoders differ by a
    factor alone (Rajamanoharan et al. 2024, arXiv:2404.16014, section 3.2.1): with y = x W_enc,
    y + b_gate > 0 where y exp(r_mag) + b_mag > b_mag - b_gate exp(r_mag)."""
    encoder = _tensor(source, tensors, "W_enc", None, None)
    number = encoder.shape[1]
    gate, factor, bias = (
        _tensor(source, tensors, name, number).float() for name in ("b_gate", "r_mag", "b_mag")
    )
    factor = factor.exp()
    made = {"W_enc": encoder.float() * factor, "b_enc": bias, "threshold": bias - gate * factor}
    return _of_columns(source, {**tensors, **made}, subtracts)


def _sparsify(file: Path) -> Read:
    config = _config(file.parent / "cfg.json")
    _known(config, "activation", "topk", ("topk",))
    if config.get("transcode") or config.get("skip_connection"):
        raise ValueError("cfg.json: a transcoder reads one site and writes another: not read")
    return _of_rows(
        file,
        load_file(file),
        ("encoder.weight", "encoder.bias", "W_dec", "b_dec"),
        k=_count(config, "k"),
    )


def _dictionary_learning(file: Path) -> Read:
    config = _config(file.parent / "config.json").get("trainer")
    kinds = ("AutoEncoder", "BatchTopKSAE", "JumpReluAutoEncoder")
    kind = _known(config if isinstance(config, dict) else {}, "dict_class", "none", kinds)
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise ValueError(f"{file.name} is no mapping of tensors")
    if kind == "JumpReluAutoEncoder":
        return _of_columns(str(file), tensors, subtracts=False)
    if kind == "AutoEncoder":
        names = ("encoder.weight", "encoder.bias", "decoder.weight", "bias")
        return _of_rows(file, tensors, names, turned=True)
    if "threshold" not in tensors or not float(tensors["threshold"]) >= 0:
        raise ValueError(
            f"{file.name}: a BatchTopK autoencoder serves by its threshold, it has none"
        )
    names = ("encoder.weight", "encoder.bias", "decoder.weight", "b_dec")
    return _of_rows(file, tensors, names, turned=True)


_FOLDERS: dict[str, Callable[[Path], Read]] = {
    "sae_weights.safetensors": _saelens,
    "sae.safetensors": _sparsify,
    "ae.pt": _dictionary_learning,
}
"""File in a folder -> its reader."""


def _of_rows(
    file: Path, tensors: Tensors, names: tuple[str, ...], k: int = 0, turned: bool = False
) -> Read:
    """Read an autoencoder whose encoder is [features, hidden], as `torch.nn.Linear` has it, and
    that subtracts `b_dec`.

    Args:
        names: of encoder, its bias, decoder and its bias.
        turned: True if the decoder is [hidden, features].
    """
    encoder, decoder = (_tensor(str(file), tensors, names[i], None, None) for i in (0, 2))
    made = {
        "W_enc": encoder.T,
        "b_enc": _tensor(str(file), tensors, names[1], len(encoder)),
        "W_dec": decoder.T if turned else decoder,
        "b_dec": _tensor(str(file), tensors, names[3], encoder.shape[1]),
    }
    if "threshold" in tensors:
        made["threshold"] = tensors["threshold"].expand(len(encoder))
    return _of_columns(str(file), made, True, k)


def _of_columns(source: str, tensors: Tensors, subtracts: bool, k: int = 0) -> Read:
    """Check tensors by the names of SAELens, where features are columns of the encoder."""
    encoder = _tensor(source, tensors, "W_enc", None, None)
    hidden, number = encoder.shape
    decoder = _tensor(source, tensors, "W_dec", number, hidden)
    bias = _tensor(source, tensors, "b_enc", number).float()
    decoder_bias = _tensor(source, tensors, "b_dec", hidden).float()
    threshold = None
    if "threshold" in tensors:
        threshold = _tensor(source, tensors, "threshold", number).float()
    if k > number:
        raise ValueError(f"{source}: k is {k}, there are {number} features")
    return Read(source, encoder, decoder, bias, decoder_bias, threshold, k, subtracts)


def _config(file: Path) -> dict[str, Any]:
    config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{file.name} has no object")
    return config


def _known(
    config: Mapping[str, Any], key: str, default: str, known: tuple[str, ...], remedy: str = ""
) -> str:
    """Return a word of a configuration, of some that are known."""
    word = config.get(key, default)
    word = default if word is None else word
    if word not in known:
        raise ValueError(f"{key} {str(word)[:60]!r} is not read, {', '.join(known)} are{remedy}")
    return str(word)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"cfg.json: {key} must be a positive int, got {str(value)[:60]!r}")
    return value


def _tensor(source: str, tensors: Tensors, name: str, *shape: int | None) -> torch.Tensor:
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
