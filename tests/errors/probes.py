# SPDX-License-Identifier: Apache-2.0
"""What is refused of labelled texts, and of probes that are made of them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.errors.case import Case, path
from vllm.entrypoints.cli.steering.probe_verbs import (
    need_new,
    need_no_pickle,
    need_sites,
    settings_of,
)
from vllm.pilot.bench import Reply
from vllm.pilot.probes import LabelledData, learned_heads
from vllm.pilot.probes.calibration import need_enough
from vllm.pilot.probes.judging import judge, score_of
from vllm.pilot.probes.labelled import Labelled
from vllm.pilot.probes.reading import EntryRows, counted, over_of, read_entries
from vllm.pilot.probes.reading import need_sites as need_places
from vllm.pilot.probes.training import ProbeSettings, train_probe
from vllm.v1.capture.rules import RuleResult
from vllm.v1.probes.files import made_probe
from vllm.v1.probes.pools import Max, Mean

SITE = ("post_block", 0)
PROBE = made_probe([SITE], np.ones((1, 3)), np.zeros(1))
TEXTS = LabelledData([Labelled(f"text {i}", bool(i % 2), where=f"a:{i}") for i in range(60)], "a")
ONE = LabelledData([Labelled("text", True, where="a:1")], "a")
SPANNED = LabelledData([dataclasses.replace(ONE.entries[0], spans=((0, 2),))])


def reading(**entry: Any) -> Callable[[], object]:
    """Read a file with one entry."""

    def do() -> object:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "a.jsonl"
            file.write_text(json.dumps(entry))
            return LabelledData.read_file(file)

    return do


def bench(**parts: Any) -> Any:
    """A bench of one layer with one answer."""
    rows = {SITE: torch.zeros(2, 3)}
    reply = Reply((0, 1), (0,), "", False, **{"logprobs": [], "rows": rows, **parts})
    return SimpleNamespace(
        name="model",
        layers={0: ("post_block",)},
        hidden=3,
        encode=lambda text, special=True, answer=False: [0, 1],
        ask=lambda prompts, fields: [reply] * len(prompts),
    )


def read(data: LabelledData, **parts: Any) -> Callable[[], object]:
    made = bench(**parts)
    return lambda: list(read_entries(made, counted(made, data, "prompt"), [SITE], "reading"))


def unscored() -> object:
    made = bench(rules={"probe": RuleResult(None, 0, 2, None, None, None)})
    return judge(made, PROBE, counted(made, ONE, "prompt"))


def overflowing() -> object:
    """Learn a head of rows whose losses are no numbers."""
    rows = [
        EntryRows(one, torch.ones(2, 1, 3) * i, torch.tensor([one.entry.label] * 2))
        for i, one in enumerate(counted(bench(), TEXTS, "prompt"))
    ]
    with mock.patch.object(learned_heads, "_RATE", float("inf")):
        return learned_heads.learn(rows, rows, Max(), 1, 0, "relu", "last", 0, print)


def spans_of_another_head() -> object:
    entries = [dataclasses.replace(e, spans=((0, 2),) if e.label else ()) for e in TEXTS.entries]
    return train_probe(bench(), LabelledData(entries, "a"), [SITE], pool=Mean())


def written_over() -> None:
    with tempfile.NamedTemporaryFile() as file:
        need_new(Path(file.name))


PROBES = [
    Case({"allowed": "messages, prompt, text"}, do=reading(label=1)),
    Case({}, do=reading(text="a", completion="", label=1)),
    Case({"given": "2"}, do=reading(text="a", label=2)),
    Case({"given": "'test'"}, do=reading(text="a", label=1, split="test")),
    Case({}, do=reading(text="a", label=0, spans=[[0, 1]])),
    Case({}, do=reading(prompt=[1, 2], label=1, spans=[[0, 1]])),
    Case({"given": "[0, 2]", "allowed": "1"}, do=reading(text="a", label=1, spans=[[0, 2]])),
    Case({"given": "3"}, do=reading(text="a", label=1, spans=3)),
    Case({}, do=read(SPANNED, tokens=("te", "XX"))),
    Case({"where": "a:3"}, do=spans_of_another_head),
    Case({"where": "a:1"}, do=lambda: counted(bench(), ONE, "generated")),
    Case(path("over", "'last'"), do=lambda: over_of("last", ONE)),
    Case(path("score", "'mean'"), do=lambda: score_of("mean")),
    Case(path("head", "'tree'"), do=lambda: ProbeSettings(head="tree")),  # type: ignore[arg-type]
    Case(path("activation", "'step'"), do=lambda: ProbeSettings(activation="step")),
    Case(path("units", "0", most="256"), do=lambda: ProbeSettings(units=0)),
    Case({"given": "0.0"}, do=lambda: ProbeSettings(penalty=0.0)),
    Case({}, do=lambda: need_places(bench(), [])),
    Case({}, do=lambda: need_sites(None, None)),
    Case(
        {"given": "attention"},
        do=lambda: settings_of(Namespace(head="attention", pool=Mean())),
    ),
    Case(
        {"given": "72", "width": "3", "allowed": "0"},
        do=lambda: train_probe(bench(), TEXTS, [SITE], pool=Max(), memory=0),
    ),
    Case({"where": "a:1"}, do=read(ONE, rows={SITE: torch.full((2, 3), torch.nan)})),
    Case({"where": "a:1"}, do=unscored),
    Case({}, do=overflowing),
    Case({"given": "1.0"}, do=lambda: need_enough(TEXTS, 1.0)),
    Case({"needed": "100", "count": "30", "source": "a"}, do=lambda: need_enough(TEXTS, 0.01)),
    Case({}, do=written_over),
    Case({"path": "a.pkl"}, do=lambda: need_no_pickle(Path("a.pkl"))),
]
