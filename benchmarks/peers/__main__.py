# SPDX-License-Identifier: Apache-2.0
"""Us and what else one could use, in one run on one machine: a process a peer, one after the other.

    python -m benchmarks.peers --model DIR --stock DIR [--peers NAME ...] [--json FILE]

The model is a config.json: weights are random, and prompts are token ids (workloads.py says what is
asked). Only one peer measures at a time; with --at-once they load side by side, if all fit into
memory. Peers whose vLLM is upstream's get --stock in front of PYTHONPATH. Files of ours go to
--files, which is to be on a disk. With --before DIR, "pilot_before" is another build of this fork
that was assembled into DIR. A peer that is not installed or that fails has no rows, and the
setup says so.

On a CPU, for ratios in five minutes: VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind
OMP_NUM_THREADS=1 python -m benchmarks.peers --model TINY --stock build/upstream-cpu-* --eager
--peers plain_vllm pilot hf_hooks --kv-bytes 33554432 --extract 4x64 8x32 --requests 4 --prompt 16
--generated 8 --rounds 2 --step-tokens 128
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.workloads import PLAIN, READY, Answer, arguments
from benchmarks.results import Row, Run, add_arguments, publish, setup, write

BEFORE = ", before"
"""End of the names of cases of another build."""

IN_MEMORY = ["--files", "/dev/shm"]
"""What syncs no file is at its best there, and the road to a reader is shortest."""

PEERS = {
    "plain_vllm": ("plain_vllm", "stock", []),
    "pilot": ("pilot", "ours", []),
    "extract_hidden_states": ("extract_hidden_states", "stock", ["--layers", "all", *IN_MEMORY]),
    "hf_hooks": ("hf_hooks", "ours", []),
    "extract_hidden_states_few": (
        "extract_hidden_states",
        "stock",
        ["--layers", "few", *IN_MEMORY],
    ),
    "nnsight_hf": ("nnsight_hf", "ours", []),
    "pilot_before": ("pilot", "before", []),
}
"""Of each its script, which tree is first in its path, and its own options."""

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


class Peer:
    """A peer's process. It loads when this is made, and measures when it is told to."""

    def __init__(self, name: str, options: list[str], trees: Mapping[str, Path | None]) -> None:
        self.name = name
        script, tree, own = PEERS[name]
        path = [os.environ.get("PYTHONPATH", ""), os.getcwd()]
        if (first := trees.get(tree)) is not None:
            path.insert(0, str(first.absolute()))
        # Not a pipe: nobody reads while others are waited for.
        self._printed = tempfile.NamedTemporaryFile("w+", prefix=f"{name}-")  # noqa: SIM115
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.peers.{script}", *options, *own, "--wait"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_ready(self, until: float) -> None:
        while time.monotonic() < until and self._process.poll() is None:
            if f"\n{READY}\n" in Path(self._printed.name).read_text():
                return
            time.sleep(0.5)

    def measure(self, until: float) -> Answer:
        """What it has, if it is not done by then."""
        late = False
        try:
            self._process.communicate("go\n", timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        printed = Path(self._printed.name).read_text()
        answer = Answer.find(printed) or Answer(self.name)
        if late:
            answer.status = f"no time left after {len(answer.rows)} rows"
        elif self._process.returncode:
            print(printed[-8000:], file=sys.stderr)
            lines = printed.strip().splitlines()
            last = [line for line in lines if "Error" in line][-1:] or lines[-1:]
            answer.status = f"failed, exit status {self._process.returncode}: {' '.join(last)}"
        answer.peer = self.name
        return answer


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="all but pilot_before")
    parser.add_argument("--before", type=Path, help="another build of this fork, for pilot_before")
    parser.add_argument("--at-once", action="store_true", help="all load at once, and then wait")
    parser.add_argument("--budget", type=float, default=570, help="seconds, of all")
    add_arguments(parser)
    args = parser.parse_args()
    if args.peers is None:
        args.peers = [name for name, (_, tree, _) in PEERS.items() if tree != "before"]
    if "pilot_before" in args.peers and args.before is None:
        parser.error("pilot_before needs --before DIR")
    trees = {"stock": args.stock, "before": args.before}
    options = []
    for name, value in vars(arguments(None).parse_known_args()[0]).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options += [option] * value
        elif value is not None:
            options += [option, *map(str, value if isinstance(value, list) else [value])]
    until = time.monotonic() + args.budget
    answers = []
    for group in [args.peers] if args.at_once else [[name] for name in args.peers]:
        loading = [Peer(name, options, trees) for name in group]
        for peer in loading:
            peer.wait_ready(until)
        print(f"loaded, {until - time.monotonic():.0f} s left", flush=True)
        for peer in loading:
            answers.append(peer.measure(until))
            for row in answers[-1].rows if PEERS[peer.name][1] == "before" else ():
                row["case"] += BEFORE
            print(f"{peer.name}: {answers[-1].status}", flush=True)
            # Each time, so that what is there is kept if the machine is taken away.
            write(run_of(args, answers), args.json)
    publish(run_of(args, answers), args.json)


def run_of(args: argparse.Namespace, answers: list[Answer]) -> Run:
    """What the peers have answered so far."""
    peers = {answer.peer: answer.summary for answer in answers}
    rows = [Row(**row) for answer in answers for row in answer.rows]
    told = setup(args, model=(args.model / "config.json").read_text().strip(), peers=peers)
    return Run("peers", {**told, "not run": NOT_RUN}, rows, baselines=(PLAIN,), paired=False)


if __name__ == "__main__":
    main()
