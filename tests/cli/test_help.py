# SPDX-License-Identifier: Apache-2.0
"""The help of `vllm serve` lists our options first and names all that they take; the lists of our
subcommands cost less than a second of CPU."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.config.compat import NEEDS
from vllm.engine import arg_utils
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.steering import files

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """With help, which upstream leaves out unless the command line asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arg_utils, "NEEDS_HELP", True)
        arg_utils._compute_kwargs.cache_clear()
        made = make_arg_parser(FlexibleArgumentParser())
    arg_utils._compute_kwargs.cache_clear()
    return made


def test_our_groups_stand_first(parser: FlexibleArgumentParser) -> None:
    text = parser.format_help()
    ours, theirs = ("SteeringConfig ", "CaptureConfig "), ("Frontend ", "ModelConfig ")
    at = [text.index(f"\n  {title}") for title in (*ours, *theirs)]
    assert at == sorted(at)
    first = [group.title for group in parser._action_groups][:2]
    assert first == ["SteeringConfig", "CaptureConfig"]
    titles = [group.title for group in parser._action_groups]
    assert len(titles) == len(set(titles)) > 20


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--compat", [*NEEDS]),
        ("--steering-modules", [*files._READERS, files._JSON]),
    ],
)
def test_help_names_all_values(
    parser: FlexibleArgumentParser, option: str, values: list[str]
) -> None:
    (action,) = (a for a in parser._actions if option in a.option_strings)
    assert [value for value in values if value not in (action.help or "")] == []


@pytest.mark.parametrize("command", ["steering", "capture"])
def test_cpu_of_a_list(command: str) -> None:
    """The installed command, by CPU time: machines that run tests are busy."""
    vllm = Path(sys.executable).with_name("vllm")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([vllm, command, "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert seconds < 1
