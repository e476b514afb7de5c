# SPDX-License-Identifier: Apache-2.0
"""Files of sparse autoencoders, as the tools that train them write them, as tensors of one kind.

SAELens              folder with cfg.json, sae_weights.safetensors: ReLU, JumpReLU, TopK, Gated;
                     transcoders and skip transcoders of ReLU and JumpReLU
sparsify             folder with cfg.json, sae.safetensors: TopK; transcoders likewise
dictionary_learning  folder with config.json, ae.pt: ReLU, JumpReLU, BatchTopK by its threshold
suites               as `scopes` says

Tensors of safetensors and .pt are mapped from the file: what is not used takes no memory, and a
factor is kept beside its matrix.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vllm.v1.features.scaling import SCALINGS
from vllm.v1.features.scopes import LLAMA_WEIGHTS, gemma_scope, gemma_scope_2, llama_scope
from vllm.v1.features.tensors import (
    Read,
    Tensors,
    config_of,
    count_of,
    known,
    of_columns,
    of_rows,
    positive,
    refuse_true,
    tensor_of,
    with_k,
)

_ONLY_IN = "expected_average_only_in"
"""SAELens's name of one factor for all rows, which its trainer folds into the weights when it saves
for inference, and else leaves in a file beside them."""


def read(path: Path) -> Read:
    """Read a file, or a folder, of a sparse autoencoder.

    Raises:
        ValueError: it cannot be read, is of none of the kinds above, has an activation or a scaling
            that is not computed here, or a tensor is missing, of another shape, or not finite.
    """
    with readable(path):
        file = _found(path)
        return gemma_scope(path) if file == path else _FOLDERS[file.name](file)


def weights_of(path: Path) -> Path:
    """Return the file that has the tensors. Raises ValueError if a folder has none."""
    file = _found(path)
    return file.parent / LLAMA_WEIGHTS if file.suffix == ".json" else file


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within, all that may be wrong with a file is a ValueError that names it."""
    try:
        yield
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


def _found(path: Path) -> Path:
    """Return the file that says of what kind a folder is; a file itself."""
    if not path.is_dir():
        return path
    for name in _FOLDERS:
        if (path / name).exists():
            return path / name
    raise ValueError(f"the folder has none of {', '.join(_FOLDERS)}")


def _saelens(file: Path) -> Read:
    config = config_of(file.parent / "cfg.json")
    kinds = ("standard", "jumprelu", "topk", "gated", *_TRANSCODERS)
    kind = known(config, "architecture", "standard", kinds)
    known(config, "reshape_activations", "none", ("none",))
    for key in ("activation_fn", "activation_fn_str"):
        known(config, key, "relu", ("relu", kind), "; name an activation by architecture")
    refuse_true(config, ("finetuning_scaling_factor",), "cfg.json")
    # The tool's own default is to subtract, yet files of Gemma Scope say False: no guess is safe.
    subtracts = config.get("apply_b_dec_to_input")
    if not isinstance(subtracts, bool):
        raise ValueError("cfg.json lacks apply_b_dec_to_input: say true or false there")
    tensors: Tensors = load_file(file)
    if kind == "gated":
        made = _gated(str(file), tensors)
    else:
        jumps, transcodes = kind.startswith("jumprelu"), kind in _TRANSCODERS
        made = of_columns(str(file), tensors, jumps=jumps, transcodes=transcodes)
    made = made._replace(subtracts=subtracts)
    if kind in _TRANSCODERS and subtracts:
        raise ValueError("cfg.json: apply_b_dec_to_input of a transcoder is not read")
    if kind == "topk":
        made = with_k(made, count_of(config, "k"))
    if config.get("rescale_acts_by_decoder_norm"):
        norms = torch.cat([part.float().norm(dim=1) for part in made.decoder.split(1 << 12)])
        if not bool((norms > 0).all()):
            raise ValueError(f"{file}: W_dec has rows of zeros, by whose norm nothing is divided")
        made = made._replace(bias=made.bias * norms, gain=norms, decoder_gain=1 / norms)
    made = _scaled(file, config.get("normalize_activations"), made)
    return made if "skip" not in kind else _skipping(made, tensors)


_TRANSCODERS = (
    "transcoder",
    "skip_transcoder",
    "jumprelu_transcoder",
    "jumprelu_skip_transcoder",
)
"""SAELens's architectures that read one site and write another."""


def _gated(source: str, tensors: Tensors) -> Read:
    """Return a gated autoencoder as the JumpReLU that it is, since its two encoders differ by a
    factor alone (Rajamanoharan et al. 2024, arXiv:2404.16014, section 3.2.1): with y = x W_enc,
    y + b_gate > 0 where y exp(r_mag) + b_mag > b_mag - b_gate exp(r_mag)."""
    number = tensor_of(source, tensors, "W_enc", None, None).shape[1]
    gate, factor, bias = (
        tensor_of(source, tensors, name, number).float() for name in ("b_gate", "r_mag", "b_mag")
    )
    factor = factor.exp()
    made = of_columns(
        source, {**tensors, "b_enc": bias, "threshold": bias - gate * factor}, jumps=True
    )
    return made._replace(gain=factor)


def _scaled(file: Path, given: object, made: Read) -> Read:
    """Return an autoencoder with the scaling of its rows that SAELens names."""
    key = "normalize_activations"
    name = known({key: given}, key, "none", ("none", _ONLY_IN, *SCALINGS))
    if name == "none":
        return made
    if name != _ONLY_IN:
        return made._replace(scaling=name)
    beside = file.parent / "activation_scaler.json"
    if not beside.exists():
        raise ValueError(
            f"normalize_activations is {_ONLY_IN}, and {beside.name} with its scaling_factor is "
            "not there: add it, or have SAELens fold the factor into the weights"
        )
    config = config_of(beside)
    refuse_true(config, ("has_whitening",), beside.name)
    factor = positive(config, "scaling_factor", beside.name)
    return made._replace(input_scale=factor, output_scale=factor)


def _skipping(made: Read, tensors: Tensors) -> Read:
    """Return a transcoder with the matrix that takes its row past the features."""
    if made.scaling or made.input_scale != 1:
        raise ValueError("a skip transcoder with a scaling of its rows is not read")
    hidden, width = len(made.encoder), made.decoder.shape[1]
    return made._replace(skip=tensor_of(made.source, tensors, "W_skip", width, hidden))


def _sparsify(file: Path) -> Read:
    config = config_of(file.parent / "cfg.json")
    known(config, "activation", "topk", ("topk",))
    transcodes, skips = (
        bool(config.get("transcode")),
        bool(config.get("skip_connection")),
    )
    if skips and not transcodes:
        raise ValueError("cfg.json: skip_connection without transcode is not read")
    tensors = load_file(file)
    names = ("encoder.weight", "encoder.bias", "W_dec", "b_dec")
    made = of_rows(file, tensors, names, transcodes=transcodes)
    made = with_k(made, count_of(config, "k"))._replace(subtracts=not transcodes)
    return _skipping(made, tensors) if skips else made


def _dictionary_learning(file: Path) -> Read:
    config = config_of(file.parent / "config.json").get("trainer")
    kinds = ("AutoEncoder", "BatchTopKSAE", "JumpReluAutoEncoder")
    kind = known(config if isinstance(config, dict) else {}, "dict_class", "none", kinds)
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise ValueError(f"{file.name} is no mapping of tensors")
    if kind == "JumpReluAutoEncoder":
        return of_columns(str(file), tensors, jumps=True)
    names = ("encoder.weight", "encoder.bias", "decoder.weight", "bias")
    if kind == "BatchTopKSAE":
        if "threshold" not in tensors or not float(tensors["threshold"]) >= 0:
            raise ValueError(
                f"{file.name}: a BatchTopK autoencoder serves by its threshold, it has none"
            )
        names = (*names[:3], "b_dec")
    return of_rows(file, tensors, names, turned=True)._replace(subtracts=True)


_FOLDERS: dict[str, Callable[[Path], Read]] = {
    "sae_weights.safetensors": _saelens,
    "sae.safetensors": _sparsify,
    "ae.pt": _dictionary_learning,
    "params.npz": gemma_scope,
    "params.safetensors": gemma_scope_2,
    "hyperparams.json": llama_scope,
}
"""File in a folder -> its reader."""
