# SPDX-License-Identifier: Apache-2.0
"""Pairs: every form that people have them in, what is wrong by file and line, how they split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm.pilot.pairs import SPLITS, Example, Pairs, last_words, read_texts

pytestmark = pytest.mark.quick

CHAT = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "Well."}]
FORMS: dict[str, tuple[str, str]] = {
    "repeng": ("a.json", '[{"positive": "p", "negative": "n"}]'),
    "lists": ("a.json", '[["p", "n"]]'),
    "jsonl": ("a.jsonl", '{"positive": "p", "negative": "n"}\n\n'),
    "preference": ("a.jsonl", '{"prompt": "q", "chosen": "p", "rejected": "n"}'),
    "csv": ("a.csv", 'prompt,positive,negative\n"a, q",p,n\n'),
    "csv with a mark": ("a.csv", "\ufeffpositive,negative\np,n\n"),
    "tsv": ("a.tsv", "positive\tnegative\nwith, comma\tn\n"),
    "CAA": (
        "a.json",
        '[{"question": "q", "answer_matching_behavior": " (A)",'
        ' "answer_not_matching_behavior": " (B)"}]',
    ),
    "labels": ("a.jsonl", '{"text": "p", "label": 1}\n{"text": "n", "label": "negative"}'),
    "labels in csv": ("a.csv", "text,label\np,1\nn,0\np2,true\n"),
}


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    pairs = Pairs.read_file(written(tmp_path, *FORMS[form]))
    assert last_words(pairs.positive[0].text).strip()[0] in ("p", "w", "(")
    assert last_words(pairs.negative[0].text) in ("n", " (B)")
    assert pairs.paired == ("label" not in form)
    assert pairs.read == (-2 if form == "CAA" else None)
    prompt = {"preference": "q", "csv": "a, q", "CAA": "q"}.get(form, "")
    assert pairs.positive[0].prompt == pairs.negative[0].prompt == prompt
    assert pairs.comparable == bool(prompt)
    assert len(pairs.positive) == (2 if form == "labels in csv" else 1)
    assert len(pairs.digest) == 64


def test_chats_are_texts_too(tmp_path: Path) -> None:
    other = [CHAT[0], {"role": "assistant", "content": "Badly."}]
    entry = {"positive": CHAT, "negative": other}
    pairs = Pairs.read_file(written(tmp_path, "a.jsonl", json.dumps(entry)))
    assert last_words(pairs.positive[0].text) == "Well."
    assert [dict(m) for m in pairs.negative[0].text] == other  # type: ignore[arg-type]


def test_a_persona(tmp_path: Path) -> None:
    entry = {"system_positive": "Be glad.", "system_negative": "Be sad.", "questions": ["a", "a"]}
    persona = Pairs.read_file(written(tmp_path, "a.json", json.dumps(entry))).persona
    assert persona and persona.questions == ("a",)


PAIR = '{"positive": "p", "negative": "n"}\n'
WRONG: list[tuple[str, str, str]] = [
    ("a.jsonl", PAIR + "{\n", "a.jsonl:2: is not JSON"),
    ("a.json", '[{"positive": "p",\n]', "a.json, line 2: is not JSON"),
    ("a.jsonl", PAIR + '{"positive": "p"}', "a.jsonl:2: negative is missing"),
    ("a.jsonl", '{"positive": "p", "negative": ""}', "a.jsonl:1: negative is empty"),
    ("a.jsonl", '{"positive": 3, "negative": "n"}', "a.jsonl:1: positive is no text"),
    ("a.jsonl", '{"positive": [{"role": "user"}], "negative": "n"}', "role and content"),
    ("a.jsonl", '{"positive": "p", "negative": "p"}', "a.jsonl:1: .* the same text"),
    ("a.jsonl", PAIR + '{"text": "t", "label": 1}', "a.jsonl:2: is of another form than .*:1"),
    ("a.jsonl", '{"text": "t", "label": "happy"}', "a.jsonl:1: label 'happy'"),
    ("a.jsonl", '{"text": "t", "label": 1}\n' * 2, "there are no negative examples"),
    ("a.jsonl", "\n", "there are no positive examples"),
    ("a.jsonl", '{"a": 1}', "a.jsonl:1: has a; needs positive and negative"),
    ("a.jsonl", "7", "a.jsonl:1: is no pair but int"),
    ("a.jsonl", '["a", "b", "c"]', "a.jsonl:1: a pair has two texts, this list 3"),
    ("a.jsonl", PAIR[:-2] + ', "split": "test"}', "a.jsonl:1: split 'test' is none of train"),
    ("a.csv", "positive,negative\np,n\np\n", "a.csv:3: has 1 fields, the header 2"),
    ("a.csv", 'positive,negative\np,"n\n', "a.csv:2: is no CSV: unexpected end"),
    ("a.json", '"text"', "a list of pairs is needed"),
    ("a.json", '{"questions": ["a"]}', "needs system_positive"),
    ("a.txt", "p", ".json, .jsonl, .csv and .tsv are read, not '.txt'"),
]


@pytest.mark.parametrize("name, text, said", WRONG)
def test_what_is_wrong_is_said_with_its_line(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        Pairs.read_file(written(tmp_path, name, text))


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(PAIR.encode() + b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a.jsonl:2: is not UTF-8"):
        Pairs.read_file(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="1 positive and 2 negative"):
        Pairs.of(["a"], ["b", "c"])
    with pytest.raises(FileNotFoundError):
        Pairs.read_file(tmp_path / "none.jsonl")


def many(count: int, **more: Any) -> Pairs:
    return Pairs(
        [Example(f"p{i}", f"q{i // 2}", **more) for i in range(count)],
        [Example(f"n{i}", f"q{i // 2}", **more) for i in range(count)],
    )


def test_no_prompt_is_in_two_splits() -> None:
    parts = many(200).split()
    assert {name: len(part.positive) for name, part in parts.items()} == {
        "train": 120,
        "choose": 40,
        "report": 40,
    }
    prompts = [{e.prompt for e in part.positive + part.negative} for part in parts.values()]
    assert len(set.union(*prompts)) == sum(map(len, prompts)) == 100
    for part in parts.values():
        for ours, others in zip(part.positive, part.negative, strict=True):
            assert str(ours.text)[1:] == str(others.text)[1:]
    # Always alike, whatever the order of the file.
    again = Pairs(many(200).positive[::-1], many(200).negative[::-1]).split()
    assert {e.prompt for e in again["report"].positive} == prompts[2]


def test_splits_that_the_file_names() -> None:
    pairs = many(6)
    named = [Example(e.text, e.prompt, SPLITS[i % 3]) for i, e in enumerate(pairs.positive)]
    others = [Example(e.text, e.prompt, SPLITS[i % 3]) for i, e in enumerate(pairs.negative)]
    parts = Pairs(named, others).split()
    assert [str(e.text) for e in parts["choose"].positive] == ["p1", "p4"]


def test_an_empty_split_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"split 'choose' has no positive examples, of 2 and 2"):
        many(2).split()
    uneven = Pairs([Example(f"p{i}") for i in range(40)], [Example("n")], paired=False)
    with pytest.raises(ValueError, match="has no negative examples"):
        uneven.split()


def test_texts(tmp_path: Path) -> None:
    assert read_texts(written(tmp_path, "a.txt", "one\n\ntwo\n")) == ["one", "two"]
    lines = ['"one"', '{"prompt": "two"}', json.dumps(CHAT)]
    texts = read_texts(written(tmp_path, "a.jsonl", "\n".join(lines)))
    assert texts[:2] == ["one", "two"] and last_words(texts[2]) == "Well."
    # A line ends with its newline, not at what Unicode calls a line's end.
    for name, line in (("d.jsonl", '"one\u2028two"'), ("d.txt", "one\u2028two")):
        assert read_texts(written(tmp_path, name, line)) == ["one\u2028two"]
    with pytest.raises(ValueError, match="there are no texts"):
        read_texts(written(tmp_path, "b.txt", "\n"))
    with pytest.raises(ValueError, match=r"c.jsonl:2: is not JSON"):
        read_texts(written(tmp_path, "c.jsonl", '"a"\n{'))
