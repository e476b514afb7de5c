# SPDX-License-Identifier: Apache-2.0
"""What is refused of data from which directions are made."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.errors.case import Case, path
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.steering.start import start_engine
from vllm.pilot.bench import Reply
from vllm.pilot.directions import d_prime, direction, lat, mean_difference, pca
from vllm.pilot.fitting import find_directions
from vllm.pilot.linear_probe import fit_probe
from vllm.pilot.metrics import Odds, score_function
from vllm.pilot.pairs import Example, Pairs
from vllm.pilot.report import need_folder
from vllm.pilot.rows import need_layers, need_read, read_rows
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


def answering(**parts: Any) -> Any:
    """A bench of one layer with one answer."""
    reply = Reply((0, 1), (0,), "", False, **{"logprobs": [], "rows": {}, **parts})
    return SimpleNamespace(
        layers={0: ("post_block",)},
        hidden=3,
        encode=lambda text, special=True, answer=False: [0, 1],
        ask=lambda prompts, fields: [reply] * len(prompts),
    )


PROMPTED = Pairs.of(["p"], ["n"], prompt="?")
IMPOSSIBLE = answering(logprobs=[{}, {1: -math.inf}, {0: 0.0}, {1: -math.inf}])
UNKNOWN = answering(rows={("post_block", 0): torch.full((1, 3), torch.nan)})


def unpaired() -> object:
    """Find a direction of rows of which one differs, which the random pairs leave out."""
    rows = ROWS[:1].repeat(9, 1, 1)
    rows[torch.randperm(9, generator=torch.Generator().manual_seed(0))[-1]] += 1
    return lat(rows[:4], rows[4:])


TOOLKIT = [
    Case({}, do=reading('{"positive": "p", "negative": "p"}')),
    Case({"side": "negative"}, do=reading('{"text": "t", "label": 1}')),
    Case({"given": "'glad'"}, do=reading('{"text": "t", "label": "glad"}')),
    Case({"given": "a"}, do=reading('{"a": 1}')),
    Case({}, do=reading(PAIR + '{"text": "t", "label": 1}')),
    Case({"given": "'choose'", "side": "positive"}, do=Pairs.of(["a"], ["b"]).split),
    Case({"given": "[0, 1]"}, do=lambda: pca(ROWS, ROWS)),
    Case({}, do=lambda: fit_probe(ROWS[:1, 0], ROWS[:1, 0])),
    Case({}, do=lambda: fit_probe(ROWS[:, 0], ROWS[:, 0])),
    Case(
        {"side": "negative", "given": "0", "layer": "0"},
        do=lambda: mean_difference(ROWS, ROWS / 0),
    ),
    Case(
        {"where": "positive[0]", "point": "post_block", "layer": "0"},
        do=lambda: read_rows(UNKNOWN, PROMPTED),
    ),
    Case(
        {"where": "positive[0]", "given": "no steering"},
        do=lambda: Odds(PROMPTED)(IMPOSSIBLE, [None]),
    ),
    Case(
        {"name": "mean", "given": "1.5e+60"},
        do=lambda: mean_difference(ROWS, ROWS.double() + 3e60),
    ),
    Case({"given": "[0, 1]"}, do=lambda: pca(ROWS, ROWS + 1, centred=True)),
    Case(
        {"seed": "0", "given": "[0, 1]"},
        do=unpaired,
    ),
    Case({"positive": "1", "negative": "2"}, do=lambda: d_prime(ROWS[0, 0, :1], ROWS[:, 0, 0])),
    Case({"given": "[2, 2, 3]"}, do=lambda: pca(ROWS, ROWS[:1])),
    Case(path("negative", "MaskedArray"), do=lambda: pca(ROWS, np.ma.array(ROWS.numpy()))),
    Case(path("negative", "torch.complex64"), do=lambda: pca(ROWS, ROWS * 1j)),
    Case({"given": "'pca'"}, do=finding()),
    Case({}, do=lambda: direction("mean-centred", ROWS, ROWS + 1)),
    Case({"given": "2"}, do=finding(method="lat", memory=8)),
    Case({"given": "0", "point": "post_block"}, do=lambda: need_layers(BENCH, [0], "post_block")),
    Case({"given": "0", "point": "post_block"}, do=lambda: need_layers(BENCH, 0, "post_block")),
    Case({"given": "'answer_mean'"}, do=lambda: need_read("answer_mean")),
    Case(path("candidates", "0"), do=lambda: Settings(candidates=0)),
    Case({}, do=lambda: Settings(scales=(0.0,))),
    Case({}, do=lambda: Odds(LOOSE)),
    Case({"given": "'none:f'"}, do=lambda: score_function("none:f")),
    Case({}, do=full_folder),
    Case({}, do=not_started),
]
