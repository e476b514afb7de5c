# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders of the tiny models, made up, in folders as SAELens writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conformance.models import HIDDEN

FEATURES = 160


def made_up(seed: int, hidden: int = HIDDEN, features: int = FEATURES) -> dict[str, torch.Tensor]:
    """Tensors by SAELens's names, with thresholds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "W_enc": normal(hidden, features) / hidden**0.5,
        "W_dec": normal(features, hidden) / hidden**0.5,
        "b_enc": normal(features) / 4,
        "b_dec": normal(hidden),
        "threshold": normal(features).abs() / 2,
    }


def save_autoencoder(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any
) -> Path:
    """Write a folder, JumpReLU that does not subtract `b_dec` unless the configuration says so."""
    folder.mkdir()
    config = {"architecture": "jumprelu", "apply_b_dec_to_input": False, **config}
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file(made_up(1) if tensors is None else tensors, folder / "sae_weights.safetensors")
    return folder
