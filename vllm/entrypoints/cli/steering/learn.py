# SPDX-License-Identifier: Apache-2.0
"""The methods of `vllm steering train` that learn by gradients: their options, and what they do."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

METHODS = ("gradient", "reft", "reft-r1", "bipo")
"""Names in `vllm.pilot.learn.losses.RECIPES`, whose import would take seconds."""

_OWN = ("rank", "kl_weight", "rate", "epochs", "patience", "batch")
_NOT = ("url", "read", "scales", "cases", "score", "prompts", "background")
"""Options of the other methods, None where they are not given."""


def add_learn_options(option: Any) -> None:
    """Add the options of these methods, by an `add_argument`."""
    named = "gradient, reft, reft-r1, bipo"
    option("--rank", type=int, metavar="R", help="Rank of reft at each layer. Default: 4.")
    option(
        "--kl-weight",
        type=float,
        metavar="WEIGHT",
        help=f"Of {named}: weight of KL(plain||edited) on --neutral beside the loss. Default: 1, "
        "of bipo and reft-r1 0.",
    )
    option(
        "--rate",
        type=float,
        help=f"Of {named}: what a step may change, as a share of the stream. Default: 0.02.",
    )
    option("--epochs", type=int, metavar="N", help=f"Of {named}: most passes. Default: 40.")
    option(
        "--patience",
        type=int,
        metavar="N",
        help=f"Of {named}: passes without a smaller loss on the choose split. Default: 5.",
    )
    option("--batch", type=int, metavar="N", help=f"Of {named}: pairs of a step. Default: 8.")


def need_options_of_method(args: argparse.Namespace) -> None:
    """Raise ValueError where an option is given that the method does not read."""
    wrong = _NOT if args.method in METHODS else _OWN
    if given := [name for name in wrong if getattr(args, name) is not None]:
        raise ValueError(
            f"--{given[0].replace('_', '-')}: method {args.method!r} does not read it; leave it out"
        )


def learn_edit(args: argparse.Namespace) -> tuple[bool, str, Path]:
    """Learn an edit and write its folder; return whether it held, the verdict and the folder.

    Raises:
        ValueError: an option, the data or the model does not do.
        OSError: a file cannot be read or written.
    """
    import torch

    from vllm.pilot.learn import LearnSettings, TorchModel, learn, save_learned
    from vllm.pilot.learn.pages import verdict
    from vllm.pilot.learn.training import split_pairs
    from vllm.pilot.pairs import Pairs, read_texts
    from vllm.pilot.report import need_folder

    more = {
        "rank": args.rank,
        "kl": args.kl_weight,
        "rate": args.rate,
        "epochs": args.epochs,
        "patience": args.patience,
        "batch": args.batch,
    }
    settings = {
        "method": args.method,
        "layers": args.layers,
        "point": args.point,
        "seed": args.seed or 0,
        **{name: value for name, value in more.items() if value is not None},
    }
    LearnSettings(**settings)
    pairs = Pairs.read_file(args.data)
    split_pairs(pairs)
    neutral = read_texts(args.neutral) if args.neutral else None
    folder = need_folder(args.out)
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)

    def say(text: str) -> None:
        print(text, flush=True)

    learned = learn(TorchModel.load(args.model, dtype), pairs, neutral=neutral, say=say, **settings)
    save_learned(learned, folder, shlex.join(["vllm", *sys.argv[1:]]))
    return learned.evidence.held, verdict(learned), folder
