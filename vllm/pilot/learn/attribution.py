# SPDX-License-Identifier: Apache-2.0
"""Attribution: what a patch would do, by gradients, in place of a run for each place.

Attribution patching (Nanda 2023; Syed et al. 2023, arXiv 2310.10348) estimates the change that a
clean row makes by (clean - own row) . gradient of the metric, of all places in one backward pass.
Integrated gradients (Sundararajan et al. 2017, arXiv 1703.01365) take the mean gradient on the way
from a layer's own rows to the clean ones: the sum over a layer's positions is the difference of the
metric between the two prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vllm.pilot.learn.model import POINTS, Change, Site, TorchModel
from vllm.pilot.patching import PatchSweep, Prompt, encoded
from vllm.pilot.picture import place_map, subplots
from vllm.pilot.rows import need_layers
from vllm.v1.capture.figures import save_figure


@dataclass(frozen=True)
class Attribution:
    """The estimated change of a metric by the clean row of each place."""

    metric: str
    """"logprob" or "diff", as of `PatchSweep`."""
    points: list[str]
    layers: list[int]
    tokens: list[str]
    """The prompt's, of each position."""
    values: np.ndarray
    """float64 [points, layers, positions], nats."""
    clean: float
    corrupt: float
    """The metric of the prompts, nats."""
    steps: int | None
    """Points on the way, of integrated gradients."""

    def correlation(self, sweep: PatchSweep) -> float:
        """Pearson's correlation with an exact sweep over the same places.

        Raises:
            ValueError: it has other points, layers or positions, or one of the two is constant.
        """
        exact = self._changes(sweep)
        if not (exact.std() and self.values.std()):
            raise ValueError("sweep: all places have one value; take a prompt that differs")
        return float(np.corrcoef(exact.ravel(), self.values.ravel())[0, 1])

    def draw(self, target: str | Path, sweep: PatchSweep) -> None:
        """Write the estimate and the exact sweep side by side, and cell against cell; PNG or SVG.

        Raises:
            ValueError: as of `correlation`.
            ImportError: matplotlib is not installed.
        """
        exact, names = self._changes(sweep), [repr(token) for token in self.tokens]
        height = 1.8 + 0.3 * len(names)
        figure, axes = subplots(2 * len(self.points) + 1, 2.5 + 0.3 * len(self.layers), height)
        how = "attribution" if self.steps is None else "integrated gradients"
        for i, point in enumerate(self.points):
            for axis, values, by in ((2 * i, self.values, how), (2 * i + 1, exact, "patching")):
                label = f"change of {self.metric} by {by}, nats"
                place_map(axes[axis], values[i].T, self.layers, names, f"layer ({point})", label)
        axes[-1].scatter(exact.ravel(), self.values.ravel(), s=12, alpha=0.6)
        axes[-1].axline((0, 0), slope=1, color="grey", linewidth=0.8)
        axes[-1].set_xlabel("patching, nats")
        axes[-1].set_ylabel(f"{how}, nats")
        axes[-1].set_title(f"correlation {self.correlation(sweep):.3f}", fontsize=11)
        save_figure(figure, target)

    def _changes(self, sweep: PatchSweep) -> np.ndarray:
        """The sweep's change in nats at each place."""
        same = (sweep.points, sweep.layers) == (self.points, self.layers)
        if not same or sweep.values.shape != self.values.shape:
            raise ValueError(
                "sweep: is of other points, layers or positions; compare the same prompts, "
                f"points {self.points} and layers {self.layers}"
            )
        if sweep.metric == "recovered":
            return sweep.values * (self.clean - self.corrupt)
        return sweep.values - sweep.corrupt


def attribute(
    model: TorchModel,
    prompt: Prompt,
    clean: Prompt,
    *,
    answer: str | int,
    other: str | int | None = None,
    points: Sequence[str] = ("post_block",),
    layers: int | Sequence[int] | Literal["all"] = "all",
    steps: int | None = None,
) -> Attribution:
    """Estimate what `patch_sweep` of the same prompts measures.

    Args:
        model: the checkpoint in transformers.
        prompt, clean: prompts of as many tokens.
        answer, other: a text of one token, or its id: the metric is log P(answer), less log
            P(other) if there is one, of the next token.
        points: of `pre_attn` and `post_block`.
        steps: None for attribution patching; else points on the way of integrated gradients, by
            Gauss and Legendre's rule: 8 are exact where the metric is a polynomial of degree 16.

    Raises:
        ValueError: the prompts have not as many tokens, an answer is not one token, a point or
            layer has no gradients, or `steps` is below 1.
    """
    own, whole = (encoded(model, text) for text in (prompt, clean))
    if own is None or whole is None or len(own) != len(whole):
        lengths = len(own or ()), len(whole or ())
        raise ValueError(f"clean: has {lengths[1]} tokens and prompt {lengths[0]}; as many are due")
    if steps is not None and steps < 1:
        raise ValueError(f"steps: {steps}; at least 1 is needed, or None for one gradient")
    if wrong := [point for point in points if point not in POINTS]:
        raise ValueError(f"points: {wrong[0]!r} has no gradients here; take {' or '.join(POINTS)}")
    tokens = [_token(model, text, name) for text, name in ((answer, "answer"), (other, "other"))]
    chosen = need_layers(model, layers, points[0])
    sites = [(point, layer) for point in points for layer in chosen]

    def metric(ids: Sequence[int], count: int, changes: Mapping[Site, Change]) -> torch.Tensor:
        """The metric of a prompt, `count` times, [count]."""
        last = model.log_probs([ids] * count, changes)[:, -1]
        found: torch.Tensor = last[:, tokens[0]]
        return found if tokens[1] is None else found - last[:, tokens[1]]

    with torch.no_grad():
        at_clean = _Rows()
        high = float(metric(whole, 1, {site: at_clean.of(site) for site in sites}))
    at_own = _Rows()
    # The first site that runs starts the graph; the gradients of all come with one pass.
    low = metric(own, 1, {site: at_own.of(site, graph=True) for site in sites})
    if steps is None:
        gradients = torch.autograd.grad(low.sum(), [at_own.rows[site] for site in sites])
        found = dict(zip(sites, gradients, strict=True))
    else:
        found = {}
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        for site in sites:
            begin, end = at_own.rows[site].detach(), at_clean.rows[site]
            along = torch.tensor((nodes + 1) / 2).to(begin)[:, None, None]
            way = (begin + along * (end - begin)).requires_grad_()
            values = metric(own, steps, {site: _instead(way)})
            [each] = torch.autograd.grad(values.sum(), [way])
            shares = torch.tensor(weights / 2).to(each)[:, None, None]
            found[site] = (shares * each).sum(0, keepdim=True)
    made = [
        ((at_clean.rows[s] - at_own.rows[s].detach()) * found[s])[0].double().sum(-1) for s in sites
    ]
    shape = len(points), len(chosen), len(own)
    return Attribution(
        metric="logprob" if tokens[1] is None else "diff",
        points=list(points),
        layers=chosen,
        tokens=[model.tokenizer.decode([token]) for token in own],
        values=torch.stack(made).cpu().numpy().reshape(shape),
        clean=high,
        corrupt=float(low.detach()),
        steps=steps,
    )


def _instead(rows: torch.Tensor) -> Change:
    return lambda stream, real: rows


class _Rows:
    """The stream of one run at sites."""

    def __init__(self) -> None:
        self.rows: dict[Site, torch.Tensor] = {}

    def of(self, site: Site, graph: bool = False) -> Change:
        """Return a function that keeps a site's stream, and with `graph` makes it have one."""

        def change(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            if graph and not stream.requires_grad:
                stream = stream.detach().requires_grad_()
            self.rows[site] = stream
            return stream

        return change


def _token(model: TorchModel, text: Any, name: str) -> int | None:
    """The one token of an answer, None of none."""
    if text is None or isinstance(text, int):
        return text
    ids = model.encode(text, special=False)
    if len(ids) != 1:
        raise ValueError(f"{name}: {text!r} is {len(ids)} tokens; name one, or its id")
    return ids[0]
