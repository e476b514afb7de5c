# SPDX-License-Identifier: Apache-2.0
"""Starts the engine of a command, with steering and the consumer `inline`."""

import argparse

from vllm import LLM
from vllm.config.capture import CaptureConfig
from vllm.engine.arg_utils import EngineArgs

INLINE_BYTES = 8 << 30
"""How many bytes of rows a request may return: all layers of a large model at some thirty
positions."""


def start(args: argparse.Namespace, text: bool) -> LLM:
    """Start the engine that the options of `vllm serve` describe.

    Args:
        text: whether prompts are texts; else they are token ids and no tokenizer is needed.
    """
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.enable_steering = True
    if "inline" not in engine_args.capture_consumers:
        engine_args.capture_consumers = [*engine_args.capture_consumers, "inline"]
    if engine_args.capture_inline_max_bytes == CaptureConfig.capture_inline_max_bytes:
        engine_args.capture_inline_max_bytes = INLINE_BYTES
    if not text:
        engine_args.skip_tokenizer_init = True
    return LLM.from_engine_args(engine_args)
