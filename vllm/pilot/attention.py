# SPDX-License-Identifier: Apache-2.0
"""Attention that was captured, of an engine's output or a server's answer alike, and where texts
are in a prompt: what analyzers of attention stand on."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.entrypoints.serve.steering.client import Attention, Choice
from vllm.v1.capture import AttentionRows

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

    Captured = RequestOutput | CompletionOutput | Choice
    """An output with the result of a capture with `attention`: of `LLM.generate` or the client."""

Heads = Any
"""Heads as `heads` of a capture says: "all", layers, {layer: heads}, pairs [layer, head]."""
Keys = str | Sequence[int]
"""The name of a key range of the capture, or positions, such as `range(4, 9)`: then the capture
must give `weights`."""


def attention_of(
    output: "Captured", consumer: str = "inline"
) -> dict[int | None, AttentionRows | Attention]:
    """Return the attention that an output has, by layer; at None with `"sum": "all"`.

    Args:
        consumer: "inline", or of a list of captures "inline[0]" and so on.

    Raises:
        ValueError: there is none, or the capture failed.
    """
    found: Mapping[int | None, AttentionRows | Attention] = {}
    if isinstance(output, Choice):
        found = output.attention.get(consumer, {})
    elif (result := (output.capture_results or {}).get(consumer)) is not None:
        if result.status != "ok":
            raise ValueError(f"the capture {consumer!r} is not whole: {result.error}")
        found = {layer: rows for (point, layer), rows in result.payload.items() if point == "attn"}
    if not found:
        raise ValueError(f"the output has no attention of {consumer!r}: ask for it in a capture")
    return dict(found)


def query_weights(rows: AttentionRows | Attention, query: int = -1) -> np.ndarray:
    """Return the weights of one query, t: float32 [heads, t + 1]; summed, [t + 1].

    Args:
        query: its position, or negative: counted from the end of the captured queries.

    Raises:
        ValueError: it was not captured, one is not finite, or the capture gives no `weights`.
    """
    at = _index(rows, query)
    return _finite(np.asarray(_all_weights(rows)[at]), rows, at)


def mean_weights(
    rows: AttentionRows | Attention, queries: Sequence[int] | None = None
) -> np.ndarray:
    """Return the weights of each key, summed over the heads of `rows`, mean over queries.

    Args:
        queries: their positions; all that were captured if None.

    Returns:
        float64 [t + 1] of the last of the queries, t. Keys behind a query count 0.

    Raises:
        ValueError: the capture gives no `weights`, there is no query, or one was not captured.
    """
    weights = _all_weights(rows)
    places = range(len(weights)) if queries is None else [_index(rows, t) for t in queries]
    if not len(places):
        raise ValueError("queries: there are none")
    total = np.zeros(max(weights[i].shape[-1] for i in places))
    for i in places:
        one = _finite(np.asarray(weights[i], dtype=np.float64), rows, i)
        total[: one.shape[-1]] += one.reshape(-1, one.shape[-1]).sum(axis=0)
    return total / len(places)


def mass(rows: AttentionRows | Attention, keys: Keys, query: int = -1) -> np.ndarray:
    """Return the sum of a query's weights over some keys, float64 [heads].

    Raises:
        ValueError: as `query_weights`, or there is no such range.
    """
    return _over("mass", rows, keys, query)


def peak(rows: AttentionRows | Attention, keys: Keys, query: int = -1) -> np.ndarray:
    """Return the largest of a query's weights over some keys, float64 [heads].

    Raises:
        ValueError: as `query_weights`, or there is no such range.
    """
    return _over("peak", rows, keys, query)


def find_texts(
    tokenizer: Any, prompt: str, texts: Sequence[str]
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a prompt, and for each text the positions of all tokens that have a
    character of it.

    Args:
        tokenizer: a fast tokenizer of Hugging Face, which knows where its tokens are.
        texts: in their order in the prompt; each is searched for behind the one before.

    Raises:
        ValueError: a text is not there.
    """
    encoded = tokenizer(prompt, return_offsets_mapping=True)
    places, found, behind = encoded["offset_mapping"], [], 0
    for text in texts:
        start = prompt.find(text, behind) if text else -1
        if start < 0:
            raise ValueError(f"{text!r} is not in the prompt behind the texts before it")
        behind = start + len(text)
        found.append([i for i, (a, b) in enumerate(places) if a < behind and b > start])
    return list(encoded["input_ids"]), found


def need_positions(keys: Sequence[int], num_keys: int, name: str) -> np.ndarray:
    """Return positions as an array, int64 [n].

    Raises:
        ValueError: there are none, or one is not among the first `num_keys`.
    """
    positions = np.array(list(keys), dtype=np.int64)
    if not positions.size or positions.min() < 0 or positions.max() >= num_keys:
        given = positions[:8].tolist()
        raise ValueError(f"{name}: must be positions from 0 to {num_keys - 1}, got {given}")
    return positions


def _over(name: str, rows: AttentionRows | Attention, keys: Keys, query: int) -> np.ndarray:
    if not isinstance(keys, str):
        weights = query_weights(rows, query).astype(np.float64)
        if weights.ndim == 1:
            raise ValueError("the weights are summed over heads: ask for them without 'sum'")
        chosen = weights[:, need_positions(keys, weights.shape[-1], "keys")]
        return np.asarray(chosen.sum(axis=-1) if name == "mass" else chosen.max(axis=-1))
    if keys not in rows.ranges:
        raise ValueError(f"keys: there is no range {keys!r}; the capture has {list(rows.ranges)}")
    if isinstance(rows, Attention):
        if name not in rows.given:
            raise ValueError(f"{name!r} was not asked for: name it in 'give'")
        values = rows.given[name]
    else:
        values = (rows.mass if name == "mass" else rows.peak).numpy()
    at = _index(rows, query)
    return _finite(values[at, :, rows.ranges.index(keys)].astype(np.float64), rows, at)


def _finite(values: np.ndarray, rows: AttentionRows | Attention, at: int) -> np.ndarray:
    if not np.isfinite(values).all():
        raise ValueError(f"query {rows.positions[at]}: its attention is not finite")
    return values


def _all_weights(rows: AttentionRows | Attention) -> Sequence[Any]:
    if isinstance(rows, Attention) and len(rows.weights) != len(rows.positions):
        raise ValueError("'weights' was not asked for: name it in 'give'")
    return rows.weights


def _index(rows: AttentionRows | Attention, query: int) -> int:
    places = np.arange(len(rows.positions))
    found = places[rows.positions == query] if query >= 0 else places[query:][:1]
    if not len(found) or -query > len(places):
        raise ValueError(f"query {query} was not captured, these were: {rows.positions.tolist()}")
    return int(found[0])
