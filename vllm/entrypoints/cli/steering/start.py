# SPDX-License-Identifier: Apache-2.0
"""The engine of a command: that of the options of `vllm serve`, with the consumer `inline`."""

import argparse

from pydantic import ValidationError

from vllm import LLM
from vllm.config.capture import CaptureConfig
from vllm.engine.arg_utils import EngineArgs

INLINE_BYTES = 8 << 30
"""Bytes of rows that a request may return: all layers of a large model at some thirty
positions."""


def with_inline(args: argparse.Namespace) -> EngineArgs:
    """Return the engine's arguments, which have `inline` and room for its rows."""
    engine_args = EngineArgs.from_cli_args(args)
    if "inline" not in engine_args.capture_consumers:
        engine_args.capture_consumers = [*engine_args.capture_consumers, "inline"]
    if engine_args.capture_inline_max_bytes == CaptureConfig.capture_inline_max_bytes:
        engine_args.capture_inline_max_bytes = INLINE_BYTES
    return engine_args


def start(args: argparse.Namespace, text: bool) -> LLM:
    """Start the engine with steering too.

    Args:
        text: whether prompts are texts; else they are token ids and no tokenizer is needed.

    Raises:
        ValueError: as of `start_engine`.
    """
    engine_args = with_inline(args)
    engine_args.enable_steering = True
    if not text:
        engine_args.skip_tokenizer_init = True
    return start_engine(engine_args)


def start_engine(engine_args: EngineArgs) -> LLM:
    """Start an engine.

    Raises:
        ValueError: it does not start: the model is not wired or not there, memory is short, options
            are wrong; the message says which.
    """
    try:
        return LLM.from_engine_args(engine_args)
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):  # its text has all options, too
            reason = "; ".join(one["msg"].splitlines()[0] for one in error.errors())
        raise ValueError(f"the engine did not start, nothing was written: {reason}") from error
