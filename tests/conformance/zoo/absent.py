# SPDX-License-Identifier: Apache-2.0
"""Architectures without a tiny model, and why: the table says "wired, unverified", or refused.

Names are those of vLLM's registry. A class that is not wired needs no reason here: the reason is in
patches/taps.
"""

from __future__ import annotations

_NOT_THERE = "transformers lacks it, and no other model there computes the same"
_CUDA_ONLY = "vLLM has no CPU code for it (vllm.models.*)"

ABSENT: dict[str, str] = {
    "BailingMoeV2_5ForCausalLM": _NOT_THERE,
    "BailingMoeV3ForCausalLM": _NOT_THERE,
    "DeciLMForCausalLM": _NOT_THERE,
    "DeepseekForCausalLM": _NOT_THERE,
    "DeepseekV32ForCausalLM": _CUDA_ONLY,
    "ExaoneMoEForCausalLM": "another name for ExaoneMoeForCausalLM",
    "Glm5NextForCausalLM": f"{_CUDA_ONLY}; its class was measured on a GPU, below",
    "GlmMoeDsaForCausalLM": _CUDA_ONLY,
    "HCXVisionV2ForCausalLM": _NOT_THERE,
    "InklingForCausalLM": _CUDA_ONLY,
    "InklingForConditionalGeneration": _CUDA_ONLY,
    "K2HorizonForCausalLM": _NOT_THERE,
    "LongcatFlashForCausalLM": "no tiny model yet",
    "LongcatFlashNgramForCausalLM": _NOT_THERE,
    "MiMoV2ForCausalLM": "the class of MiMoV2FlashForCausalLM with another checkpoint",
    "MiniMaxM3SparseForCausalLM": _CUDA_ONLY,
    "MistralLarge3ForCausalLM": "DeepseekV3ForCausalLM with Mistral's names for weights",
    "NemotronHPuzzleForCausalLM": "the class of NemotronHForCausalLM with another config",
    "PanguEmbeddedForCausalLM": _NOT_THERE,
    "PanguProMoEV2ForCausalLM": _NOT_THERE,
    "PanguUltraMoEForCausalLM": _NOT_THERE,
    "Qwen4ExpForCausalLM": _CUDA_ONLY,
    "SarvamMLAForCausalLM": _NOT_THERE,
    "Step1ForCausalLM": _NOT_THERE,
    "Step3TextForCausalLM": _NOT_THERE,
}

APART: dict[str, str] = {
    "vllm/models/glm5next/common/model.py:Glm5NextDecoderLayer": "tests.gpu.hyper on an H100 in "
    "bfloat16: read and steered at every point, against [formulas in plain PyTorch]"
    "(hook-contract.md#hyper-connections) ([output](measurements/h100-hyper.txt))",
}
"""Classes measured otherwise than by `python -m tests.conformance`, and how."""
