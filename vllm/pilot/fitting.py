# SPDX-License-Identifier: Apache-2.0
"""Directions of all layers from pairs on a bench, within a bound of memory; how they separate."""

from dataclasses import dataclass

import torch

from vllm.pilot.bench import Bench
from vllm.pilot.directions import (
    PAIRED,
    Method,
    PairSums,
    auroc,
    centring_removes,
    d_prime,
    direction,
)
from vllm.pilot.pairs import Example, Pairs, Text
from vllm.pilot.row_checks import need_finite
from vllm.pilot.rows import Read, row_chunks

_COPIES = 5
"""Number of times that the rows of a layer are in memory while its direction is computed, in
float32."""


@dataclass(frozen=True)
class Directions:
    """A direction for each layer."""

    layers: list[int]
    vectors: torch.Tensor
    """float32 [layers, hidden]: scale 1 goes from between the classes to the mean positive row."""
    middle: torch.Tensor
    """float32 [layers, hidden]: halfway between the means."""
    warnings: list[str]

    def __repr__(self) -> str:
        """Say of which layers, and how long they are."""
        lengths = ", ".join(
            f"{layer}: {float(vector.norm()):.3g}"
            for layer, vector in zip(self.layers, self.vectors, strict=True)
        )
        return f"Directions(lengths by layer: {lengths})"

    def at(self, layer: int) -> torch.Tensor:
        """The direction of a layer by its number, [hidden]."""
        return self.vectors[self.layers.index(layer)]

    def projection(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """Project rows [n, hidden]: +1 is at the mean positive row, -1 at the negative one."""
        vector = self.at(layer).double()
        middle = self.middle[self.layers.index(layer)]
        away = need_finite(rows, "rows").double() - middle
        return (away @ vector / vector.dot(vector)).float()


@dataclass(frozen=True)
class Separation:
    """Separation of examples that made no direction, for each layer."""

    auroc: list[float]
    d_prime: list[float]
    share: list[float]
    """The share of pairs whose positive row is further along; without pairs, the AUROC."""
    stream: list[float]
    """The mean length of the rows."""


def find_directions(
    bench: Bench,
    pairs: Pairs,
    layers: list[int],
    method: Method,
    read: Read,
    point: str,
    background: list[Text] | None = None,
    seed: int = 0,
    memory: int = 4 << 30,
) -> Directions:
    """Find the direction of each layer.

    `mean` and `mean-centred` keep sums alone. `pca` and `pca-centred` keep hidden^2 sums a layer,
    or their rows where there are no more pairs than `hidden`; the others keep rows. Of these there
    are as many layers at a time as `memory` holds, with a pass over the data for each lot.
    Rows that are being read come on top, up to 160 MiB where they are wide.

    Raises:
        ValueError: the method needs pairs or a background, what it keeps of one layer is more than
            `memory`, or there is no difference.
    """
    if method in PAIRED and not pairs.paired:
        raise ValueError(f"method {method!r} needs pairs; with text and label: mean, logistic, lat")
    if method == "mean-centred" and not background:
        raise ValueError("method 'mean-centred' needs background texts (--background FILE)")
    if method in ("mean", "mean-centred"):
        p, n = _means(bench, pairs, layers, read, point)
        b = None
        if background:
            texts = Pairs([Example(text) for text in background], [], paired=False)
            b, _ = _means(bench, texts, layers, "last" if pairs.read is None else read, point)
        found = direction(method, p[None], n[None], None if b is None else b[None])
        return Directions(layers, found, ((p + n) / 2).float(), [])
    # What each layer needs: sums of squares, or where these are larger all of the rows.
    sums = method in PAIRED and len(pairs.positive) > bench.hidden
    count = len(pairs.positive) + len(pairs.negative)
    size = 8 * bench.hidden**2 if sums else count * bench.hidden * 4
    lot = memory // size - _COPIES
    if lot < 1:
        raise ValueError(
            f"--memory: {count} rows of one layer need {size * (_COPIES + 1) >> 20} MiB, allowed "
            f"are {memory >> 20}; method 'mean' keeps none"
        )
    vectors: list[torch.Tensor] = []
    middles: list[torch.Tensor] = []
    removed: list[int] = []
    for at in range(0, len(layers), lot):
        some = layers[at : at + lot]
        if sums:
            added = PairSums(len(some), bench.hidden)
            for chunk in row_chunks(bench, pairs, some, read, point, "reading"):
                added.add(*chunk)
            vectors += added.pca(method == "pca-centred")
            middles.append(added.means.mean(0).float())
            lost = added.centring_removes.tolist()
        else:
            p, n = _all_rows(bench, pairs, some, read, point)
            each = [(p[:, i], n[:, i]) for i in range(len(some))]
            vectors += [direction(method, *rows, None, pairs.paired, seed) for rows in each]
            middles.append((p.double().mean(0) + n.double().mean(0)).float() / 2)
            lost = [method in PAIRED and bool(centring_removes(*rows)) for rows in each]
        removed += [layer for layer, takes in zip(some, lost, strict=True) if takes]
    warnings = []
    if removed and method == "pca-centred":
        warnings.append(
            "pca-centred: the pairs differ mostly by their mean, which centring takes out, at "
            f"layers {removed}: what is found there is not the concept; take pca or mean"
        )
    return Directions(layers, torch.stack(vectors), torch.cat(middles), warnings)


def separate(
    bench: Bench, pairs: Pairs, found: Directions, read: Read, point: str
) -> tuple[Separation, tuple[torch.Tensor, torch.Tensor]]:
    """Tell how far examples are apart along the directions.

    Returns:
        That, and the scores of each class, float64 [examples, layers]: rows by unit directions.
    """
    scores = scores_of(bench, pairs, found.layers, found.vectors, read, point)
    return separation_of(*scores, pairs.paired), scores[:2]


def separation_of(
    positive: torch.Tensor, negative: torch.Tensor, lengths: list[float], paired: bool
) -> Separation:
    """Tell how far scores of the two classes, [examples, layers], are apart."""
    areas = auroc(positive, negative).tolist()
    few = min(len(positive), len(negative)) < 2
    away = [0.0] * len(areas) if few else d_prime(positive, negative).tolist()
    share = (positive > negative).double().mean(0).tolist() if paired else areas
    return Separation(areas, away, share, lengths)


def scores_of(
    bench: Bench, pairs: Pairs, layers: list[int], vectors: torch.Tensor, read: Read, point: str
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Project the rows of examples on unit directions, one for each of `layers`.

    Args:
        vectors: [layers, hidden]; or [layers, several, hidden] for several directions of each.

    Returns:
        positive, negative: float64 [examples, layers], or with several [examples, layers, several];
        and the mean length of the rows of each layer.
    """
    wide = vectors.double()
    unit = wide / wide.norm(dim=-1, keepdim=True)
    sides: list[list[torch.Tensor]] = [[], []]
    lengths = torch.zeros(len(layers), dtype=torch.float64)
    for chunk in row_chunks(bench, pairs, layers, read, point, "separating"):
        for side, rows in zip(sides, chunk, strict=True):
            wide = rows.double()
            side.append(torch.einsum("nlh,l...h->nl...", wide, unit))
            lengths += wide.norm(dim=-1).sum(0)
    mean = lengths / (len(pairs.positive) + len(pairs.negative))
    return torch.cat(sides[0]), torch.cat(sides[1]), mean.tolist()


def _means(
    bench: Bench, pairs: Pairs, layers: list[int], read: Read, point: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean row of each class, float64 [layers, hidden]; NaN of a class without examples."""
    total = [torch.zeros(len(layers), bench.hidden, dtype=torch.float64) for _ in range(2)]
    for chunk in row_chunks(bench, pairs, layers, read, point, "reading"):
        for kept, rows in zip(total, chunk, strict=True):
            kept += rows.sum(0, dtype=torch.float64)
    return total[0] / len(pairs.positive), total[1] / len(pairs.negative)


def _all_rows(
    bench: Bench, pairs: Pairs, layers: list[int], read: Read, point: str
) -> tuple[torch.Tensor, torch.Tensor]:
    # One copy of each class, not the chunks and their sum.
    made = [
        torch.empty(len(examples), len(layers), bench.hidden)
        for examples in (pairs.positive, pairs.negative)
    ]
    at = [0, 0]
    for chunk in row_chunks(bench, pairs, layers, read, point, "reading"):
        for i, rows in enumerate(chunk):
            made[i][at[i] : at[i] + len(rows)] = rows
            at[i] += len(rows)
    return made[0], made[1]
