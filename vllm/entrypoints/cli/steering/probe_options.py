# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm steering probe train`, `calibrate`, `evaluate` and `import`."""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.steering.train import layers_of

_POOLS = "each, mean, max, exponential:A, rolling_max:WINDOW, attention or multimax"


def _add_common(options: argparse._ArgumentGroup) -> None:
    option = options.add_argument
    option(
        "--data",
        required=True,
        metavar="FILE",
        help="Labelled texts, as .jsonl, .csv, .tsv or .parquet: text, or prompt (or messages) and "
        "completion; label 1 or 0; split where there.",
    )
    option(
        "--url",
        help="A running server, in place of an engine of this process; its key is in VLLM_API_KEY.",
    )
    option(
        "--over",
        choices=("prompt", "generated", "all"),
        help="Whose rows count. Default: what the probe was trained with; else the completions' "
        "where each text has one, or the prompts'.",
    )
    option(
        "--score",
        choices=("highest", "last"),
        help="The score of a text: the highest of its rows, by which a rule fires, or that of its "
        "last row. Default: what the probe was trained with, or highest.",
    )


def train_options(options: argparse._ArgumentGroup) -> None:
    """Add what `train` has beside the options of `vllm serve`."""
    _add_common(options)
    option = options.add_argument
    option(
        "--out",
        required=True,
        metavar="FOLDER",
        help="A new folder: NAME.safetensors (NAME is the folder's), a card, and a report.",
    )
    option("--test", metavar="FILE", help="Texts to judge by, in place of a fifth of --data.")
    option("--sites", type=sites_of, metavar="SITES", help="Such as post_block.6,post_block.9.")
    option("--layers", type=layers_of, help="In place of --sites: such as 4-11 or 3,7,-1.")
    option("--point", default="post_block", help="The point of --layers. Default: post_block.")
    option(
        "--head",
        choices=("linear", "mlp", "attention", "multimax"),
        default="linear",
        help="linear (default), or mlp; attention and multimax are linear heads with that pool.",
    )
    option("--pool", type=pool_of, help=f"{_POOLS}. Default: mean.")
    option(
        "--heads",
        type=int,
        default=4,
        metavar="N",
        help="Heads of the pools attention and multimax. Default: 4.",
    )
    option(
        "--units",
        type=int,
        default=32,
        metavar="N",
        help="Hidden units of --head mlp. Default: 32.",
    )
    option(
        "--activation",
        default="relu",
        help="Of the hidden units: relu (default), tanh, sigmoid, silu or gelu_tanh.",
    )
    option(
        "--penalty",
        type=float,
        help="Of the weights of a regression, of rows whose channels vary by 1. Default: the best "
        "of three on a fifth of the texts.",
    )
    option(
        "--memory",
        type=float,
        default=4.0,
        metavar="GIB",
        help="GiB for rows. Default: 4.",
    )


def _add_probe(options: argparse._ArgumentGroup) -> None:
    options.add_argument("--probe", required=True, metavar="FILE", help="The probe's file.")


def calibrate_options(options: argparse._ArgumentGroup) -> None:
    """Add what `calibrate` has beside the options of `vllm serve`."""
    _add_probe(options)
    _add_common(options)
    option = options.add_argument
    option(
        "--fpr",
        type=float,
        default=0.01,
        metavar="RATE",
        help="The share of negative texts that may be above the threshold. Default: 0.01.",
    )
    option("--out", required=True, metavar="FILE", help="The copy of the file, with the threshold.")


def evaluate_options(options: argparse._ArgumentGroup) -> None:
    """Add what `evaluate` has beside the options of `vllm serve`."""
    _add_probe(options)
    _add_common(options)
    options.add_argument("--out", metavar="FOLDER", help="A new folder, for a card and a report.")


def import_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `import`."""
    option = parser.add_argument
    option("source", type=Path, help="A state dict that torch saved.")
    option("out", type=Path, help="The file to write.")
    option(
        "--sites",
        type=sites_of,
        required=True,
        help="Whose rows it takes, one after the other: post_block.6,post_block.9.",
    )
    option("--activation", default="relu", help="Of an MLP's hidden units. Default: relu.")
    option("--pool", type=pool_of, help=f"{_POOLS}. Default: each, or attention of a query.")
    option("--threshold", type=float, help="Scores above it fire a rule that gives none.")
    parser.set_defaults(model_tag=None)


def sites_of(text: str) -> list[tuple[str, int]]:
    """Read sites as people write them, `post_block.6,post_block.9`.

    Raises:
        ArgumentTypeError: it is something else.
    """
    try:
        pairs = [one.strip().rpartition(".") for one in text.split(",")]
        found = [(point, int(layer)) for point, _, layer in pairs]
    except ValueError:
        found = [("", 0)]
    if not all(point for point, _ in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not such as post_block.6,post_block.9")
    return found


def pool_of(text: str) -> Any:
    """Read a pool as people write it: its kind, and after a colon its number.

    Raises:
        ArgumentTypeError: it is none.
    """
    import msgspec

    from vllm.v1.probes.pools import AnyPool, Exponential, RollingMax

    kind, colon, number = text.partition(":")
    fields: dict[str, Any] = {"kind": kind}
    try:
        if colon:
            named = {"exponential": Exponential, "rolling_max": RollingMax}
            [name] = named[kind].__struct_fields__
            fields[name] = json.loads(number)
        return msgspec.convert(fields, AnyPool)
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {_POOLS}: {error}") from None
