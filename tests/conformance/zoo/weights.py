# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one architecture as those of another: names, and what one tensor packs."""

from __future__ import annotations

import re

import torch
from transformers import PretrainedConfig

from ..tiny import Tensors


def renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    """Names with each rule (pattern, replacement) applied in turn."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    return result


def packed(tensors: Tensors, parts: tuple[str, ...], whole: str) -> Tensors:
    """`parts` (each the end of a module's name), concatenated in order, as `whole`."""
    result = dict(tensors)
    for name in tensors:
        stem, _, kind = name.rpartition(".")
        if stem.endswith(f".{parts[0]}"):
            prefix = stem.removesuffix(parts[0])
            result[f"{prefix}{whole}.{kind}"] = torch.cat(
                [result.pop(f"{prefix}{part}.{kind}") for part in parts]
            )
    return result


def experts_apart(tensors: Tensors) -> Tensors:
    """Weights of all experts in one tensor, as one of each expert and projection."""
    result = dict(tensors)
    for name in tensors:
        stem, found, kind = name.partition("experts.")
        if found and kind in ("gate_up_proj", "down_proj"):
            for i, expert in enumerate(result.pop(name)):
                parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
                for part, whole in zip(kind.removesuffix("_proj").split("_"), parts, strict=True):
                    result[f"{stem}experts.{i}.{part}_proj.weight"] = whole
    return result


def unchanged(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return tensors
