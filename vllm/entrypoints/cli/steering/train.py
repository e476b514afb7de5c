# SPDX-License-Identifier: Apache-2.0
"""The verb `vllm steering train`: its options, and what it does with them."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

from vllm.entrypoints.cli.steering.learn import (
    METHODS,
    add_learn_options,
    learn_edit,
    need_options_of_method,
)
from vllm.pilot.directions import Method

COULD_NOT_RUN, NO_BETTER = 2, 3
"""The exit statuses where it could not run, and where random directions do as much."""


def add_options(options: argparse._ArgumentGroup) -> None:
    """Add the options that `vllm serve` does not have."""
    option = options.add_argument
    option(
        "--data",
        required=True,
        metavar="FILE",
        help="Pairs, as .json, .jsonl, .csv or .tsv: positive and negative, with prompt and split "
        "where there; chosen and rejected; CAA's keys; text and label; or a persona.",
    )
    option(
        "--out",
        required=True,
        metavar="FOLDER",
        help="A new folder: NAME.safetensors and .gguf (NAME is the folder's), the vectors of all "
        "layers, a model card, and a report with pictures.",
    )
    option(
        "--url",
        help="A running server, in place of an engine of this process; its key is in VLLM_API_KEY.",
    )
    option(
        "--method",
        choices=(*get_args(Method), *METHODS),
        default="mean",
        help="How a direction is made of the rows; or what is learned by gradients, in "
        "transformers on the same checkpoint: gradient and bipo a vector, reft a change of low "
        "rank, reft-r1 one direction. Default: mean, half the difference of means.",
    )
    option(
        "--read",
        type=_read,
        help="Where rows are read: last (default), answer-mean, answer-last, a position such as "
        "-2, or any selector of capture as JSON.",
    )
    option("--layers", type=layers_of, default="all", help="Such as 4-11 or 3,7,-1. Default: all.")
    option(
        "--point",
        default="post_block",
        help="Where it is read and steered: post_block (default), pre_attn or post_attn.",
    )
    option(
        "--scales",
        type=float,
        nargs="+",
        metavar="SCALE",
        help="Those tried, each with both signs; 1 is half the distance of the classes. Default: "
        "0.25 0.5 1 2 4.",
    )
    option(
        "--candidates",
        type=int,
        default=5,
        metavar="N",
        help="How many layers are steered, those that separate best. Default: 5.",
    )
    option(
        "--cases",
        type=int,
        metavar="N",
        help="Pairs of each split whose effect is measured, at most. Default: 64.",
    )
    option(
        "--score",
        metavar="MODULE:FUNCTION",
        help="The effect is what this function gives for a prompt and what was written after it, "
        "in place of the odds of the pairs' texts.",
    )
    option(
        "--prompts",
        metavar="FILE",
        help="Prompts for --score, .jsonl or a line each. Default: the pairs' own.",
    )
    option(
        "--guard",
        choices=("kl", "written"),
        default="kl",
        help="What must stay small: kl is KL(plain||steered) (default); written how much more "
        "surprising what is written for --score is to the plain model.",
    )
    option(
        "--max-kl",
        type=float,
        default=0.1,
        metavar="NATS",
        help="Nats a token that the guard allows, at both signs. Default: 0.1.",
    )
    option(
        "--neutral",
        metavar="FILE",
        help="Texts for the guard kl, .jsonl or a line each. Default: what the plain model writes.",
    )
    option(
        "--background",
        metavar="FILE",
        help="Texts for the method mean-centred, .jsonl or a line each.",
    )
    option(
        "--memory",
        type=float,
        default=4.0,
        metavar="GIB",
        help="GiB for rows; up to 0.16 come on top. Default: 4.",
    )
    add_learn_options(option)


def train_vector(args: argparse.Namespace) -> int:
    """Find or learn what steers, by the method; return the exit status."""
    try:
        need_options_of_method(args)
        if args.method in METHODS:
            held, said, folder = learn_edit(args)
            print(f"{said}\n{folder}: {', '.join(sorted(os.listdir(folder)))}", flush=True)
            return 0 if held else NO_BETTER
    except expected_errors() as error:
        return could_not_run(error, None, None)
    return _find_vector(args)


def _find_vector(args: argparse.Namespace) -> int:
    """Find a vector and write its folder; return the exit status."""
    from vllm.pilot.pairs import Pairs, read_texts
    from vllm.pilot.report import need_folder, save_trained, verdict
    from vllm.pilot.training import Settings, train

    folder: Path | None = None
    bench: Any = None
    try:
        # All that can be wrong without a model is found before one is loaded.
        folder = need_folder(args.out)
        pairs = Pairs.read_file(args.data)
        background = read_texts(args.background) if args.background else None
        neutral = read_texts(args.neutral) if args.neutral else None
        if pairs.persona is None:
            pairs.split()
        metrics = _metrics(args, pairs)
        if args.method == "mean-centred" and not background:
            raise ValueError("--background: method 'mean-centred' needs texts")
        if args.guard == "written" and metrics is None:
            raise ValueError("--guard: 'written' needs --score, whose texts it looks at")
        more = {"scales": args.scales, "cases": args.cases}
        settings = {
            "method": args.method,
            "read": args.read,
            "layers": args.layers,
            "point": args.point,
            "candidates": args.candidates,
            "guard": args.guard,
            "max_nats": args.max_kl,
            "seed": args.seed or 0,
            "memory": int(args.memory * (1 << 30)),
            **{name: value for name, value in more.items() if value is not None},
        }
        Settings(**settings)
        bench = start_bench(args)
        trained = train(
            bench,
            pairs,
            metrics=metrics,
            background=background,
            neutral=neutral,
            say=lambda text: print(text, flush=True),
            **settings,
        )
        save_trained(trained, folder, shlex.join(["vllm", *sys.argv[1:]]))
    except expected_errors() as error:
        return could_not_run(error, args.url, folder)
    finally:
        end_bench(bench, args)
    print(f"{verdict(trained)}\n{folder}: {', '.join(sorted(os.listdir(folder)))}", flush=True)
    return 0 if trained.held else NO_BETTER


def expected_errors() -> tuple[type[Exception], ...]:
    """Return what can end a command: mistakes in what was asked, what a server says or does not
    say, and the end of an engine. Others are mistakes of ours."""
    import httpx

    from vllm.entrypoints.serve.steering.client import SteeringError
    from vllm.v1.engine.exceptions import EngineDeadError

    remote = (SteeringError, httpx.HTTPError, EngineDeadError)
    return (ValueError, OSError, ImportError, *remote)


def could_not_run(error: Exception, url: str | None, folder: Path | None) -> int:
    """Say why a command ended, and what is there; return the exit status."""
    # The texts of httpx say neither which server nor, some, anything at all.
    told = f"{url}: {error!r}" if type(error).__module__.startswith("httpx") else str(error)
    made = sorted(os.listdir(folder)) if folder is not None else []
    safe = f"; whole in {folder}: {', '.join(made)}" if made else ""
    print(f"error: {told}{safe}", file=sys.stderr, flush=True)
    return COULD_NOT_RUN


def start_bench(args: argparse.Namespace) -> Any:
    """Return the bench of a command: the server of --url, or an engine that it starts."""
    from vllm.pilot.bench import EngineBench, ServerBench

    if args.url:
        return ServerBench(args.url, os.environ.get("VLLM_API_KEY"), args.model_tag)
    from vllm.entrypoints.cli.steering.start import start

    return EngineBench(start(args, text=True))


def end_bench(bench: Any, args: argparse.Namespace) -> None:
    """End the engine that `start_bench` started, if it did."""
    if bench is not None and args.url is None:
        bench.llm.llm_engine.engine_core.shutdown()


def _metrics(args: argparse.Namespace, pairs: Any) -> Any:
    """The metrics of --score, by which to choose and to report; None without."""
    from vllm.pilot.metrics import Score, score_function
    from vllm.pilot.pairs import read_texts

    if not args.score:
        return None
    sys.path.insert(0, os.getcwd())
    function = score_function(args.score)
    if args.prompts:
        prompts = list(dict.fromkeys(read_texts(args.prompts)))
        halves = [prompts[::2], prompts[1::2]]
    else:
        parts = pairs.split()
        halves = [
            [q for q in dict.fromkeys(e.question for e in parts[name].positive) if q]
            for name in ("choose", "report")
        ]
    if not all(halves):
        raise ValueError(
            "--score needs two prompts or more: --prompts FILE, or pairs with a prompt"
        )
    return tuple(Score(function, half, unit=args.score) for half in halves)


def layers_of(text: str) -> Any:
    """Read layers as people write them: "all", or a list of numbers.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if text == "all":
        return text
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not all, nor such as 4-11 or 3,7,-1"
        ) from None
    return found


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
