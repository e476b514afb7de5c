# SPDX-License-Identifier: Apache-2.0
"""A verb with options beside those of `vllm serve`, which a plain `--help` lists."""

import argparse
import typing
from collections.abc import Callable
from typing import Any

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_verb(
    verbs: "argparse._SubParsersAction[FlexibleArgumentParser]",
    command: str,
    add_options: Callable[[argparse._ArgumentGroup], object],
    **given: Any,
) -> None:
    """Add a verb that takes the options of `vllm serve`, too.

    Upstream's parser answers `--help` with the names of groups; what is the verb's own stands below
    them in full.

    Args:
        command: such as "steering train"; the title of its group, which `--help=` finds.
        add_options: adds its own options; called twice.
        given: for `add_parser`.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG

    parser = verbs.add_parser(command.split()[-1], **given)
    add_options(parser.add_argument_group(command))
    make_arg_parser(parser)
    own = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    add_options(own.add_argument_group(command))
    parser.epilog = f"{own.format_help()}\n{VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=command)}"
