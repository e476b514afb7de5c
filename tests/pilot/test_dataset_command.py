# SPDX-License-Identifier: Apache-2.0
"""`vllm capture run` before there is an engine: its question, and hooks as people write them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.capture.early_stop import last_layer, with_stop
from vllm.entrypoints.cli.capture.run import confirm, parse_hooks
from vllm.pilot import dataset

if TYPE_CHECKING:
    from tests.conftest import TinyModels

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


@pytest.mark.parametrize(
    ("hooks", "last"),
    [
        ({"post_block": "4-11", "pre_attn": 12}, 12),
        ({"post_block": ["4-11", "15"]}, 15),
        ({"pre_attn": -1}, 31),
        ({"post_block": "all"}, 31),
        ({"z": {"3": [0, 1], "5-6": "all"}}, 6),
        ({"embed": 0}, 0),
    ],
)
def test_the_last_layer_that_is_needed(hooks: dict[str, Any], last: int) -> None:
    assert last_layer(hooks, 32) == last


def test_a_layer_that_the_model_has_not() -> None:
    with pytest.raises(ValueError, match=r"--hooks.post_block: layer 32 is out of range"):
        last_layer({"post_block": 32}, 32)


@pytest.mark.parametrize(
    ("hooks", "more", "max_tokens", "options", "stop"),
    [
        ({"post_block": 1}, {}, 1, {}, 1),
        ({"post_block": 1}, {"reduce": "mean"}, 1, {}, 1),
        ({"post_block": 1}, {}, 2, {}, None),
        ({"post_block": 1, "final": "all"}, {}, 1, {}, None),
        ({"post_block": 1}, {"lens": "logit"}, 1, {}, None),
        ({"post_block": 1}, {}, 1, {"enable_steering": True}, None),
        ({"post_block": 1}, {}, 1, {"capture_stop_after": 2}, 2),
        ({"post_block": 1}, {}, 1, {"model_impl": "transformers"}, None),
    ],
)
def test_when_it_ends_early(
    tiny_models: TinyModels,
    hooks: dict[str, Any],
    more: dict[str, Any],
    max_tokens: int,
    options: dict[str, Any],
    stop: int | None,
) -> None:
    asked = EngineArgs(
        model=str(tiny_models.path("llama")),
        skip_tokenizer_init=True,
        max_model_len=96,
        capture_consumers=["inline"],
        **options,
    )
    assert with_stop(asked, hooks, more, max_tokens).capture_stop_after == stop
