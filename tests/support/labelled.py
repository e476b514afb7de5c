# SPDX-License-Identifier: Apache-2.0
"""Labelled texts with a planted difference, for a model that reads single characters."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.pilot.probes.labelled import Labelled, LabelledData

if TYPE_CHECKING:
    from pathlib import Path

_LETTERS = "abcdefghijklmnop"
PLANTED = "Z"
"""The letter that a third of a positive text is, and others do not have."""


def planted(count: int, seed: int = 0, answered: bool = False) -> LabelledData:
    """So many texts of each class, of 8 to 20 letters; `answered` puts the letter in an answer."""
    rng = random.Random(seed)
    entries = []
    for i in range(2 * count):
        text = [rng.choice(_LETTERS) for _ in range(rng.randint(8, 20))]
        label = bool(i % 2)
        if label:
            for place in rng.sample(range(len(text)), len(text) // 3):
                text[place] = PLANTED
        written = "".join(text)
        asked = "".join(rng.choice(_LETTERS) for _ in range(6))
        where = f"texts:{i + 1}"
        if answered:
            entries.append(Labelled(asked, label, written, where=where))
        else:
            entries.append(Labelled(written, label, where=where))
    return LabelledData(entries, "texts")


def shuffled(data: LabelledData) -> LabelledData:
    """The same texts with the labels of others."""
    labels = [entry.label for entry in data.entries]
    random.Random(7).shuffle(labels)
    pairs = zip(data.entries, labels, strict=True)
    return replace(data, entries=[replace(entry, label=label) for entry, label in pairs])


def write(data: LabelledData, path: Path) -> str:
    """Write them as JSONL, and return the path."""
    with path.open("w") as file:
        for entry in data.entries:
            named = {"label": int(entry.label), "spans": [list(span) for span in entry.spans]}
            if entry.completion is None:
                print(json.dumps({"text": entry.prompt, **named}), file=file)
            else:
                answer = {"prompt": entry.prompt, "completion": entry.completion}
                print(json.dumps({**answer, **named}), file=file)
    return str(path)
