# SPDX-License-Identifier: Apache-2.0
"""Tiny random models whose stream has lanes, and each one's formulas in plain PyTorch."""

from .glm5_next import GLM5Next
from .hy_v4 import HYV4
from .plain import Plain
from .qwen4_exp import Qwen4Exp

MODELS: dict[str, type[Plain]] = {
    "hy_v4": HYV4,
    "glm5_next": GLM5Next,
    "qwen4_exp": Qwen4Exp,
}
