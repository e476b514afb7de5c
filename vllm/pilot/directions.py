# SPDX-License-Identifier: Apache-2.0
"""Directions from examples: one formula for each method, and how well a direction separates.

Rows are [n, hidden], or [n, layers, hidden] for all layers at once; tensors or arrays of any float
dtype. Everything is computed in float64 and returned as float32. With paired examples, row i of
`positive` belongs to row i of `negative`; d = positive - negative.
"""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch

from vllm.pilot.linear_probe import fit_probe

Method = Literal["mean", "pca", "pca-centred", "logistic", "lat", "mean-centred"]

PAIRED: tuple[Method, ...] = ("pca", "pca-centred")
"""The methods that need to know which examples belong together."""

Rows = torch.Tensor | np.ndarray
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
    p, n = _rows(positive, "positive"), _rows(negative, "negative")
    _need_width(p, n)
    return _need_difference((p.mean(0) - n.mean(0)) / 2).float()


def pca(positive: Rows, negative: Rows, centred: bool = False) -> torch.Tensor:
    """Top principal component of the pairs' differences.

    It is stretched to half the distance of the class means along it, and points to `positive`.

    Args:
        positive, negative: pairs, [n, hidden] or [n, layers, hidden].
        centred: whether the mean difference is subtracted first, which takes the concept itself out
            where all pairs differ by it alone: see `centring_removes`.

    Returns:
        [hidden] or [layers, hidden].

    Raises:
        ValueError: the classes are not as long, a class is empty, or there is no difference.
    """
    difference = _differences(positive, negative)
    if centred and len(difference) < 2:
        raise ValueError("pca: centred needs two pairs or more")
    mean = difference.mean(0)
    return _per_layer(
        difference, lambda d, m: _stretched(_top(d - m if centred else d), m), mean
    ).float()


def lat(positive: Rows, negative: Rows, seed: int = 0) -> torch.Tensor:
    """Top component of the normalised differences of random pairs of all rows (RepE's LAT).

    It is stretched to half the distance of the class means along it, and points to `positive`.

    Args:
        positive, negative: [n, hidden] or [n, layers, hidden]; need not be paired.
        seed: which random pairs.

    Returns:
        [hidden] or [layers, hidden].

    Raises:
        ValueError: a class is empty, or there is no difference.
    """
    p, n = _rows(positive, "positive"), _rows(negative, "negative")
    _need_width(p, n)
    both = torch.cat([p, n])
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    half = len(both) // 2
    difference = both[order[:half]] - both[order[half : 2 * half]]
    length = difference.norm(dim=-1, keepdim=True)
    difference = difference / length.clamp(min=torch.finfo(torch.float64).tiny)
    mean = _need_difference(p.mean(0) - n.mean(0))
    return _per_layer(difference, lambda d, m: _stretched(_top(d), m), mean).float()


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
        _rows(rows, name)
        for rows, name in ((positive, "positive"), (negative, "negative"), (background, "back"))
    )
    _need_width(p, n)
    _need_width(p, b)
    mean = _need_difference(p.mean(0) - n.mean(0))
    direction = _need_difference(p.mean(0) - b.mean(0))
    return _per_layer(direction[None], lambda d, m: _stretched(d[0], m), mean).float()


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
    p, n = _rows(positive, "positive"), _rows(negative, "negative")
    _need_width(p, n)
    if paired:
        _differences(p, n)
    mean = _need_difference(p.mean(0) - n.mean(0))
    layers = p[:, None] if p.ndim == 2 else p
    others = n[:, None] if n.ndim == 2 else n
    found = []
    for layer, m in enumerate(mean.view(-1, mean.shape[-1])):
        at, of = layers[:, layer], others[:, layer]
        if paired:
            middle = (at + of) / 2
            at, of = at - middle, of - middle
        weight = fit_probe(at, of, penalty=penalty, intercept=not paired).weight
        found.append(_stretched(weight.double(), m))
    return torch.stack(found).view(mean.shape).float()


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
    """Where the mean difference is more than half of what the differences are.

    Returns:
        bool [] or [layers]: |mean d|^2 > mean |d|^2 / 2. There a centred `pca` finds what is left.
    """
    d = _differences(positive, negative)
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
        self._outer = torch.zeros(layers, hidden, hidden, dtype=torch.float64)

    def add(self, positive: torch.Tensor, negative: torch.Tensor) -> None:
        """Add pairs, [n, layers, hidden] each."""
        self.count += len(positive)
        for layer, outer in enumerate(self._outer):
            p, n = positive[:, layer].double(), negative[:, layer].double()
            self._sums[:, layer] += torch.stack([p.sum(0), n.sum(0)])
            outer.addmm_((p - n).T, p - n)

    @property
    def means(self) -> torch.Tensor:
        """The mean row of each class, float64 [2, layers, hidden]."""
        return self._sums / self.count

    @property
    def centring_removes(self) -> torch.Tensor:
        """As `centring_removes` says of the rows, bool [layers]."""
        difference = self.means[0] - self.means[1]
        whole = self._outer.diagonal(dim1=1, dim2=2).sum(-1) / self.count
        return difference.square().sum(-1) > whole / 2

    def pca(self, centred: bool = False) -> torch.Tensor:
        """As `pca` of the rows, float32 [layers, hidden].

        Raises:
            ValueError: there is no difference at a layer.
        """
        mean = self.means[0] - self.means[1]
        _need_difference(self._outer.diagonal(dim1=1, dim2=2))
        found = []
        for outer, m in zip(self._outer, mean, strict=True):
            around = outer - self.count * m[:, None] * m if centred else outer
            found.append(_stretched(torch.linalg.eigh(around).eigenvectors[:, -1], m))
        return torch.stack(found).float()


def auroc(positive: Rows, negative: Rows) -> torch.Tensor:
    """The chance that a positive score is above a negative one; ties count a half.

    Args:
        positive, negative: scores, [n] or [n, layers].

    Returns:
        float64 [] or [layers].
    """
    p, n = _rows(positive, "positive", 1), _rows(negative, "negative", 1)
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
        float64 [] or [layers]; 0 where nothing differs.
    """
    p, n = _rows(positive, "positive", 1), _rows(negative, "negative", 1)
    spread = ((p.var(0) + n.var(0)) / 2).sqrt()
    found = (p.mean(0) - n.mean(0)) / spread
    return torch.where(p.mean(0) == n.mean(0), torch.zeros_like(found), found)


def _rows(rows: Rows, name: str, least: int = 2) -> torch.Tensor:
    made = torch.as_tensor(rows).detach().cpu().double()
    if made.ndim not in (least, least + 1):
        raise ValueError(f"{name}: shape {list(made.shape)}, wanted [n, hidden] or one axis more")
    if not len(made):
        raise ValueError(f"{name}: there are no examples of this class")
    if not made.isfinite().all():
        raise ValueError(f"{name}: not all numbers are finite")
    return made


def _need_width(positive: torch.Tensor, negative: torch.Tensor) -> None:
    if positive.shape[1:] != negative.shape[1:]:
        raise ValueError(
            f"rows of shape {list(positive.shape[1:])} and {list(negative.shape[1:])} are not of "
            "the same layers"
        )


def _differences(positive: Rows, negative: Rows) -> torch.Tensor:
    p, n = _rows(positive, "positive"), _rows(negative, "negative")
    if p.shape != n.shape:
        raise ValueError(
            f"pairs are needed: positive is {list(p.shape)} and negative {list(n.shape)}; "
            "mean_difference and logistic do without"
        )
    difference = p - n
    _need_difference(difference.square().sum(0))
    return difference


def _need_difference(found: torch.Tensor) -> torch.Tensor:
    """[..., hidden] as it is; refused where it is zero, as no direction can be found in it."""
    same = (found == 0).all(-1)
    if same.any():
        where = "" if same.ndim == 0 else f" at layers {same.nonzero().flatten().tolist()}"
        raise ValueError(f"positive and negative do not differ{where}")
    return found


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
    least = 1e-6
    return unit * (along / 2 if abs(along) > least else least)
