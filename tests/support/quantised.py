# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of quantised weights, written here, and transformers on the same rounded numbers.

A `Format` rounds a weight, and says which tensors a checkpoint has for it and which numbers these
stand for. Formats with activations of 8 bits round what a layer reads, too, so the reference does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

OUTLIER = 12
GROUP = 128
"""Inputs that share a scale, in the formats of 4-bit integers."""
FP4_GROUP = 16
FP8 = torch.float8_e4m3fn
FP8_MOST, FP4_MOST = 448.0, 6.0
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Numbers that E2M1 has, without the sign."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of eight that each nibble of AWQ's int32 holds, from the lowest."""

Stored = dict[str, torch.Tensor]
Packed = tuple[Stored, torch.Tensor]
"""Tensors by their last name, and the weight [out, in] in float32 that they stand for."""
Rounding = Callable[[torch.Tensor], torch.Tensor]


def round_fp8(values: torch.Tensor) -> torch.Tensor:
    """Round each row to FP8 with a scale of its own; [..., n], float32."""
    scale = values.abs().amax(-1, keepdim=True) / FP8_MOST
    return (values / scale).to(FP8).float() * scale


def round_int8(values: torch.Tensor) -> torch.Tensor:
    """Round each row to integers of 8 bits, symmetric, with a scale of its own."""
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round() * scale


def pack_fp8(weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / FP8_MOST
    stored = (weight / scale).to(FP8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def pack_int8(weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round()
    return {"weight": stored.to(torch.int8), "weight_scale": scale}, stored * scale


def grouped_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers from -8 to 7 [out, in], bfloat16 scales [out, groups], and what both stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7).bfloat16()
    by = scales.float().unsqueeze(2)
    stored = (groups / by).round().clamp(-8, 7)
    return stored.flatten(1).to(torch.int8), scales, (stored * by).flatten(1)


def pack_int4(weight: torch.Tensor) -> Packed:
    stored, scales, stands = grouped_int4(weight)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    packed = pack_to_int32(stored, 4)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}, stands


def nibbles(values: torch.Tensor) -> torch.Tensor:
    """Put eight unsigned numbers of 4 bits [..., 8] into an int32 [...], the first one lowest."""
    shifted = values.long() << (4 * torch.arange(8))
    joined = shifted.sum(-1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).to(torch.int32)


def pack_gptq(weight: torch.Tensor) -> Packed:
    stored, scales, stands = grouped_int4(weight)
    rows = (stored.T.long() + 8).unflatten(0, (-1, 8)).movedim(1, 2)
    # Symmetric: the zero is 8, and the format stores one less.
    zeros = torch.full((scales.shape[1], weight.shape[0] // 8), 0x77777777, dtype=torch.int32)
    tensors = {"qweight": nibbles(rows), "qzeros": zeros, "scales": scales.T.contiguous()}
    return tensors, stands


def pack_awq(weight: torch.Tensor) -> Packed:
    """Unsigned numbers with a zero of each group, eight columns to an int32 in AWQ's order."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).bfloat16()
    by = scales.float()
    zeros = (-low / by).round().clamp(0, 15)
    stored = ((groups / by.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, 15)
    stands = ((stored - zeros.unsqueeze(2)) * by.unsqueeze(2)).flatten(1)

    def columns(values: torch.Tensor) -> torch.Tensor:
        return nibbles(values.T.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)])

    tensors = {"qweight": columns(stored.flatten(1)), "qzeros": columns(zeros)}
    return {**tensors, "scales": scales.T.contiguous()}, stands


def pack_fp4(weight: torch.Tensor) -> Packed:
    """NVFP4: a scale in FP8 for each 16 inputs, and one number for all weights of the model."""
    whole = torch.tensor(FP8_MOST)
    groups = weight.unflatten(1, (-1, FP4_GROUP))
    scales = (groups.abs().amax(2) / FP4_MOST * whole).clamp(max=FP8_MOST).to(FP8)
    by = scales.float().unsqueeze(2) / whole
    scaled = groups / by
    nearest = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    stored = FP4[nearest] * scaled.sign()
    packed = pack_fp4_to_uint8(stored.flatten(1).bfloat16())
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole[None]}
    return tensors, (stored * by).flatten(1)


def compressed(form: str, weights: dict[str, Any], reads: dict[str, Any] | None) -> dict[str, Any]:
    """The entry of a config.json for compressed-tensors.

    Args:
        reads: how what a layer reads is rounded, token by token; None for not at all.
    """
    symmetric = {"symmetric": True, "dynamic": False}
    tokens = None if reads is None else {"symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": {**symmetric, **weights},
        "input_activations": None if tokens is None else {**tokens, **(reads or {})},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Format:
    """One way to store weights in fewer bits."""

    config: dict[str, Any]
    """The entry `quantization_config` of config.json."""
    pack: Callable[[torch.Tensor], Packed]
    reads: Rounding | None = None
    """Rounds what a layer reads, token by token; None where it is not rounded."""


CHANNEL = {"strategy": "channel"}
FLOAT8, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": FP4_GROUP}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
}
FORMATS = {
    "FP8 W8A8": Format(
        compressed("float-quantized", {**FLOAT8, **CHANNEL}, FLOAT8), pack_fp8, round_fp8
    ),
    "FP8 W8A16": Format(compressed("float-quantized", {**FLOAT8, **CHANNEL}, None), pack_fp8),
    "INT8 W8A8": Format(
        compressed("int-quantized", {**INT8, **CHANNEL}, INT8), pack_int8, round_int8
    ),
    "INT4 W4A16": Format(compressed("pack-quantized", INT4, None), pack_int4),
    "GPTQ": Format(GPTQ, pack_gptq),
    "AWQ": Format(AWQ, pack_awq),
    "NVFP4 W4A16": Format(compressed("nvfp4-pack-quantized", NVFP4, None), pack_fp4),
}


def roughen(folder: Path) -> None:
    """Give each row of a model's weights one number of `OUTLIER` times their size, as models have.

    Scales of rows then leave few steps for the others, so that rounding the weights to 8 bits moves
    a row of the stream by more than bfloat16 does. Queries and keys stay: their softmax would be
    sharp, and what it picks would depend on the last bit.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(9)
    for name in linear_names(tensors):
        if ".q_proj." in name or ".k_proj." in name:
            continue
        out, width = tensors[name].shape
        at = torch.randint(0, width, (out,), generator=generator)
        tensors[name][torch.arange(out), at] = OUTLIER * tensors[name].float().std().bfloat16()
    save_file(tensors, file, {"format": "pt"})


def linear_names(tensors: Stored) -> list[str]:
    """Name the weights that are rounded: of attention and of the MLP."""
    return [name for name in tensors if name.endswith("_proj.weight")]


def save_quantised(source: Path, target: Path, form: Format) -> nn.Module:
    """Write a checkpoint in a format, and return transformers' model of the same numbers.

    Args:
        source: a folder with one file of weights in bfloat16.
        target: a folder that is not there yet.
    """
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    tensors = load_file(source / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name in linear_names(tensors):
        layer = name.removesuffix(".weight")
        stored, stands = form.pack(tensors.pop(name).float())
        tensors |= {f"{layer}.{last}": tensor.contiguous() for last, tensor in stored.items()}
        module = model.get_submodule(layer)
        module.weight.data = stands
        if form.reads is not None:
            module.register_forward_pre_hook(partial(_rounded, form.reads))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return model


def _rounded(reads: Rounding, _: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    rounded: torch.Tensor = reads(args[0].float()).to(args[0].dtype)
    return (rounded, *args[1:])
