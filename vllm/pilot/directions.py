# SPDX-License-Identifier: Apache-2.0
"""Directions from examples: one formula for each method, and how well a direction separates.

Rows are [n, hidden], or [n, layers, hidden] for all layers at once; tensors or arrays of any float
dtype. Everything is computed in float64 and returned as float32. With paired examples, row i of
`positive` belongs to row i of `negative`; d = positive - negative.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch

from vllm.pilot.linear_probe import fit
from vllm.pilot.row_checks import Rows, as_float32, need_differ, need_finite, need_rows, need_width

Method = Literal["mean", "pca", "pca-centred", "logistic", "lat", "mean-centred"]

PAIRED: tuple[Method, ...] = ("pca", "pca-centred")
"""The methods that need to know which examples belong together."""

_SHORTEST = 1e-6
"""Least length of a direction, as a share of the distance of the class means."""
_ROUNDING = 1e-12
"""The share of differences that may be rounding."""

_Find = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mean_difference(positive: Rows, negative: Rows) -> torch.Tensor:
    """Half the difference of the class means: scale 1 goes from between the classes to `positive`.

    Args:
        positive, negative: [n, hidden] or [n, layers, hidden]; not necessarily as many of each.

    Returns:
        [hidden] or [layers, hidden].

    Raises:
        ValueError: a class is empty, the widths differ, or the means do not.
    """
    p, n = need_rows(positive, "positive"), need_rows(negative, "negative")
    need_width(p, n)
    return as_float32(_differs(p.mean(0) - n.mean(0)) / 2, "mean")


def pca(positive: Rows, negative: Rows, centred: bool = False) -> torch.Tensor:
    """Top principal component of the pairs' differences.

    It is stretched to half the distance of the class means along it, and points to `positive`.

    Args:
        positive, negative: pairs, [n, hidden] or [n, layers, hidden], whose means differ.
        centred: whether the mean difference is subtracted first, which takes the concept itself out
            where all pairs differ by it alone: see `centring_removes`.

    Returns:
        [hidden] or [layers, hidden].

    Raises:
        ValueError: the classes are not as long, a class is empty, there is no difference, or
            centring leaves none.
    """
    difference = _differences(positive, negative)
    if centred and len(difference) < 2:
        raise ValueError("pca: centred needs two pairs or more")
    mean = _differs(difference.mean(0))
    around = difference - mean if centred else difference
    if centred:
        _need_spread(around.square().sum((0, -1)), difference.square().sum((0, -1)))
    return as_float32(_per_layer(around, lambda d, m: _stretched(_top(d), m), mean), "pca")


def lat(positive: Rows, negative: Rows, seed: int = 0) -> torch.Tensor:
    """Top component of the normalised differences of random pairs of all rows (RepE's LAT).

    It is stretched to half the distance of the class means along it, and points to `positive`.

    Args:
        positive, negative: [n, hidden] or [n, layers, hidden]; need not be paired.
        seed: which random pairs.

    Returns:
        [hidden] or [layers, hidden].

    Raises:
        ValueError: a class is empty, or there is no difference, or none in the random pairs.
    """
    p, n = need_rows(positive, "positive"), need_rows(negative, "negative")
    need_width(p, n)
    both = torch.cat([p, n])
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    half = len(both) // 2
    difference = both[order[:half]] - both[order[half : 2 * half]]
    length = difference.norm(dim=-1, keepdim=True)
    mean = _differs(p.mean(0) - n.mean(0))
    need_differ(
        (length == 0).all(0).squeeze(-1),
        f"lat: take another seed than {seed} or more rows, no random pair differs",
    )
    difference = difference / length.where(length > 0, 1.0)
    return as_float32(_per_layer(difference, lambda d, m: _stretched(_top(d), m), mean), "lat")


def mean_centred(positive: Rows, negative: Rows, background: Rows) -> torch.Tensor:
    """The mean of `positive` less the mean of `background`, stretched as the other methods' are.

    Args:
        positive, negative: [n, hidden] or [n, layers, hidden]; `negative` says how far to stretch.
        background: rows of texts that have nothing to do with the concept, shaped alike.

    Returns:
        [hidden] or [layers, hidden].

    Raises:
        ValueError: a class is empty, the widths differ, or there is no difference.
    """
    p, n, b = (
        need_rows(rows, name)
        for rows, name in (
            (positive, "positive"), (negative, "negative"), (background, "background"),
        )
    )  # fmt: skip
    need_width(p, n)
    need_width(p, b)
    mean = _differs(p.mean(0) - n.mean(0))
    direction = _differs(p.mean(0) - b.mean(0))
    return as_float32(
        _per_layer(direction[None], lambda d, m: _stretched(d[0], m), mean), "mean-centred"
    )


def logistic(
    positive: Rows, negative: Rows, paired: bool = True, penalty: float = 1.0
) -> torch.Tensor:
    """The weights of an L2-penalised logistic regression, stretched as the other methods' are.

    Of pairs it is fitted on what is left when each pair's mean is taken out, without intercept;
    without pairs on the rows, with intercept.

    Args:
        positive, negative: [n, hidden] or [n, layers, hidden].
        paired: whether positive[i] belongs to negative[i].
        penalty: as of `fit_probe`.

    Returns:
        [hidden] or [layers, hidden].

    Raises:
        ValueError: a class is empty, the widths differ, or there is no difference.
    """
    p, n = need_rows(positive, "positive"), need_rows(negative, "negative")
    need_width(p, n)
    if paired:
        _differences(p, n)
    mean = _differs(p.mean(0) - n.mean(0))
    layers = p[:, None] if p.ndim == 2 else p
    others = n[:, None] if n.ndim == 2 else n
    found = []
    for layer, m in enumerate(mean.view(-1, mean.shape[-1])):
        at, of = layers[:, layer], others[:, layer]
        if paired:
            middle = (at + of) / 2
            at, of = at - middle, of - middle
        weight, _ = fit(at, of, penalty, intercept=not paired)
        found.append(_stretched(weight, m))
    return as_float32(torch.stack(found).view(mean.shape), "logistic")


def direction(
    method: Method,
    positive: Rows,
    negative: Rows,
    background: Rows | None = None,
    paired: bool = True,
    seed: int = 0,
) -> torch.Tensor:
    """The direction of a method by its name, shaped and scaled as its function says.

    Raises:
        ValueError: as the method's function; the method is unknown, or needs a background.
    """
    if method == "mean-centred":
        if background is None:
            raise ValueError("method 'mean-centred' needs background texts (--background FILE)")
        return mean_centred(positive, negative, background)
    if method == "lat":
        return lat(positive, negative, seed)
    if method in PAIRED:
        return pca(positive, negative, centred=method == "pca-centred")
    if method == "logistic":
        return logistic(positive, negative, paired)
    if method == "mean":
        return mean_difference(positive, negative)
    raise ValueError(f"unknown method {method!r}; methods are {', '.join(get_args(Method))}")


def centring_removes(positive: Rows, negative: Rows) -> torch.Tensor:
    """Tell where the mean difference is more than half of what the differences are.

    Returns:
        bool [] or [layers]: |mean d|^2 > mean |d|^2 / 2. Where it is true, a centred `pca` finds
        what is left.
    """
    d = _differences(positive, negative)
    _differs(d.abs().amax(0))
    return d.mean(0).square().sum(-1) > d.square().sum(-1).mean(0) / 2


class PairSums:
    """Sums over pairs, from which `pca` is computed with no row kept: for any number of pairs.

    They are float64, and take 8 hidden^2 bytes a layer.

    Args:
        layers, hidden: of the rows.
    """

    def __init__(self, layers: int, hidden: int) -> None:
        self.count = 0
        self._sums = torch.zeros(2, layers, hidden, dtype=torch.float64)
        self._origin: torch.Tensor | None = None
        """A mean difference, [layers, hidden]: around it squares keep small differences."""
        self._outer = torch.zeros(layers, hidden, hidden, dtype=torch.float64)

    def add(self, positive: torch.Tensor, negative: torch.Tensor) -> None:
        """Add pairs, [n, layers, hidden] each.

        Raises:
            ValueError: a row is not finite; the message has its number.
        """
        for rows, name in ((positive, "positive"), (negative, "negative")):
            need_finite(rows, name, self.count)
        self.count += len(positive)
        sums = torch.stack([rows.sum(0, dtype=torch.float64) for rows in (positive, negative)])
        self._sums += sums
        if self._origin is None:
            self._origin = (sums[0] - sums[1]) / len(positive)
        for layer, (outer, origin) in enumerate(zip(self._outer, self._origin, strict=True)):
            d = positive[:, layer].double() - negative[:, layer].double() - origin
            outer.addmm_(d.T, d)

    @property
    def means(self) -> torch.Tensor:
        """The mean row of each class, float64 [2, layers, hidden]."""
        return self._sums / self.count

    @property
    def centring_removes(self) -> torch.Tensor:
        """Result of the function `centring_removes` for the pairs' rows, bool [layers]."""
        around, of_mean = self._squares
        return of_mean > (around + of_mean) / 2

    @property
    def _moved(self) -> torch.Tensor:
        """From the origin to the mean difference, float64 [layers, hidden]."""
        return self.means[0] - self.means[1] - (0.0 if self._origin is None else self._origin)

    @property
    def _squares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of squares of the differences around their mean, and of this; [layers] each."""
        traces = self._outer.diagonal(dim1=1, dim2=2).sum(-1)
        around = traces - self.count * self._moved.square().sum(-1)
        return around, self.count * (self.means[0] - self.means[1]).square().sum(-1)

    def pca(self, centred: bool = False) -> torch.Tensor:
        """Compute what the function `pca` returns for the pairs' rows, float32 [layers, hidden].

        Raises:
            ValueError: there is no difference at a layer, or centring leaves none.
        """
        mean = _differs(self.means[0] - self.means[1])
        around, of_mean = self._squares
        if centred:
            _need_spread(around, around + of_mean)
        found = []
        for outer, m, moved in zip(self._outer, mean, self._moved, strict=True):
            squares = torch.addr(outer, moved, moved, alpha=-self.count)
            if not centred:
                squares.addr_(m, m, alpha=self.count)
            found.append(_stretched(torch.linalg.eigh(squares).eigenvectors[:, -1], m))
        return as_float32(torch.stack(found), "pca")


def auroc(positive: Rows, negative: Rows) -> torch.Tensor:
    """The chance that a positive score is above a negative one; ties count a half.

    Args:
        positive, negative: scores, [n] or [n, layers].

    Returns:
        float64 [] or [layers].
    """
    p, n = need_rows(positive, "positive", 1), need_rows(negative, "negative", 1)
    ordered = n.sort(0).values.movedim(0, -1).contiguous()
    asked = p.movedim(0, -1).contiguous()
    below = torch.searchsorted(ordered, asked, right=False)
    upto = torch.searchsorted(ordered, asked, right=True)
    return (below + upto).double().mean(-1) / (2 * len(n))


def d_prime(positive: Rows, negative: Rows) -> torch.Tensor:
    """The distance of two classes of scores in standard deviations.

    Args:
        positive, negative: scores, [n] or [n, layers], two or more of each.

    Returns:
        float64 [] or [layers]; 0 where nothing differs, infinite where each class is one score.

    Raises:
        ValueError: a class has less than two.
    """
    p, n = need_rows(positive, "positive", 1), need_rows(negative, "negative", 1)
    if min(len(p), len(n)) < 2:
        raise ValueError(f"d_prime: {len(p)} and {len(n)} scores, two of each are needed")
    # From a score of each, so that equal ones have no spread by rounding.
    ours, others = p - p[0], n - n[0]
    spread = ((ours.var(0) + others.var(0)) / 2).sqrt()
    away = p[0] - n[0] + ours.mean(0) - others.mean(0)
    return torch.where(away == 0, 0.0, away / spread)


def _differences(positive: Rows, negative: Rows) -> torch.Tensor:
    p, n = need_rows(positive, "positive"), need_rows(negative, "negative")
    if p.shape != n.shape:
        raise ValueError(
            f"pairs are needed: positive is {list(p.shape)} and negative {list(n.shape)}; "
            "mean_difference and logistic do without"
        )
    return p - n


def _differs(found: torch.Tensor) -> torch.Tensor:
    """[..., hidden] as it is; refused where it is zero, as no direction can be found in it."""
    need_differ((found == 0).all(-1))
    return found


def _need_spread(left: torch.Tensor, whole: torch.Tensor) -> None:
    """Raise ValueError where of squares of differences, [] or [layers], rounding alone is left."""
    need_differ(
        left <= _ROUNDING**2 * whole,
        "pca-centred: take pca or mean, all pairs differ by the same and centring leaves nothing",
    )


def _per_layer(rows: torch.Tensor, find: _Find, mean: torch.Tensor) -> torch.Tensor:
    """`find(rows [n, hidden], mean [hidden])` of one or of each layer."""
    if rows.ndim == 2:
        return find(rows, mean)
    return torch.stack([find(rows[:, layer], mean[layer]) for layer in range(rows.shape[1])])


def _top(rows: torch.Tensor) -> torch.Tensor:
    """[n, hidden] -> [hidden], unit: the top eigenvector of the sum of the rows' outer products."""
    count, hidden = rows.shape
    if count <= hidden:  # the smaller of the two matrices with these eigenvalues
        found = rows.T @ torch.linalg.eigh(rows @ rows.T).eigenvectors[:, -1]
    else:
        found = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -1]
    return found / found.norm()


def _stretched(found: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """A direction as long as half the distance of the class means along it, and of their sign.

    One at right angles to the distance keeps a length that can be divided by.
    """
    unit = found / found.norm()
    along = float(unit @ mean)
    return unit * math.copysign(max(abs(along) / 2, _SHORTEST * float(mean.norm())), along)
