# SPDX-License-Identifier: Apache-2.0
"""Labelled texts: the forms in which files have them, and how they are cut and encoded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.labelled import planted
from vllm.pilot.probes.labelled import Labelled, LabelledData
from vllm.pilot.probes.reading import _chunks, _in_spans, counted, over_of
from vllm.pilot.rows import CHUNK

pytestmark = pytest.mark.quick

ASKED = {"role": "user", "content": "Is it?"}
ANSWERED = {"role": "assistant", "content": "It is."}


def read(tmp_path: Path, *entries: dict[str, Any], **more: Any) -> LabelledData:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    return LabelledData.read_file(path, **more)


def test_forms(tmp_path: Path) -> None:
    data = read(
        tmp_path,
        {"text": "a", "label": 1, "spans": [[0, 1]]},
        {"prompt": "a", "completion": "b", "label": "negative", "split": "report"},
        {"messages": [ASKED, ANSWERED], "label": 0},
        {"messages": [ASKED], "completion": [1, 2], "label": True},
        {"prompt": [3, 4], "label": "0"},
    )
    found = [(e.prompt, e.completion, e.label) for e in data.entries]
    assert found == [
        ("a", None, True),
        ("a", "b", False),
        ([ASKED], "It is.", False),
        ([ASKED], [1, 2], True),
        ([3, 4], None, False),
    ]
    assert data.entries[0].spans == ((0, 1),) and data.entries[1].split == "report"
    assert data.counts == (2, 3) and not data.answered and len(data.digest) == 64
    assert data.entries[4].where == f"{tmp_path}/texts.jsonl:5"
    (tmp_path / "texts.csv").write_text('text,label\n"a, b",1\nc,0\n')
    table = LabelledData.read_file(tmp_path / "texts.csv")
    assert [(e.prompt, e.label) for e in table.entries] == [("a, b", True), ("c", False)]


def test_texts_without_a_label(tmp_path: Path) -> None:
    assert read(tmp_path, {"text": "a"}, unlabelled=False).counts == (0, 1)
    with pytest.raises(ValueError, match="label None; 1 or 0"):
        read(tmp_path, {"text": "a"})


def test_no_prompt_is_in_two_splits() -> None:
    """The same texts are always cut alike, whatever their order; named splits are kept."""
    data = planted(50)
    twice = LabelledData([*data.entries, *data.entries])
    parts = twice.split()
    prompts = [{str(e.prompt) for e in part.entries} for part in parts.values()]
    assert (
        sum(map(len, prompts)) == 100
        and not prompts[0] & prompts[1]
        and not prompts[1] & (prompts[2])
    )
    assert [len(part.entries) for part in parts.values()] == [120, 40, 40]
    turned = LabelledData(data.entries[::-1]).split()
    assert {str(e.prompt) for e in turned["report"].entries} == prompts[2]
    assert [len(part.entries) for part in data.split(("train", "choose")).values()] == [75, 25]
    named = [Labelled(f"n{i}", bool(i), split="report") for i in range(2)]
    report = LabelledData([*data.entries, *named]).split()["report"]
    assert len(report.entries) == 22 and report.entries[-1].prompt == "n1"
    with pytest.raises(ValueError, match="split: use one of train, choose, not 'report'"):
        LabelledData([*data.entries, *named]).split(("train", "choose"))


def test_tokens_that_count() -> None:
    """Prompt and completion are cut apart; a chat ends with what comes before an answer."""
    asked: list[tuple[Any, bool, bool]] = []

    def encode(text: Any, special: bool = True, answer: bool = False) -> list[int]:
        asked.append((text, special, answer))
        return [0] * special + [ord(c) for c in str(text)[:3]]

    bench: Any = SimpleNamespace(encode=encode)
    both = LabelledData([Labelled("abc", True, "de"), Labelled([ASKED], False, [7])])
    found = [counted(bench, both, over) for over in ("prompt", "generated", "all")]
    assert [(one.start, one.stop) for part in found for one in part] == [
        *((0, 4), (0, 4), (4, 6), (4, 5), (0, 6), (0, 5))
    ]
    assert found[0][0].ids == [0, *map(ord, "abc"), *map(ord, "de")] and found[0][1].ids[-1] == 7
    assert asked[1] == ("de", False, False) and asked[2][2]
    assert over_of(None, both) == "generated" and over_of("all", both) == "all"
    assert over_of(None, LabelledData([*both.entries, Labelled("a", True)])) == "prompt"


def test_characters_of_spans() -> None:
    entry = Labelled("x", True, "one two", ((4, 7),))
    assert _in_spans(entry, ["one", " t", "wo"]).tolist() == [False, True, True]
    assert _in_spans(entry, ["<s>", "x", "one ", "two"]).tolist() == [False, False, False, True]
    inner = Labelled("one two", True, None, ((0, 1), (6, 7)))
    assert _in_spans(inner, ["one", " t", "wo"]).tolist() == [True, False, True]


def test_few_rows_are_read_at_a_time() -> None:
    entries: Any = [SimpleNamespace(rows=100) for _ in range(700)]
    parts = list(_chunks(entries, 1))
    assert [len(part) for part in parts] == [CHUNK, CHUNK, 700 - 2 * CHUNK]
    wide = list(_chunks(entries, 1 << 20))
    assert {len(part) for part in wide} == {1} and len(wide) == 700
