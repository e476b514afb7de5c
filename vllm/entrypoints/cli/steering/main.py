# SPDX-License-Identifier: Apache-2.0
"""The command `vllm steering check MODEL [serve options]`: do steering and capture hold there?"""

import argparse
import os
import sys
import traceback
import typing

from vllm.entrypoints.cli.types import CLISubcommand

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DISAGREES, COULD_NOT_RUN = 1, 2
"""The exit statuses where the check disagrees, and where it could not run."""

DESCRIPTION = """Start the engine as `vllm serve` would, with steering and capture, and check that
what is read and written is the residual stream: identities that need no reference, and Hugging Face
transformers where the model fits in memory. Exit status 1 when anything disagrees, 2 when it could
not run."""


class SteeringSubcommand(CLISubcommand):
    """The `steering` subcommand of the vLLM CLI."""

    name = "steering"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Check the model and exit with the check's status."""
        # The check sends functions to workers that this process starts itself.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        from vllm.entrypoints.cli.steering.check import check_model

        if args.model_tag is not None:
            args.model = args.model_tag
        try:
            agrees = check_model(args)
        except Exception:
            traceback.print_exc()
            print("verdict: could not run", flush=True)
            sys.exit(COULD_NOT_RUN)
        sys.exit(0 if agrees else DISAGREES)

    def subparser_init(
        self, subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]"
    ) -> "FlexibleArgumentParser":
        """Add the parser of `vllm steering`."""
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

        steering = subparsers.add_parser(
            self.name,
            help="Check steering and capture on a model.",
            usage="vllm steering check MODEL [options]",
        )
        verbs = steering.add_subparsers(required=True, dest="steering_verb")
        check = verbs.add_parser(
            "check", description=DESCRIPTION, usage="vllm steering check MODEL [serve options]"
        )
        check.add_argument(
            "--hf",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="Compare with Hugging Face transformers on the CPU. Default: when the weights "
            "need less than half of the free memory.",
        )
        make_arg_parser(check)
        return steering


def cmd_init() -> list[CLISubcommand]:
    """Return the subcommands of this module, for the vLLM CLI."""
    return [SteeringSubcommand()]
