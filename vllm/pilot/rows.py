# SPDX-License-Identifier: Apache-2.0
"""Rows of examples: read where asked, a chunk at a time, one row for each example and layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from vllm.pilot.bench import Bench, Coder, LateBar, bench_of
from vllm.pilot.pairs import Example, Pairs, Text
from vllm.pilot.row_checks import need_finite

if TYPE_CHECKING:
    from vllm import LLM

CHUNK = 256
"""Most examples of each class that are read at a time."""
CHUNK_BYTES = 32 << 20
"""Bytes that their rows may have: they are there some five times while they are read."""

Read = Any
"""Places at which rows are read: "last" (of the text), "answer-mean" (all tokens after those that
both examples of a pair share), "answer-last", or a selector as in a capture request; of several
rows the mean is taken."""
READ_WORDS = "last", "answer-mean", "answer-last", "last_prompt", "all_prompt", "predicting", "all"
"""The words among them; the last four are selectors."""


@dataclass(frozen=True)
class Encoded:
    """An example in tokens."""

    ids: list[int]
    start: int
    """Index of the first token of the text, which follows the prompt."""


def encode(bench: Coder, example: Example) -> Encoded:
    """The tokens of an example: those of the prompt, then those of the text.

    The two are cut apart, as a model that is given the prompt and writes the text cuts them.

    Raises:
        ValueError: there are no tokens.
    """
    if not example.prompt:
        # A chat that ends with a question is read where the answer would begin.
        ends = "" if isinstance(example.text, str) else dict(example.text[-1])["role"]
        made = Encoded(bench.encode(example.text, answer=ends == "user"), 0)
    elif isinstance(example.text, str):
        prompt = bench.encode(example.prompt, answer=True)
        made = Encoded(prompt + bench.encode(example.text, special=False), len(prompt))
    else:
        raise ValueError(f"{example.where}: a text after a prompt is a text, not messages")
    if len(made.ids) == made.start:
        raise ValueError(f"{example.where}: the text has no tokens; give one")
    return made


def read_rows(
    llm: "LLM | Bench | str",
    pairs: Pairs,
    layers: int | Sequence[int] | Literal["all"] = "all",
    read: Read = None,
    point: str = "post_block",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the rows of examples, as directions are made of.

    Args:
        llm: an engine, or a server's URL.
        layers: one, several, or all that have the point.
        read: see `Read`; default: what the data say, or "last".

    Returns:
        positive, negative: float32 [examples, layers, hidden].

    Raises:
        ValueError: the model has no such point or layer, `read` is none, or a request cannot be
            honoured.
    """
    need_read(read)
    bench = bench_of(llm)
    chosen = need_layers(bench, layers, point)
    chunks = list(row_chunks(bench, pairs, chosen, read, point, "reading"))
    positive, negative = zip(*chunks, strict=True)
    return torch.cat(positive), torch.cat(negative)


def rows_of(
    llm: "LLM | Bench | str",
    texts: str | Sequence[Text],
    layers: int | Sequence[int] | Literal["all"] = "all",
    read: Read = "last",
    point: str = "post_block",
) -> torch.Tensor:
    """Read the rows of texts without an opposite, as `read_rows` reads those of pairs.

    Args:
        llm: an engine, or a server's URL.
        texts: a list; one text is a list of one.
        layers: one, several, or all that have the point.
        read: see `Read`.

    Returns:
        float32 [texts, layers, hidden].

    Raises:
        ValueError: as `read_rows`; the message has a text's index.
    """
    need_read(read)
    bench = bench_of(llm)
    chosen = need_layers(bench, layers, point)
    listed: Sequence[Text] = [texts] if isinstance(texts, str) else texts
    examples = [Example(text, where=f"texts[{i}]") for i, text in enumerate(listed)]
    alone = Pairs(examples, [], paired=False)
    chunks = [rows for rows, _ in row_chunks(bench, alone, chosen, read, point, "reading")]
    return torch.cat([torch.empty(0, len(chosen), bench.hidden), *chunks])


def need_read(read: Read) -> None:
    """Raise ValueError where a word is none that says where rows are read."""
    if isinstance(read, str) and read not in READ_WORDS:
        raise ValueError(
            f"read: {read!r} is none of {', '.join(READ_WORDS)}, nor a position such as -2 or a "
            "selector"
        )


def need_layers(
    bench: Coder, layers: int | Sequence[int] | Literal["all"], point: str
) -> list[int]:
    """The layers by number, counted from the end where negative.

    Raises:
        ValueError: one is not there or lacks the point, or there are none.
    """
    has = sorted(layer for layer, points in bench.layers.items() if point in points)
    if not has:
        offered = sorted({p for points in bench.layers.values() for p in points})
        raise ValueError(f"point: the model has no {point!r}, it has {', '.join(offered)}")
    if layers == "all":
        return has
    count, layers = len(bench.layers), [layers] if isinstance(layers, int) else layers
    found = [layer + count if layer < 0 else layer for layer in layers]
    if wrong := [layer for layer in found if layer not in has]:
        raise ValueError(f"layers: {wrong[0]} has no {point}; layers with it are {has}")
    if not found:
        raise ValueError("layers: none are named")
    return list(dict.fromkeys(found))


def row_chunks(
    bench: Bench,
    pairs: Pairs,
    layers: Sequence[int],
    read: Read,
    point: str,
    title: str,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Read rows of up to `CHUNK` examples of each class at a time.

    Yields:
        positive, negative: float32 [examples, layers, hidden]; one may be shorter, or empty.
    """
    read = "last" if read is None and pairs.read is None else pairs.read if read is None else read
    longest = max(len(pairs.positive), len(pairs.negative))
    chunk = min(CHUNK, CHUNK_BYTES // (2 * len(layers) * bench.hidden * 4) or 1)
    bar = LateBar(total=longest, desc=title, unit="pair")
    with bar:
        for at in range(0, longest, chunk):
            sides = [
                [encode(bench, e) for e in examples[at : at + chunk]]
                for examples in (pairs.positive, pairs.negative)
            ]
            if pairs.paired:
                sides = [list(side) for side in zip(*map(_common, *sides), strict=True)]
            rows = read_encoded(bench, [*sides[0], *sides[1]], layers, read, point)
            examples = [*pairs.positive[at : at + chunk], *pairs.negative[at : at + chunk]]
            _need_finite_rows(rows, examples, layers, point)
            yield rows[: len(sides[0])], rows[len(sides[0]) :]
            bar.update(min(chunk, longest - at))


def _need_finite_rows(
    rows: torch.Tensor, examples: Sequence[Example], layers: Sequence[int], point: str
) -> None:
    finite = rows.isfinite().all(-1)
    if not finite.all():
        example, layer = (~finite).nonzero()[0].tolist()
        where = examples[example].where or repr(examples[example].text)
        raise ValueError(f"{where}: its row at {point} of layer {layers[layer]} is not finite")


def read_encoded(
    bench: Bench, examples: Sequence[Encoded], layers: Sequence[int], read: Read, point: str
) -> torch.Tensor:
    """Read rows of encoded examples, in one batch.

    Returns:
        float32 [examples, layers, hidden].
    """
    hooks = {point: list(layers)}
    asked = [
        {
            "max_tokens": 1,
            "temperature": 0.0,
            "capture": {"inline": {"hooks": hooks, "positions": _positions(read, example)}},
        }
        for example in examples
    ]
    replies = bench.ask([example.ids for example in examples], asked)
    made = torch.empty(len(examples), len(layers), bench.hidden)
    for i, reply in enumerate(replies):
        for j, layer in enumerate(layers):
            rows = reply.rows[point, layer]
            if not len(rows):
                raise ValueError(f"read: {read!r} is none of the {len(reply.prompt_ids)} tokens")
            # The mean of one row is that row, bit for bit.
            made[i, j] = rows.mean(0)
    return made


def _positions(read: Read, example: Encoded) -> Any:
    if read in ("last", "answer-last"):
        return "last_prompt"
    if read == "answer-mean":
        return {"start": example.start, "stop": len(example.ids)}
    return [read] if isinstance(read, int) else read


def _common(ours: Encoded, others: Encoded) -> tuple[Encoded, Encoded]:
    """A pair whose texts begin where the two differ; one token at least is left of each."""
    pairs = enumerate(zip(ours.ids, others.ids, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(ours.ids), len(others.ids)))
    made = [Encoded(e.ids, min(max(same, e.start), len(e.ids) - 1)) for e in (ours, others)]
    return made[0], made[1]


def reduce_rows(values: torch.Tensor, how: str = "none") -> torch.Tensor:
    """Return the rows of a site, or what is made of them.

    Args:
        values: [n, hidden], as `CapturedRows.values`.
        how: "none" for all of them; "mean" for the mean row, [hidden] in their dtype; "norm" for
            the length of each, float32 [n].

    Raises:
        ValueError: another word, or a row is not finite.
    """
    match how:
        case "none":
            return values
        case "mean":
            return need_finite(values, "values").double().mean(dim=0).to(values.dtype)
        case "norm":
            return need_finite(values, "values").double().norm(dim=-1).float()
    raise ValueError(f"reduce: must be 'none', 'mean' or 'norm', got {how!r}")
