# SPDX-License-Identifier: Apache-2.0
"""The command `vllm capture run MODEL --data FILE --out DIR`: activations of a whole data set."""

import argparse
import sys
import typing

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.v1.capture.small_rows import StoreDtype

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DESCRIPTION = """Run a data set through a model, and write activations of every example into
safetensors shards with a manifest. Given again, the command goes on where it was interrupted. Exit
status 1 when it could not finish; the message says what is safe."""


class CaptureSubcommand(CLISubcommand):
    """The `capture` subcommand of the vLLM CLI."""

    name = "capture"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Capture the data set, or say why not and exit with status 1."""
        from vllm.entrypoints.cli.capture.run import capture_dataset

        if args.model_tag is not None:
            args.model = args.model_tag
        sys.exit(capture_dataset(args))

    def subparser_init(
        self, subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]"
    ) -> "FlexibleArgumentParser":
        """Add the parser of `vllm capture`."""
        from vllm.entrypoints.cli.steering.early import VERBS
        from vllm.entrypoints.cli.steering.verbs import add_verb

        capture = subparsers.add_parser(
            self.name,
            help="Capture activations of a whole data set.",
            usage="vllm capture run MODEL --data FILE --out DIR --hooks POINT:LAYERS [options]",
        )
        verbs = capture.add_subparsers(required=True, dest="capture_verb")
        add_verb(
            verbs,
            "capture run",
            add_options,
            help=VERBS[self.name]["run"],
            description=DESCRIPTION,
            usage="vllm capture run MODEL --data FILE --out DIR --hooks POINT:LAYERS [options]",
        )
        return capture


def add_options(options: argparse._ArgumentGroup) -> None:
    """Add the options of `vllm capture run` itself."""
    option = options.add_argument
    option(
        "--data",
        required=True,
        help="A .jsonl, .csv, .tsv or .parquet file, a folder of .parquet files, or one that "
        "datasets.save_to_disk wrote.",
    )
    option("--out", required=True, help="A folder, or a URL of fsspec such as s3://bucket/acts.")
    option(
        "--hooks",
        required=True,
        nargs="+",
        help="Where: POINT:LAYERS such as post_block:all, post_block:4-11,15 or pre_attn:-1; or "
        "the JSON of a capture request's hooks.",
    )
    option(
        "--positions",
        default="last_prompt",
        help='A name such as last_prompt (the default) or all_prompt; or JSON: [0, -1], {"start": '
        '0, "step": 8}, {"text": "Paris"}.',
    )
    option("--capture-more", default=None, help="JSON of further keys of the capture request.")
    option("--max-tokens", type=int, default=1, help="Tokens to generate, greedily. Default: 1.")
    option(
        "--whole-model",
        action="store_true",
        help="Load all layers and the head, also where nothing is generated.",
    )
    option("--prompt-column", help="Texts, or lists of messages. Default: messages, prompt, text.")
    option("--id-column", help="Default: id, or else the example's number.")
    option("--label-column", help="Default: label, if there is such a column.")
    option("--split", help="Of a folder with several.")
    option(
        "--store-dtype",
        choices=typing.get_args(StoreDtype),
        help="Store float32 in place of the model's dtype, since safetensors' numpy has no "
        "bfloat16; or a byte a value, with a scale for each row: int8 or float8.",
    )
    option(
        "--skip-refused",
        action="store_true",
        help="Go on where the engine refuses an example, such as one that is too long.",
    )
    option(
        "--shard-bytes",
        type=int,
        default=256 << 20,
        help="How large a shard grows. Default: 256 MiB.",
    )
    option("-y", "--yes", action="store_true", help="Start without asking.")


def cmd_init() -> list[CLISubcommand]:
    """Return the subcommands of this module, for the vLLM CLI."""
    return [CaptureSubcommand()]
