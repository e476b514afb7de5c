# SPDX-License-Identifier: Apache-2.0
"""Labelled texts as tokens, and their rows, read a few entries at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from vllm.pilot.bench import Bench, LateBar
from vllm.pilot.probes.labelled import Labelled, LabelledData
from vllm.pilot.rows import CHUNK, CHUNK_BYTES, need_layers
from vllm.v1.probes.probe import Site

Over = Literal["prompt", "generated", "all"]
"""Rows that count: those of the prompt's tokens, of the completion's, or of both."""


@dataclass(frozen=True)
class Counted:
    """An entry in tokens, and those whose rows count."""

    entry: Labelled
    ids: list[int]
    start: int
    """The first position that counts."""
    stop: int
    """The position after the last."""

    @property
    def rows(self) -> int:
        """Number of rows that count."""
        return self.stop - self.start


def over_of(over: str | None, data: LabelledData) -> Over:
    """Return which rows count: those of completions where each entry has one, unless it is said.

    Raises:
        ValueError: another word.
    """
    if over is None:
        return "generated" if data.answered else "prompt"
    if over not in get_args(Over):
        raise ValueError(f"over: use one of {', '.join(get_args(Over))}, not {over!r}")
    return over  # type: ignore[return-value]


def counted(bench: Bench, data: LabelledData, over: Over) -> list[Counted]:
    """Encode entries, each as a server that is sent the prompt and writes the completion has it.

    Raises:
        ValueError: an entry has no tokens that count.
    """
    return [_counted(bench, entry, over) for entry in data.entries]


def _counted(bench: Bench, entry: Labelled, over: Over) -> Counted:
    prompt = _ids(bench, entry.prompt)
    after: list[int] = []
    if isinstance(entry.completion, str):
        after = bench.encode(entry.completion, special=False)
    elif entry.completion is not None:
        after = entry.completion
    if over == "generated" and not after:
        raise ValueError(
            f"{entry.where}: has no completion, whose rows would count; give one, or count others "
            "(--over prompt)"
        )
    start = len(prompt) if over == "generated" else 0
    stop = len(prompt) if over == "prompt" else len(prompt) + len(after)
    if start == stop:
        raise ValueError(f"{entry.where}: the text has no tokens")
    return Counted(entry, prompt + after, start, stop)


def _ids(bench: Bench, prompt: str | list[dict[str, str]] | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return bench.encode(prompt)
    if isinstance(prompt[0], dict):
        chat = tuple(tuple(message.items()) for message in prompt)
        return bench.encode(chat, answer=True)
    return list(prompt)


def need_sites(bench: Bench, sites: Sequence[Site]) -> tuple[Site, ...]:
    """Return sites with layers counted from the first.

    Raises:
        ValueError: the model has no such point or layer, or none are named.
    """
    found = [(point, need_layers(bench, layer, point)[0]) for point, layer in sites]
    if not found:
        raise ValueError("sites: none are named")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class EntryRows:
    """The rows of an entry that count."""

    counted: Counted
    values: torch.Tensor
    """float32 [n, sites, hidden]."""
    positive: torch.Tensor
    """bool [n]: whether a row is of a positive character; without spans as the entry is."""


def read_entries(
    bench: Bench, entries: Sequence[Counted], sites: Sequence[Site], title: str
) -> Iterator[EntryRows]:
    """Read rows in the order of the entries, up to `CHUNK_BYTES` of them at a time.

    Raises:
        ValueError: a row is not finite, or an entry's spans are of characters that no tokens write;
            the message names the entry.
    """
    hooks: dict[str, list[int]] = {}
    for point, layer in sites:
        hooks.setdefault(point, []).append(layer)
    with LateBar(total=len(entries), desc=title, unit="text") as bar:
        for some in _chunks(entries, len(sites) * bench.hidden * 4):
            asked = [
                {
                    "max_tokens": 1,
                    "temperature": 0.0,
                    "capture": {
                        "inline": {
                            "hooks": hooks,
                            "positions": {"start": one.start, "stop": one.stop},
                            "tokens": bool(one.entry.spans),
                        }
                    },
                }
                for one in some
            ]
            replies = bench.ask([one.ids for one in some], asked)
            for one, reply in zip(some, replies, strict=True):
                rows = torch.stack([reply.rows[site] for site in sites], dim=1)
                if not rows.isfinite().all():
                    raise ValueError(f"{one.entry.where}: a row of it is not finite")
                positive = torch.full((len(rows),), one.entry.label)
                if one.entry.spans:
                    positive = _in_spans(one.entry, reply.tokens)
                yield EntryRows(one, rows, positive)
            bar.update(len(some))


def _chunks(entries: Sequence[Counted], row_bytes: int) -> Iterator[list[Counted]]:
    """Entries whose rows are no more than `CHUNK_BYTES`, or one by itself."""
    some: list[Counted] = []
    size = 0
    for one in entries:
        if some and (len(some) == CHUNK or size + one.rows * row_bytes > CHUNK_BYTES):
            yield some
            some, size = [], 0
        some.append(one)
        size += one.rows * row_bytes
    if some:
        yield some


def _in_spans(entry: Labelled, tokens: Sequence[str]) -> torch.Tensor:
    """Tell which tokens have a character in a span, bool [tokens]."""
    text = str(entry.prompt if entry.completion is None else entry.completion)
    first = sum(map(len, tokens)) - len(text)
    if not "".join(tokens).endswith(text):
        raise ValueError(
            f"{entry.where}: has spans, and its tokens that count do not end with the text that "
            "these are of; leave the spans out, or count its rows (--over)"
        )
    marked = torch.zeros(len(tokens), dtype=torch.bool)
    at = -first
    for i, token in enumerate(tokens):
        marked[i] = any(at < stop and at + len(token) > start for start, stop in entry.spans)
        at += len(token)
    return marked
