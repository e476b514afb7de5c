# SPDX-License-Identifier: Apache-2.0
"""The verb `vllm steering bench`: its options, and what it does with them."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.steering import train


def bench_options(options: argparse._ArgumentGroup) -> None:
    """Add the options that `vllm serve` does not have."""
    option = options.add_argument
    option(
        "--data",
        required=True,
        metavar="FILE",
        help='Concepts, a line of JSONL each: {"concept": ..., "ways": {NAME: WAY}}, where WAY has '
        '"system", a prompt; "module", the name of one; or "op", an operation, and "scaled", its '
        "key that the factor multiplies (default: add).",
    )
    option(
        "--instructions",
        required=True,
        metavar="FILE",
        help="Instructions, .jsonl or a line each: half of them choose factors, half are reported.",
    )
    option(
        "--judge",
        required=True,
        metavar="MODULE:FUNCTION",
        help="Called with concept, instruction and answer; returns the grades of concept, "
        "instruction and fluency, from 0 to 2.",
    )
    option("--out", required=True, metavar="FOLDER", help="A new folder: report.json, scores.png.")
    option(
        "--url",
        help="A running server, in place of an engine of this process; its key is in VLLM_API_KEY.",
    )
    option("--factors", type=float, nargs="+", help="Those tried. Default: 0.25 0.5 1 2 4.")
    option("--max-tokens", type=int, default=64, metavar="N", help="Of an answer. Default: 64.")


def bench_ways(args: argparse.Namespace) -> int:
    """Compare ways to steer, and write the folder; return the exit status."""
    from vllm.pilot.comparing import FACTORS, compare, read_concepts, save_comparison
    from vllm.pilot.metrics import named_function
    from vllm.pilot.pairs import read_texts
    from vllm.pilot.report import need_folder

    folder: Path | None = None
    bench: Any = None
    try:
        sys.path.insert(0, os.getcwd())
        concepts, judge = read_concepts(args.data), named_function(args.judge, "judge")
        instructions = read_texts(args.instructions)
        folder = need_folder(args.out)
        bench = train.start_bench(args)
        found = compare(
            bench,
            concepts,
            instructions,
            judge,
            factors=args.factors or FACTORS,
            max_tokens=args.max_tokens,
            say=lambda text: print(text, flush=True),
        )
        save_comparison(found, folder)
    except train.expected_errors() as error:
        return train.could_not_run(error, args.url, folder)
    finally:
        train.end_bench(bench, args)
    print(f"{found!r}\n{folder}: {', '.join(sorted(os.listdir(folder)))}", flush=True)
    return 0
