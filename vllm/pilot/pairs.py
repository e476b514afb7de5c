# SPDX-License-Identifier: Apache-2.0
"""Contrasting examples, read from the forms in which people have them.

| form | told by |
|---|---|
| JSON list, JSONL, CSV or TSV of `positive`, `negative`, and `prompt`, `split` where there | keys |
| the same with `chosen`, `rejected` in place of them | keys |
| JSON list or JSONL of `[positive, negative]` | two texts |
| CAA: `question`, `answer_matching_behavior`, `answer_not_matching_behavior` | keys |
| `text`, `label`, and `split` where there: classes without pairs | keys |
| one JSON object with `system_positive`, `system_negative`, `questions` | keys |

A text may be a list of chat messages, which goes through the model's chat template.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from vllm.pilot.records import parse_json, read_csv, read_jsonl, read_lines

SPLITS = ("train", "choose", "report")
"""Splits of the examples: to find directions, to choose among them, to report on the choice."""
SHARES = (0.6, 0.2, 0.2)

LABELS = {
    "positive": True, "pos": True, "1": True, "1.0": True, "true": True, "yes": True, "+1": True,
    "negative": False, "neg": False, "0": False, "0.0": False, "false": False, "no": False,
    "-1": False, "-1.0": False,
}  # fmt: skip
"""Word for a class -> whether it is the positive one."""
_CAA = ("question", "answer_matching_behavior", "answer_not_matching_behavior")
_LETTER = re.compile(r"\s*\([A-Z]\)\s*")

Message = tuple[tuple[str, str], ...]
Text = str | tuple[Message, ...]
"""A text, or the messages of a chat, each as its items."""


@dataclass(frozen=True)
class Example:
    """One text of one class, and what stands before it."""

    text: Text
    prompt: Text = ""
    """Text or chat before `text`. The model is asked how likely `text` is after it, or `asked`."""
    split: str | None = None
    where: str = ""
    """The file and line, for errors."""
    asked: Text = ""
    """The prompt without what made the model write `text`, where that was a system prompt."""

    @property
    def question(self) -> Text:
        """Text or chat after which the model is asked how likely `text` is."""
        return self.asked or self.prompt


@dataclass(frozen=True)
class Persona:
    """Two system prompts and questions, whose answers are the examples: they must be written."""

    positive: str
    negative: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """Examples of a concept and of its opposite."""

    positive: list[Example]
    negative: list[Example]
    paired: bool = True
    """True if positive[i] belongs to negative[i]."""
    read: str | int | None = None
    """Place where rows are read unless the caller names one: -2 for CAA, whose answers end with a
    letter in brackets."""
    persona: Persona | None = None
    """Persona by which the examples are still to be written; None if none are."""
    digest: str = ""
    """SHA-256 of the file."""
    source: str = field(default="pairs", compare=False)

    def __repr__(self) -> str:
        """Say how many, and of what."""
        if self.persona is not None:
            return f"Pairs({self.source!r}, {len(self.persona.questions)} questions to be answered)"
        paired = "pairs" if self.paired else "no pairs"
        sizes = f"{len(self.positive)} positive, {len(self.negative)} negative"
        return f"Pairs({self.source!r}, {sizes}, {paired})"

    @classmethod
    def of(cls, positive: Sequence[Text], negative: Sequence[Text], prompt: Text = "") -> "Pairs":
        """Make pairs of two lists of texts of one length.

        Raises:
            ValueError: they are not as long, or a pair has no difference.
        """
        if len(positive) != len(negative):
            raise ValueError(f"pairs: {len(positive)} positive and {len(negative)} negative texts")
        return _checked(
            cls(
                [Example(t, prompt, where=f"positive[{i}]") for i, t in enumerate(positive)],
                [Example(t, prompt, where=f"negative[{i}]") for i, t in enumerate(negative)],
            )
        )

    @classmethod
    def read_file(cls, path: str | Path) -> "Pairs":
        """Read a file in one of the forms of this module.

        Raises:
            ValueError: a line cannot be read or lacks a key, a pair has no difference, or there is
                one class only; the message names file and line.
            OSError: the file cannot be opened.
        """
        path = Path(path)
        made = _read(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _checked(replace(made, digest=digest, source=str(path)))

    def split(self) -> dict[str, "Pairs"]:
        """Cut into `SPLITS`, by prompt (by text where there is none), so that no prompt is in two.

        Examples that name a split keep it. The others' order is that of a hash, so the same data
        are always cut alike, 60, 20 and 20 of 100.

        Raises:
            ValueError: a split, or a class of it, would be empty.
        """
        groups: dict[str, list[tuple[int, bool]]] = {}
        named: dict[str, list[tuple[int, bool]]] = {name: [] for name in SPLITS}
        for side, examples in ((True, self.positive), (False, self.negative)):
            for i, example in enumerate(examples):
                if example.split:
                    named[example.split].append((i, side))
                    continue
                key = example.question or (self.positive[i].text if self.paired else example.text)
                groups.setdefault(str(key), []).append((i, side))
        order = sorted(groups, key=lambda key: hashlib.sha256(key.encode()).digest())
        start = 0.0
        for name, share in zip(SPLITS, SHARES, strict=True):
            first, last = round(start * len(order)), round((start + share) * len(order))
            for key in order[first:last]:
                named[name] += groups[key]
            start += share
        made = {}
        for name, members in named.items():
            # By class, in the order of the file.
            chosen = {side: sorted(i for i, at in members if at is side) for side in (True, False)}
            if not chosen[True] or not chosen[False]:
                lacking = "positive" if not chosen[True] else "negative"
                raise ValueError(
                    f"{self.source}: split {name!r} has no {lacking} examples, of "
                    f"{len(self.positive)} and {len(self.negative)}; give more, with different "
                    "prompts, or name the split of each in a column 'split'"
                )
            made[name] = Pairs(
                [self.positive[i] for i in chosen[True]],
                [self.negative[i] for i in chosen[False]],
                self.paired,
                self.read,
                None,
                self.digest,
                self.source,
            )
        return made

    def first(self, count: int) -> "Pairs":
        """The first examples of each class, at most `count`."""
        return Pairs(
            self.positive[:count],
            self.negative[:count],
            self.paired,
            self.read,
            None,
            self.digest,
            self.source,
        )

    @property
    def comparable(self) -> bool:
        """True if each pair continues a prompt, so that one can ask which text is likelier."""
        return self.paired and all(e.prompt for e in self.positive)


def read_texts(path: str | Path) -> list[Text]:
    """Texts of a file: JSONL of strings, messages or `{"text"}`/`{"prompt"}`, or a text a line.

    Raises:
        ValueError: a line cannot be read; the message names file and line. There are none.
        OSError: the file cannot be opened.
    """
    path = Path(path)
    texts: list[Text] = []
    if path.suffix == ".jsonl":
        for place, value in read_jsonl(path):
            if isinstance(value, dict):
                value = value.get("prompt", value.get("text"))
            texts.append(_text(value, place, "text"))
    else:
        texts += [line.rstrip("\r\n") for _, line in read_lines(path) if line.strip()]
    if not texts:
        raise ValueError(f"{path}: there are no texts in it")
    return texts


def last_words(text: Text) -> str:
    """The text itself, or what the last message of a chat says."""
    return text if isinstance(text, str) else dict(text[-1])["content"]


def _read(path: Path) -> Pairs:
    kind = path.suffix.lower()
    if kind == ".json":
        whole = parse_json("".join(line for _, line in read_lines(path)), str(path))
        if isinstance(whole, dict):
            return _persona(whole, str(path))
        if not isinstance(whole, list):
            raise ValueError(f"{path}: a list of pairs is needed, or a persona's object")
        return _records(((f"{path}[{i}]", entry) for i, entry in enumerate(whole)), str(path))
    if kind == ".jsonl":
        return _records(read_jsonl(path), str(path))
    if kind in (".csv", ".tsv"):
        return _records(read_csv(path, "\t" if kind == ".tsv" else ","), str(path))
    raise ValueError(f"{path}: .json, .jsonl, .csv and .tsv are read, not {kind or 'no suffix'!r}")


def _records(entries: Iterable[tuple[str, Any]], source: str) -> Pairs:
    positive: list[Example] = []
    negative: list[Example] = []
    kinds: dict[str, str] = {}
    letters = True
    for where, entry in entries:
        kind, prompt, ours, others, split = _fields(entry, where)
        kinds.setdefault(kind, where)
        if len(kinds) > 1:
            first, other = kinds.values()
            raise ValueError(f"{other}: is of another form than {first}")
        letters = letters and all(
            isinstance(t, str) and _LETTER.fullmatch(t) for t in (ours, others) if t is not None
        )
        if ours is not None:
            positive.append(Example(ours, prompt, split, where))
        if others is not None:
            negative.append(Example(others, prompt, split, where))
    caa = "CAA" in kinds and letters
    return Pairs(positive, negative, "label" not in kinds, -2 if caa else None, source=source)


def _fields(entry: Any, where: str) -> tuple[str, Text, Text | None, Text | None, str | None]:
    """The form of an entry, and its prompt, positive and negative text and split."""
    if isinstance(entry, list):
        if len(entry) != 2:
            raise ValueError(f"{where}: a pair has two texts, this list {len(entry)}")
        return "list", "", _text(entry[0], where, "[0]"), _text(entry[1], where, "[1]"), None
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: is no pair but {type(entry).__name__}")
    split = entry.get("split") or None
    if split is not None and split not in SPLITS:
        raise ValueError(f"{where}: split {split!r} is none of {', '.join(SPLITS)}")
    if "label" in entry:
        side = LABELS.get(str(entry["label"]).strip().lower())
        if side is None:
            raise ValueError(f"{where}: label {entry['label']!r}; 1 or 0, positive or negative")
        text = _text(entry.get("text"), where, "text")
        return "label", "", text if side else None, None if side else text, split
    for kind, (before, ours, others) in {
        "pair": ("prompt", "positive", "negative"),
        "preference": ("prompt", "chosen", "rejected"),
        "CAA": _CAA,
    }.items():
        if ours in entry or others in entry:
            given = entry.get(before) or ""
            prompt = _text(given, where, before) if given else ""
            texts = _text(entry.get(ours), where, ours), _text(entry.get(others), where, others)
            return kind, prompt, *texts, split
    known = "positive and negative; chosen and rejected; text and label; " + ", ".join(_CAA)
    raise ValueError(f"{where}: has {', '.join(map(str, entry)) or 'no keys'}; needs {known}")


def _persona(entry: Mapping[str, Any], source: str) -> Pairs:
    questions = entry.get("questions")
    systems = [entry.get(f"system_{side}") for side in ("positive", "negative")]
    if not all(isinstance(system, str) and system for system in systems):
        raise ValueError(f"{source}: needs system_positive and system_negative, two texts")
    if not isinstance(questions, list) or not questions:
        raise ValueError(f"{source}: questions: a list of texts is needed")
    if wrong := [i for i, q in enumerate(questions) if not isinstance(q, str) or not q]:
        raise ValueError(f"{source}: questions[{wrong[0]}] is no text")
    positive, negative = map(str, systems)
    persona = Persona(positive, negative, tuple(dict.fromkeys(questions)))
    return Pairs([], [], read="answer-mean", persona=persona, source=source)


def _checked(pairs: Pairs) -> Pairs:
    """The pairs, once both classes are there and every pair has a difference."""
    if pairs.persona is not None:
        if pairs.persona.positive == pairs.persona.negative:
            raise ValueError(f"{pairs.source}: system_positive and system_negative are the same")
        return pairs
    for examples, name in ((pairs.positive, "positive"), (pairs.negative, "negative")):
        if not examples:
            raise ValueError(f"{pairs.source}: there are no {name} examples")
    if pairs.paired:
        for ours, others in zip(pairs.positive, pairs.negative, strict=True):
            if ours.text == others.text:
                raise ValueError(f"{ours.where}: positive and negative are the same text")
    return pairs


def _text(value: Any, where: str, name: str) -> Text:
    """A text, or messages that can be compared and hashed."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        for message in value:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise ValueError(f"{where}: {name}: a message has role and content")
            if not all(isinstance(entry, str) for entry in message.values()):
                raise ValueError(f"{where}: {name}: what a message has must be text")
        return tuple(tuple(message.items()) for message in value)
    _no_text(value, where, name)


def _no_text(value: Any, where: str, name: str) -> NoReturn:
    what = "is missing" if value is None else "is empty" if not value else "is no text"
    raise ValueError(f"{where}: {name} {what}")
