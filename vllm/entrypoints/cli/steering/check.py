# SPDX-License-Identifier: Apache-2.0
"""Starts the engine, runs the checks, and prints their table and the verdict."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import vllm
from vllm.entrypoints.cli.steering.findings import Finding, table
from vllm.entrypoints.cli.steering.huggingface import compare, why_not
from vllm.entrypoints.cli.steering.identities import check_identities
from vllm.entrypoints.cli.steering.probe import Probe
from vllm.entrypoints.cli.steering.start import start
from vllm.platforms import current_platform


def check_model(args: argparse.Namespace) -> bool:
    """Check a model, and print what was found.

    Args:
        args: the options of `vllm serve`; `hf`, whether to compare with transformers, or None to
            decide here; and `json`, whether to print a row for the table of docs/models.md, too.

    Returns:
        Whether everything that could be checked agrees.
    """
    # On a GPU, Triton's kernels round float32 to three digits otherwise, and transformers does not.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    # Prompts are token ids: a check of arithmetic needs no text.
    llm = start(args, text=False)
    probe = Probe(llm)
    print(f"{args.model}: {probe.describe()}", flush=True)
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
    if args.json:
        print(row(args.model, probe, findings), flush=True)
    return not wrong


def row(model: str, probe: Probe, findings: Sequence[Finding]) -> str:
    """Return what was found as a line of JSON, of which docs/models.md makes a row.

    Args:
        model: a folder or name; its last part is said.
    """
    made = {
        "model": Path(model).name,
        **probe.facts(),
        "device": current_platform.get_device_name(),
        "version": vllm.__version__,
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(made)
