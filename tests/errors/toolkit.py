# SPDX-License-Identifier: Apache-2.0
"""What is refused of data from which directions are made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.errors.case import Case, path
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.steering.start import start_engine
from vllm.pilot.directions import direction, pca
from vllm.pilot.fitting import find_directions
from vllm.pilot.metrics import Odds, score_function
from vllm.pilot.pairs import Example, Pairs
from vllm.pilot.report import need_folder
from vllm.pilot.rows import need_layers, need_read
from vllm.pilot.training import Settings

PAIR = '{"positive": "p", "negative": "n"}\n'
BENCH: Any = SimpleNamespace(layers={0: ("pre_attn",), 1: ("pre_attn", "post_block")}, hidden=3)
ROWS = torch.arange(12.0).view(2, 2, 3)
LOOSE = Pairs([Example("p")], [Example("n")], paired=False)


def reading(text: str, name: str = "a.jsonl") -> Callable[[], object]:
    """Read a file of that content, which is gone afterwards."""

    def do() -> object:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_text(text)
            return Pairs.read_file(Path(folder) / name)

    return do


def full_folder() -> object:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file").touch()
        return need_folder(folder)


def not_started() -> object:
    with tempfile.TemporaryDirectory() as folder:
        return start_engine(EngineArgs(model=folder))


def finding(**settings: Any) -> Callable[[], object]:
    asked = {"method": "pca", "read": "last", "point": "post_block", **settings}
    return lambda: find_directions(BENCH, LOOSE, [1], **asked)


TOOLKIT = [
    Case({}, do=reading('{"positive": "p", "negative": "p"}')),
    Case({"side": "negative"}, do=reading('{"text": "t", "label": 1}')),
    Case({"given": "'glad'"}, do=reading('{"text": "t", "label": "glad"}')),
    Case({"given": "a"}, do=reading('{"a": 1}')),
    Case({}, do=reading(PAIR + '{"text": "t", "label": 1}')),
    Case({"given": "'choose'", "side": "positive"}, do=Pairs.of(["a"], ["b"]).split),
    Case({"given": "[0, 1]"}, do=lambda: pca(ROWS, ROWS)),
    Case({"given": "[2, 2, 3]"}, do=lambda: pca(ROWS, ROWS[:1])),
    Case({"given": "'pca'"}, do=finding()),
    Case({}, do=lambda: direction("mean-centred", ROWS, ROWS + 1)),
    Case({"given": "2"}, do=finding(method="lat", memory=8)),
    Case({"given": "0", "point": "post_block"}, do=lambda: need_layers(BENCH, [0], "post_block")),
    Case({"given": "'answer_mean'"}, do=lambda: need_read("answer_mean")),
    Case(path("candidates", "0"), do=lambda: Settings(candidates=0)),
    Case({}, do=lambda: Settings(scales=(0.0,))),
    Case({}, do=lambda: Odds(LOOSE)),
    Case({"given": "'none:f'"}, do=lambda: score_function("none:f")),
    Case({}, do=full_folder),
    Case({}, do=not_started),
]
