# SPDX-License-Identifier: Apache-2.0
"""Files of published suites of sparse autoencoders, as tensors of one kind.

Gemma Scope    params.npz: JumpReLU; its transcoders likewise (arXiv:2408.05147)
Gemma Scope 2  folder with config.json, params.safetensors: JumpReLU, transcoders, skip transcoders
Llama Scope    folder with hyperparams.json, checkpoints/final.safetensors: JumpReLU
               (arXiv:2410.20526)

The layouts are those that SAELens 6.54.12 reads, which `tests/support/autoencoder_oracles.py` ran.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from vllm.v1.features.tensors import (
    Read,
    config_of,
    known,
    of_columns,
    of_rows,
    positive,
    refuse_true,
    tensor_of,
)

LLAMA_WEIGHTS = Path("checkpoints") / "final.safetensors"
"""Llama Scope's file of tensors, beside `hyperparams.json`."""
_UNIT = 1e-2
"""Most that the norm of a decoder's row may differ from 1 to count as 1."""


def gemma_scope(file: Path) -> Read:
    """Read `params.npz`. It does not say whether it is a transcoder."""
    with np.load(file, allow_pickle=False) as archive:
        tensors = {name: torch.from_numpy(archive[name]) for name in archive.files}
    return of_columns(str(file), tensors, jumps=True, transcodes=None)


def gemma_scope_2(file: Path) -> Read:
    """Read `params.safetensors`, whose names are in lower case. Like `params.npz` it does not say
    whether it is a transcoder, unless it has a skip connection."""
    known(config_of(file.parent / "config.json"), "architecture", "none", ("jump_relu",))
    stored, name = load_file(file), "affine_skip_connection"
    renamed = {"w_enc": "W_enc", "w_dec": "W_dec"}
    tensors = {renamed.get(name, name): tensor for name, tensor in stored.items()}
    if name not in tensors:
        return of_columns(str(file), tensors, jumps=True, transcodes=None)
    made = of_columns(str(file), tensors, jumps=True, transcodes=True)
    skip = tensor_of(str(file), tensors, name, len(made.encoder), made.decoder.shape[1])
    return made._replace(skip=skip.T)


def llama_scope(file: Path) -> Read:
    """Read the folder of `hyperparams.json`.

    Weights are of rows whose norm is sqrt(hidden) on average, of the data set, before and after;
    the threshold is of rows as they are.
    """
    config = config_of(file)
    name = file.name
    known(config, "act_fn", "jumprelu", ("jumprelu",))
    known(config, "norm_activation", "dataset-wise", ("dataset-wise",))
    refuse_true(config, ("apply_decoder_bias_to_pre_encoder", "use_glu_encoder"), name)
    weights = file.parent / LLAMA_WEIGHTS
    tensors = load_file(weights)
    names = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
    if others := sorted({*tensors} - {*names}):
        raise ValueError(f"{weights.name} has {others[:4]}: only {', '.join(names)} are read")
    sites = [config.get(f"hook_point_{way}") for way in ("in", "out")]
    transcodes = sites[1] is not None and sites[0] != sites[1]
    made = of_rows(weights, tensors, names, turned=True, transcodes=transcodes)
    if config.get("sparsity_include_decoder_norm"):
        norms = made.decoder.float().norm(dim=1)
        if float((norms - 1).abs().max()) > _UNIT:
            raise ValueError(
                f"{name}: sparsity_include_decoder_norm is read of decoders alone whose rows have "
                f"norm 1, {weights.name} has one of {float(norms.max()):.3g}: fold the norms into "
                "encoder and decoder"
            )
    norm = config.get("dataset_average_activation_norm")
    of_data = norm if isinstance(norm, dict) else {}
    hidden, width = len(made.encoder), made.decoder.shape[1]
    into = hidden**0.5 / positive(of_data, "in", f"{name}: dataset_average_activation_norm")
    out = width**0.5 / positive(of_data, "out", f"{name}: dataset_average_activation_norm")
    threshold = positive(config, "jump_relu_threshold", name) * into
    return made._replace(
        threshold=torch.full_like(made.bias, threshold), input_scale=into, output_scale=out
    )
