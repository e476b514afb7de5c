# SPDX-License-Identifier: Apache-2.0
"""Starts the engine, runs the checks, and prints their table and the verdict."""

import argparse

from vllm import LLM
from vllm.config.capture import CaptureConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.steering.findings import Finding, table
from vllm.entrypoints.cli.steering.huggingface import compare, why_not
from vllm.entrypoints.cli.steering.identities import check_identities
from vllm.entrypoints.cli.steering.probe import Probe

INLINE_BYTES = 8 << 30
"""How many bytes of rows a request may return: all layers of a large model at some thirty
positions."""


def check_model(args: argparse.Namespace) -> bool:
    """Check a model, and print what was found.

    Args:
        args: the options of `vllm serve`, and `hf`: whether to compare with transformers, or None
            to decide here.

    Returns:
        Whether everything that could be checked agrees.
    """
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.enable_steering = True
    if "inline" not in engine_args.capture_consumers:
        engine_args.capture_consumers = [*engine_args.capture_consumers, "inline"]
    if engine_args.capture_inline_max_bytes == CaptureConfig.capture_inline_max_bytes:
        engine_args.capture_inline_max_bytes = INLINE_BYTES
    # Prompts are token ids: a check of arithmetic needs no text.
    engine_args.skip_tokenizer_init = True
    llm = LLM.from_engine_args(engine_args)
    probe = Probe(llm)
    print(f"{engine_args.model}: {probe.describe()}", flush=True)
    findings = check_identities(probe)
    skipped = why_not(llm) if args.hf is None else "" if args.hf else "--no-hf"
    if skipped:
        findings.append(Finding.skipped("transformers", skipped))
    else:
        findings += compare(probe)
    llm.llm_engine.engine_core.shutdown()
    wrong = [finding for finding in findings if finding.agrees is False]
    print(table(findings))
    left = sum(finding.agrees is None for finding in findings)
    verdict = f"{len(wrong)} of {len(findings)} DISAGREE" if wrong else "agrees"
    print(f"verdict: {verdict}" + (f", {left} not checked" if left else ""), flush=True)
    return not wrong
