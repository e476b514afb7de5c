# SPDX-License-Identifier: Apache-2.0
"""Labelled texts, of which probes are trained, calibrated and judged.

| column | content |
|---|---|
| `text`, `prompt` or `messages` | a text, a chat, or token ids |
| `completion` | a text or token ids after it; of a chat that ends with an answer, that answer |
| `label` | 1 or 0 |
| `spans` | of a positive entry `[[start, stop], ...]`: the characters of its last text that are |
| `split` | `train`, `choose` or `report`, where the data say it themselves |

Files are those of `vllm.pilot.dataset`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.pilot.dataset.examples import PROMPT_COLUMNS, DataFile, Prompt, need_prompt
from vllm.pilot.pairs import LABELS, SHARES, SPLITS
from vllm.pilot.records import DatasetError

Span = tuple[int, int]
"""First character, and the one after the last."""


@dataclass(frozen=True)
class Labelled:
    """One text of one class."""

    prompt: Prompt
    label: bool
    completion: str | list[int] | None = None
    spans: tuple[Span, ...] = ()
    """Characters that are positive, of the completion, or of the prompt where there is none."""
    split: str | None = None
    where: str = ""
    """The file and line, for errors."""


@dataclass(frozen=True)
class LabelledData:
    """Texts of two classes, in the order of their file."""

    entries: list[Labelled] = field(repr=False)
    source: str = "data"
    digest: str = ""
    """SHA-256 of the file."""

    @classmethod
    def read_file(cls, path: str | Path, unlabelled: bool | None = None) -> "LabelledData":
        """Read a file or a folder that `DataFile` can read.

        Args:
            unlabelled: the label of entries without one; None if each needs one.

        Raises:
            ValueError: an entry cannot be read; the message names file and line. There are none.
            OSError: the file cannot be opened.
        """
        file = DataFile(str(path))
        entries = [_entry(record, place, unlabelled) for place, record in file.records()]
        if not entries:
            raise DatasetError(f"{path}: has no examples")
        return cls(entries, str(path), file.digest())

    @property
    def counts(self) -> tuple[int, int]:
        """Number of positive and of negative entries."""
        positive = sum(entry.label for entry in self.entries)
        return positive, len(self.entries) - positive

    @property
    def answered(self) -> bool:
        """True if each entry has a completion."""
        return all(entry.completion is not None for entry in self.entries)

    def need_both(self) -> None:
        """Raise ValueError where a class has no entries."""
        for name, count in zip(("positive", "negative"), self.counts, strict=True):
            if not count:
                raise ValueError(f"{self.source}: there are no {name} examples")

    def split(self, names: Sequence[str] = SPLITS) -> dict[str, "LabelledData"]:
        """Cut into splits by prompt, so that no prompt is in two of them.

        Entries that name a split keep it. The others' order is that of a hash, so the same data are
        always cut alike, in shares of 60, 20 and 20.

        Args:
            names: the splits that are needed, of `SPLITS`.

        Raises:
            ValueError: a split, or a class of it, would be empty.
        """
        groups: dict[str, list[int]] = {}
        chosen: dict[str, list[int]] = {name: [] for name in names}
        for i, entry in enumerate(self.entries):
            if entry.split is None:
                groups.setdefault(str(entry.prompt), []).append(i)
            elif entry.split in chosen:
                chosen[entry.split].append(i)
            else:
                raise ValueError(
                    f"{entry.where}: split: use one of {', '.join(names)}, not {entry.split!r}"
                )
        order = sorted(groups, key=lambda key: hashlib.sha256(key.encode()).digest())
        shares = [SHARES[SPLITS.index(name)] for name in names]
        start = 0.0
        for name, share in zip(names, shares, strict=True):
            stop = start + share / sum(shares)
            for key in order[round(start * len(order)) : round(stop * len(order))]:
                chosen[name] += groups[key]
            start = stop
        made = {
            name: replace(self, entries=[self.entries[i] for i in sorted(members)])
            for name, members in chosen.items()
        }
        for name, part in made.items():
            if not all(part.counts):
                lacking = "negative" if part.counts[0] else "positive"
                positive, negative = self.counts
                raise ValueError(
                    f"{self.source}: split {name!r} has no {lacking} examples, of {positive} and "
                    f"{negative}; give more, with different prompts, or name the split of each in "
                    "a column 'split'"
                )
        return made


def _entry(record: Mapping[str, Any], where: str, unlabelled: bool | None) -> Labelled:
    named = next((name for name in PROMPT_COLUMNS if name in record), None)
    if named is None:
        raise DatasetError(f"{where}: needs a column of {', '.join(PROMPT_COLUMNS)}")
    prompt = need_prompt(record[named], where)
    completion = record.get("completion")
    if completion is not None and not _is_text(completion):
        raise DatasetError(f"{where}: its completion is no text and no token ids, or is empty")
    if completion is None and isinstance(prompt, list) and len(prompt) > 1:
        *before, last = prompt
        if isinstance(last, dict) and last["role"] == "assistant" and last["content"]:
            prompt, completion = before, last["content"]
    label = record.get("label")
    side = unlabelled if label is None else LABELS.get(str(label).strip().lower())
    if side is None:
        raise DatasetError(f"{where}: label {label!r}; 1 or 0, positive or negative")
    split = record.get("split") or None
    if split is not None and split not in SPLITS:
        raise DatasetError(f"{where}: split: use one of {', '.join(SPLITS)}, not {split!r}")
    spans = _spans(record.get("spans"), prompt if completion is None else completion, where)
    if spans and not side:
        raise DatasetError(f"{where}: has spans, which are the positive characters, and label 0")
    return Labelled(prompt, side, completion, spans, split, where)


def _is_text(value: Any) -> bool:
    ids = isinstance(value, list) and all(type(part) is int for part in value)
    return bool(value) and (isinstance(value, str) or ids)


def _spans(given: Any, text: Any, where: str) -> tuple[Span, ...]:
    if not given:
        return ()
    if not isinstance(text, str):
        raise DatasetError(f"{where}: has spans, which are characters of a text, and no text")
    for span in given if isinstance(given, list) else [given]:
        two = isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)
        if not two or not 0 <= span[0] < span[1] <= len(text):
            raise DatasetError(
                f"{where}: span {span!r} is no [start, stop] within its {len(text)} characters"
            )
    return tuple((start, stop) for start, stop in given)
