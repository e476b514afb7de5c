# SPDX-License-Identifier: Apache-2.0
"""`vllm capture run` before there is an engine: its question, and hooks as people write them."""

from __future__ import annotations

import sys

import pytest

from vllm.entrypoints.cli.capture.run import confirm, parse_hooks
from vllm.pilot import dataset

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("answers", "fits", "starts"),
    [("y", True, True), ("", True, False), ("no", True, False), (" YES ", False, True)],
)
def test_the_question(
    answers: str,
    fits: bool,
    starts: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a terminal it is asked whether to start; elsewhere it starts if there is room."""
    asked: list[str] = []

    def ask(text: str) -> str:
        asked.append(text)
        return answers

    monkeypatch.setattr("builtins.input", ask)
    told = dataset.Estimate(60, 1 << 20, True, 9.0, (1 << 30) if fits else 1 << 10, "acts")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert confirm(told, False) == starts
    assert asked == ["Start? [y/N] " if fits else "It does not fit. Start? [y/N] "]
    assert capsys.readouterr().out == f"{told}\n"
    assert confirm(told, True) and len(asked) == 1, "--yes asks nothing"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert confirm(told, False) == fits and len(asked) == 1


def test_hooks_of_a_command_line() -> None:
    assert parse_hooks(["post_block:all"]) == {"post_block": "all"}
    assert parse_hooks(["post_block:4-11,15", "pre_attn:-1"]) == {
        "post_block": ["4-11", "15"],
        "pre_attn": "-1",
    }
    assert parse_hooks(['{"post_block": [1]}']) == {"post_block": [1]}
    with pytest.raises(ValueError, match="post_block is there twice"):
        parse_hooks(["post_block:1", "post_block:2"])
