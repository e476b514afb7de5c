# SPDX-License-Identifier: Apache-2.0
"""A sparse autoencoder of a benchmark's model, with random weights, as SAELens saves one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

FEATURES = 65_536
THRESHOLD = 2.0
"""Of the activations, which are of order one: a fortieth of the features is active."""


def save_autoencoder(folder: Path, model: Path, features: int = FEATURES) -> str:
    """Write a JumpReLU autoencoder in bfloat16, and return the entry of `--features` that has it at
    `post_block` of the middle layer."""
    config = json.loads((model / "config.json").read_text())
    hidden, layer = config["hidden_size"], config["num_hidden_layers"] // 2
    generator = torch.Generator().manual_seed(0)
    encoder = torch.randn(hidden, features, generator=generator) / hidden**0.5
    tensors = {
        "W_enc": encoder.bfloat16(),
        "W_dec": encoder.T.contiguous().bfloat16(),
        "b_enc": torch.zeros(features),
        "b_dec": torch.zeros(hidden),
        "threshold": torch.full((features,), THRESHOLD),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    described = {"architecture": "jumprelu", "apply_b_dec_to_input": False}
    (folder / "cfg.json").write_text(json.dumps(described))
    return f"sae={folder}@post_block.{layer}"
