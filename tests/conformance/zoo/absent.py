# SPDX-License-Identifier: Apache-2.0
"""Architectures without a tiny model, and why: the table says "wired, unverified", or refused.

Names are those of vLLM's registry. A class that is not wired needs no reason here: the reason is in
patches/taps.
"""

from __future__ import annotations

_CUDA_ONLY = "vLLM has no CPU code for it (vllm.models.*)"

ABSENT: dict[str, str] = {
    "Glm5NextForCausalLM": f"{_CUDA_ONLY}; its class was measured on a GPU, below",
    "InklingForConditionalGeneration": _CUDA_ONLY,
    "Qwen4ExpForCausalLM": f"{_CUDA_ONLY}; its class was measured on a GPU, below",
}

APART: dict[str, str] = {
    "vllm/models/glm5next/common/model.py:Glm5NextDecoderLayer": "tests.gpu.hyper on an H100 in "
    "bfloat16: read and steered at every point, against [formulas in plain PyTorch]"
    "(hook-contract-families.md#hyper-connections) ([output](measurements/h100-hyper.txt))",
    "vllm/models/qwen4_exp/nvidia/model.py:Qwen4ExpDecoderLayer": "tests.gpu.hyper on an H100 in "
    "bfloat16: the same ([output](measurements/h100-qwen4-exp.txt))",
}
"""Classes measured otherwise than by `python -m tests.conformance`, and how."""
