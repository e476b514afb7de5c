# SPDX-License-Identifier: Apache-2.0
"""Answers of a server: completions, and the captures that were made for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from .arrays import unpack

Site = tuple[str, int]
"""A point and a layer, such as ("post_block", 12)."""


@dataclass
class Rows:
    """The rows of one point of one layer, in position order."""

    positions: np.ndarray
    """The positions of the rows, int64 [n]. A row has read its token and predicts the next."""
    token_ids: np.ndarray
    """The token that each row has read, int64 [n]."""
    values: np.ndarray
    """The rows, [n, hidden], float16 or float32; at q, k, v and z [n, heads, width]; with `project`
    their scores, [n, k]."""
    versions: np.ndarray
    """The version of the global steering that each row ran under, int64 [n]."""
    heads: tuple[int, ...] = ()
    """The numbers of the heads, at q, k, v and z."""
    tokens: tuple[str, ...] = ()
    """The text of each row's token, where the capture says `"tokens": true`."""
    form: Mapping[str, Any] | None = None
    """At q, how its products with keys become weights, as `CapturedRows.form`."""

    def at(self, position: int) -> np.ndarray:
        """Return the row of one absolute position, [hidden].

        Raises:
            KeyError: that position was not captured.
        """
        found = np.flatnonzero(self.positions == position)
        if not len(found):
            raise KeyError(f"position {position} was not captured, these were: {self.positions}")
        row: np.ndarray = self.values[int(found[0])]
        return row


@dataclass
class Made:
    """Results that the server computed from rows, in position order."""

    positions: np.ndarray
    """The positions of the rows, int64 [n]."""
    token_ids: np.ndarray
    """The token of each, int64 [n]."""
    versions: np.ndarray
    """The version of the global steering that each ran under, int64 [n]."""
    given: dict[str, np.ndarray]
    """Name of each result that was asked for -> its values."""


@dataclass
class Lens(Made):
    """The rows of one point of one layer under a lens. `given` has what was asked for of "top_ids"
    and "top_logprobs" [n, top_k], "token_logprobs" and "token_ranks" [n, tokens], and "entropy"
    [n]."""

    lens: str
    """The name of the lens."""
    asked: tuple[int, ...]
    """The ids of the tokens that were asked for."""
    tokens: tuple[str, ...] = ()
    """The text of each row's token, where the capture says `"tokens": true`."""


@dataclass
class Features(Made):
    """Activations of a sparse autoencoder's features at one site. `given` has what was asked for of
    "top_ids" (-1 where no more are active) and "top_values" [n, top], "values" [n, ids], "active"
    [n], the number of active features, and "error" [n], the norm of what the decoder leaves."""

    features: str
    """The name of the autoencoder."""
    asked: tuple[int, ...]
    """The features that were asked for by `ids`."""
    tokens: tuple[str, ...] = ()
    """The text of each row's token, where the capture says `"tokens": true`."""


@dataclass
class Attention(Made):
    """Results that were asked for of the attention weights of one layer, query by query. `given`
    has those that were asked for among "mass" and "peak" [n, heads, ranges], and "top_positions"
    and "top_weights" [n, heads, top]."""

    heads: tuple[int, ...]
    """The numbers of the heads."""
    ranges: tuple[str, ...]
    """The names of the key ranges."""
    weights: list[np.ndarray] = field(default_factory=list)
    """The weights of all keys up to each query's own, t: n arrays [heads, t + 1], summed
    [t + 1]."""


@dataclass
class Choice:
    """One completion; of a stream, what came in one chunk."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    captures: dict[str, dict[Site, Rows]] = field(default_factory=dict)
    """The rows of each capture for the consumer `inline`, by site: of `inline`, or where a list was
    asked for of `inline[0]` and so on."""
    attention: dict[str, dict[int | None, Attention]] = field(default_factory=dict)
    """The attention of each such capture, by layer; by None with `"sum": "all"`."""
    lenses: dict[str, dict[Site, Lens]] = field(default_factory=dict)
    """The rows under a lens of each capture for the consumer `inline`, by site."""
    features: dict[str, dict[Site, Features]] = field(default_factory=dict)
    """The features of each capture for the consumer `inline`, by site."""
    stop_reason: int | str | None = None
    """The stop string, token or rule (`"rule:NAME"`) that ended it."""
    rules: dict[str, Any] = field(default_factory=dict)
    """The outcome of each rule, by name, once the choice has ended: {"fired_at", ...}; None for a
    rule of the operator that fired."""
    capture_results: dict[str, Any] = field(default_factory=dict)
    """The result of each consumer as the server sent it, {"status", "error", "payload"}, by name.
    The status is None before the last chunk of a stream."""

    @property
    def rows(self) -> dict[Site, Rows]:
        """The rows that the consumer `inline` returned, by site; empty where it was asked for a
        list of captures."""
        return self.captures.get("inline", {})

    @property
    def capture_status(self) -> dict[str, str | None]:
        """The status of each consumer's result, by consumer."""
        return {name: result["status"] for name, result in self.capture_results.items()}


@dataclass
class Answer:
    """The answer to a request, with its completions."""

    choices: list[Choice]
    raw: dict[str, Any]
    """The whole body of the answer."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def rows(self) -> dict[Site, Rows]:
        """The rows of the first choice, by site."""
        return self.choices[0].rows


def read_rows(payload: Sequence[Mapping[str, Any]] | None) -> dict[Site, Rows]:
    """Read the payload of the consumer `inline`."""
    made = {}
    for entry in payload or ():
        if entry["point"] == "attn" or "lens" in entry or "features" in entry:
            continue
        positions = np.array(entry["positions"], dtype=np.int64)
        made[entry["point"], entry["layer"]] = Rows(
            positions=positions,
            token_ids=np.array(entry["token_ids"], dtype=np.int64),
            values=unpack(entry),
            versions=np.array(entry.get("versions", [0] * len(positions)), dtype=np.int64),
            heads=tuple(entry.get("heads", ())),
            tokens=tuple(entry.get("tokens", ())),
            form=entry.get("form"),
        )
    return made


def read_attention(payload: Sequence[Mapping[str, Any]] | None) -> dict[int | None, Attention]:
    """Read what of the payload of the consumer `inline` is attention."""
    made = {}
    for entry in payload or ():
        if entry["point"] != "attn":
            continue
        positions = np.array(entry["positions"], dtype=np.int64)
        names = ("mass", "peak", "top_positions", "top_weights")
        weights = unpack(entry["weights"]) if "weights" in entry else np.empty(0)
        made[entry["layer"]] = Attention(
            positions=positions,
            token_ids=np.array(entry["token_ids"], dtype=np.int64),
            versions=np.array(entry.get("versions", [0] * len(positions)), dtype=np.int64),
            heads=tuple(entry.get("heads", ())),
            ranges=tuple(entry.get("ranges", ())),
            given={name: unpack(entry[name]) for name in names if name in entry},
            weights=[row[..., : t + 1] for row, t in zip(weights, positions, strict=False)],
        )
    return made


def read_lenses(payload: Sequence[Mapping[str, Any]] | None) -> dict[Site, Lens]:
    """Read what of the payload of the consumer `inline` was read under lenses."""
    names = ("top_ids", "top_logprobs", "token_logprobs", "token_ranks", "entropy")
    return {
        site: Lens(**made, lens=entry["lens"], asked=tuple(entry["asked"]))
        for site, entry, made in _made(payload, "lens", names)
    }


def read_features(payload: Sequence[Mapping[str, Any]] | None) -> dict[Site, Features]:
    """Read what of the payload of the consumer `inline` are activations of features."""
    names = ("top_ids", "top_values", "values", "active", "error")
    return {
        site: Features(**made, features=entry["features"], asked=tuple(entry["asked"]))
        for site, entry, made in _made(payload, "features", names)
    }


def _made(
    payload: Sequence[Mapping[str, Any]] | None, key: str, names: Sequence[str]
) -> Iterator[tuple[Site, Mapping[str, Any], dict[str, Any]]]:
    """Yield the entries of a payload that have a key: (site, entry, fields of its record)."""
    for entry in payload or ():
        if key not in entry:
            continue
        positions = np.array(entry["positions"], dtype=np.int64)
        site = entry["point"], entry["layer"]
        yield (
            site,
            entry,
            {
                "positions": positions,
                "token_ids": np.array(entry["token_ids"], dtype=np.int64),
                "versions": np.array(entry.get("versions", [0] * len(positions)), dtype=np.int64),
                "given": {name: unpack(entry[name]) for name in names if name in entry},
                "tokens": tuple(entry.get("tokens", ())),
            },
        )


def joined(chunks: Sequence[Choice]) -> Choice:
    """Join the chunks of one choice of a stream.

    Raises:
        ValueError: there are none.
    """
    if not chunks:
        raise ValueError("no chunks")
    made = Choice(chunks[0].index, "".join(chunk.text for chunk in chunks))
    parts: dict[tuple[str, Site], list[Rows]] = {}
    for chunk in chunks:
        made.finish_reason = chunk.finish_reason or made.finish_reason
        made.stop_reason = chunk.stop_reason if made.stop_reason is None else made.stop_reason
        made.rules |= chunk.rules
        made.capture_results |= chunk.capture_results
        for name, layers in chunk.attention.items():
            for layer, attention in layers.items():
                mine = made.attention.setdefault(name, {})
                mine[layer] = _with(mine[layer], attention) if layer in mine else attention
        for name, under in chunk.lenses.items():
            for site, lens in under.items():
                read = made.lenses.setdefault(name, {})
                read[site] = _with(read[site], lens) if site in read else lens
        for name, under_features in chunk.features.items():
            for site, features in under_features.items():
                found = made.features.setdefault(name, {})
                found[site] = _with(found[site], features) if site in found else features
        for name, sites in chunk.captures.items():
            for site, rows in sites.items():
                parts.setdefault((name, site), []).append(rows)
    for (name, site), several in parts.items():
        arrays = {
            what: np.concatenate([getattr(rows, what) for rows in several])
            for what in ("positions", "token_ids", "values", "versions")
        }
        tokens = tuple(text for rows in several for text in rows.tokens)
        made.captures.setdefault(name, {})[site] = Rows(
            **arrays, heads=several[0].heads, tokens=tokens
        )
    return made


_M = TypeVar("_M", Lens, Features, Attention)


def _with(made: _M, later: _M) -> _M:
    """Join what two chunks have of a layer."""
    arrays = {
        what: np.concatenate([getattr(made, what), getattr(later, what)])
        for what in ("positions", "token_ids", "versions")
    }
    given = {name: np.concatenate([a, later.given[name]]) for name, a in made.given.items()}
    # Lists and tuples: a row's weights, or its text.
    own = "weights" if isinstance(made, Attention) else "tokens"
    rest: dict[str, Any] = {own: getattr(made, own) + getattr(later, own)}
    return replace(made, **arrays, given=given, **rest)


def read_choice(raw: Mapping[str, Any]) -> Choice:
    """Read a choice of an answer, or of a chunk of a stream."""
    message = raw.get("message") or raw.get("delta") or {}
    results = raw.get("capture_results") or {}
    inline = {name: r for name, r in results.items() if name.partition("[")[0] == "inline"}
    return Choice(
        index=raw["index"],
        text=raw.get("text") or message.get("content") or "",
        finish_reason=raw.get("finish_reason"),
        captures={name: read_rows(result["payload"]) for name, result in inline.items()},
        attention={name: read_attention(result["payload"]) for name, result in inline.items()},
        lenses={name: read_lenses(result["payload"]) for name, result in inline.items()},
        features={name: read_features(result["payload"]) for name, result in inline.items()},
        stop_reason=raw.get("stop_reason"),
        rules=raw.get("rules") or {},
        capture_results=results,
    )
