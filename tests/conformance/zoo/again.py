# SPDX-License-Identifier: Apache-2.0
"""Architectures that are another one's class: by another name, or of other checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ..tiny import INNER, LAYERS, Tensors, TinyModel
from .hybrid import HYBRID
from .moe import MOE
from .weights import packed

_BASES = {row.name: row for rows in (MOE, HYBRID) for row in rows}
_NARROW = 96
"""Of the last layer's MLP in a Nemotron-H that Puzzle has made; the others have `INNER`."""


def _again(name: str, architecture: str, base: str, **changes: Any) -> TinyModel:
    row = _BASES[base]
    model = row.model or row.architecture
    return replace(row, name=name, architecture=architecture, model=model, **changes)


def _fused_qkv(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return packed(tensors, ("q_proj", "k_proj", "v_proj"), "qkv_proj")


def _by_layer(config: PretrainedConfig) -> PretrainedConfig:
    """What the code of such checkpoints makes of the config: one for each layer."""

    def of_layer(whole: PretrainedConfig, layer: int) -> PretrainedConfig:
        own = copy.copy(whole)
        own.intermediate_size = _NARROW if layer == LAYERS - 1 else INNER
        return own

    kind = type(config)
    config.__class__ = type(kind.__name__, (kind,), {"get_nemotron_h_config_for_layer": of_layer})
    return config


_LAST = f"layers.{LAYERS - 1}.mixer."


@torch.no_grad()
def _narrowed(model: nn.Module) -> None:
    """The same with the other's units: they are zeros."""
    model.get_parameter(f"model.{_LAST}up_proj.weight")[_NARROW:] = 0.0


def _without_zeros(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    cut = {f"{_LAST}up_proj.weight": 0, f"{_LAST}down_proj.weight": 1}
    return {
        name: next((t.narrow(d, 0, _NARROW) for end, d in cut.items() if name.endswith(end)), t)
        for name, t in tensors.items()
    }


AGAIN = (
    _again("exaone_moe_first", "ExaoneMoEForCausalLM", "exaone_moe"),
    _again("mimo_v2", "MiMoV2ForCausalLM", "mimo_v2_flash", checkpoint=_fused_qkv),
    _again(
        "nemotron_h_puzzle",
        "NemotronHPuzzleForCausalLM",
        "nemotron_h_dense",
        adjust=_narrowed,
        checkpoint=_without_zeros,
        engine={**_BASES["nemotron_h_dense"].engine, "hf_overrides": _by_layer},
        note="without experts; the MLPs of two widths",
    ),
)
