# SPDX-License-Identifier: Apache-2.0
"""Us and what else one could use, in one run on one machine: a process a peer, one after the other.

    python -m benchmarks.peers --model DIR --stock DIR [--peers NAME ...] [--json FILE]

The model is a config.json: weights are random, and prompts are token ids (workloads.py says what is
asked). Peers whose vLLM is upstream's get --stock in front of PYTHONPATH. A peer that is not
installed or that fails has no rows, and the setup says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.workloads import Answer, arguments
from benchmarks.results import Row, Run, add_arguments, publish, setup

PEERS = {
    "plain_vllm": "stock",
    "pilot": "ours",
    "extract_hidden_states": "stock",
    "hf_hooks": "ours",
    "nnsight_hf": "ours",
}
"""Which tree is first in the path of each."""

BASELINE = "plain vLLM"

NOT_RUN = {
    "vLLM-Lens 1.2.1": "a plug-in that forces eager mode and refuses the V2 model runner; its own "
    "examples/benchmark.ipynb, Llama-3.3-70B, TP4, against eager vLLM: one layer +12 %, all +317 %",
    "IBM vLLM-Hook (MIA)": "made for vLLM 0.29",
    "EasySteer": "a fork of vLLM 0.26; its README of 2026-08-06, 1.5B, batch 256, RTX PRO 6000: "
    "one layer -10.8 %, all 28 layers -23.8 %, 3 vectors x 28 layers -74 % output rate",
    "DMI": "made for vLLM 0.27.1, V1 model runner; its docs, Qwen3-4B, one A100, batch 32: -2.7 % "
    "prompt rate, with a setting that by the same docs turns payload copies off",
    "nnsight on vLLM": "its backend forces eager mode; it was run on transformers only",
    "TransformerLens": "no package of it on this machine",
}
"""Peers that bring or need another vLLM, or a network; figures are the projects' own claims, on
their machines, and comparable with no row of ours."""


def ask(name: str, options: list[str], stock: Path, limit: float) -> Answer:
    """Run one peer to its end."""
    path = os.environ.get("PYTHONPATH", "")
    if PEERS[name] == "stock":
        path = os.pathsep.join(filter(None, [str(stock.resolve()), path]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.getcwd()]))}
    started = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", f"benchmarks.peers.{name}", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(name, status="failed: no time left")
    answer = Answer.find(ended.stdout)
    seconds = time.monotonic() - started
    if answer is None:
        print(ended.stdout[-8000:], file=sys.stderr)
        last = (ended.stdout.strip().splitlines() or ["nothing printed"])[-1]
        return Answer(name, status=f"failed, exit status {ended.returncode}: {last}")
    answer.settings["process"] = f"{seconds:.0f} s"
    return answer


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--budget", type=float, default=570, help="seconds, of all")
    add_arguments(parser)
    args = parser.parse_args()
    options = []
    for name, value in vars(arguments(None).parse_known_args()[0]).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options += [option] * value
        else:
            options += [option, str(value)]
    answers, until = [], time.monotonic() + args.budget
    for name in args.peers:
        answers.append(ask(name, options, args.stock, max(until - time.monotonic(), 1)))
        print(f"{name}: {answers[-1].status}", flush=True)
    peers = {answer.peer: answer.summary for answer in answers}
    rows = [Row(**row) for answer in answers for row in answer.rows]
    told = setup(args, model=(args.model / "config.json").read_text().strip(), peers=peers)
    run = Run("peers", {**told, "not run": NOT_RUN}, rows, baselines=(BASELINE,), paired=False)
    publish(run, args.json)


if __name__ == "__main__":
    main()
