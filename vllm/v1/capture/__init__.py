# SPDX-License-Identifier: Apache-2.0
"""Activation capture reads the residual stream of requests while they are served."""

from vllm.v1.capture.attention import AttentionRows
from vllm.v1.capture.features import FeatureRows
from vllm.v1.capture.lens import LensRows
from vllm.v1.capture.results import NO_TOKEN, CapturedRows, CaptureResult, stack

__all__ = [
    "NO_TOKEN",
    "AttentionRows",
    "CaptureResult",
    "CapturedRows",
    "FeatureRows",
    "LensRows",
    "stack",
]
