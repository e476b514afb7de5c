# SPDX-License-Identifier: Apache-2.0
"""Capture requests of prompts that were sent together."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from vllm.sampling_params import SamplingParams

_P = TypeVar("_P")


class NumberedCapture(dict[str, Any]):
    """`SamplingParams.capture` of one of several prompts that share their parameters, so that what
    is written of them gets names of its own.

    Args:
        prompt: which one.
    """

    def __init__(self, capture: Mapping[str, Any], prompt: int) -> None:
        super().__init__(capture)
        self.prompt = prompt


def numbered(params: _P, count: int) -> list[_P]:
    """`params` for each of `count` prompts."""
    if not isinstance(params, SamplingParams) or not isinstance(params.capture, Mapping):
        return [params] * count
    copies: list[Any] = [copy.copy(params) for _ in range(count)]
    for i, each in enumerate(copies):
        each.capture = NumberedCapture(params.capture, i)
    return copies
