# SPDX-License-Identifier: Apache-2.0
"""Heads that are learned by gradient descent on the score of each text, pools included."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm.pilot.probes.judging import Score
from vllm.pilot.probes.reading import EntryRows
from vllm.v1.probes import pools

EPOCHS, PATIENCE = 200, 20
"""Passes over the data at most, and without a smaller loss on the choose split."""
_BATCH = 32
_RATE, _DECAY = 3e-3, 1e-2

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
}


@dataclass(frozen=True)
class Learned:
    """Arrays of a head, as `made_probe` takes them, float32."""

    weight: np.ndarray
    """[units, sites * hidden]."""
    bias: np.ndarray
    output_weight: np.ndarray | None = None
    output_bias: np.ndarray | None = None


def outputs_of(pool: pools.AnyPool, heads: int) -> int:
    """Return how many numbers a row has for a pool, which may have several heads."""
    numbers = _NUMBERS.get(type(pool))
    return heads * numbers if numbers else 1


_NUMBERS: Mapping[type, int] = {pools.Attention: 2, pools.MultiMax: 1}
"""Pool of several heads -> numbers of a row for each."""


def learn(
    train: Sequence[EntryRows],
    choose: Sequence[EntryRows],
    pool: pools.AnyPool,
    outputs: int,
    units: int,
    activation: str,
    score: Score,
    seed: int,
    say: Callable[[str], Any],
) -> tuple[Learned, dict[str, Any]]:
    """Learn a head with AdamW, by the logistic loss of each text's score.

    It ends when the loss on other texts has not fallen for `PATIENCE` passes, and is what it was
    where that was smallest. The same rows, settings and seed give the same numbers.

    Args:
        outputs: numbers of a row.
        units: hidden units of an MLP; 0 for a linear head.
        activation: of the hidden units, one of `vllm.v1.probes.heads.ACTIVATIONS`.

    Returns:
        The head, and how it was learned.

    Raises:
        ValueError: the loss is not finite.
    """
    width = train[0].values[0].numel()
    middle, size = _standard([one.values.flatten(1) for one in train])
    generator = torch.Generator().manual_seed(seed)
    shapes = [(units, width), (outputs, units)] if units else [(outputs, width)]
    layers = [_linear(rows, columns, generator) for rows, columns in shapes]
    model = nn.Sequential(layers[0])
    if units:
        model = nn.Sequential(layers[0], _ACTIVATIONS[activation](), layers[1])
    optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=_DECAY)
    best, kept, since, epoch = math.inf, copy.deepcopy(model.state_dict()), 0, 0
    while epoch < EPOCHS and since < PATIENCE:
        epoch += 1
        order = torch.randperm(len(train), generator=generator).tolist()
        for at in range(0, len(order), _BATCH):
            some = [train[i] for i in order[at : at + _BATCH]]
            optimiser.zero_grad()
            _loss(model, some, pool, score, middle, size).backward()
            optimiser.step()
        with torch.no_grad():
            parts = [choose[at : at + _BATCH] for at in range(0, len(choose), _BATCH)]
            losses = [float(_loss(model, p, pool, score, middle, size)) * len(p) for p in parts]
        loss = sum(losses) / len(choose)
        if not math.isfinite(loss):
            raise ValueError("train_probe: the loss is not finite; take another pool or activation")
        since = 0 if loss < best else since + 1
        if not since:
            best, kept = loss, copy.deepcopy(model.state_dict())
    say(f"{epoch} passes, loss {best:.4f} on the choose split")
    model.load_state_dict(kept)
    first, *rest = [layer for layer in layers if isinstance(layer, nn.Linear)]
    weight = first.weight.detach().double() / size
    bias = first.bias.detach().double() - weight @ middle.double()
    last = [tensor.detach().numpy() for layer in rest for tensor in (layer.weight, layer.bias)]
    made = Learned(weight.float().numpy(), bias.float().numpy(), *last)
    return made, {"passes": epoch, "choose_loss": best}


def _standard(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and spread of each channel, float32 [width]; one that is always the same has 1."""
    count = sum(map(len, rows))
    middle = sum(one.double().sum(0) for one in rows) / torch.tensor(count)
    spread = sum((one.double() - middle).square().sum(0) for one in rows) / torch.tensor(count)
    size = spread.sqrt()
    size[size <= size.max() * 1e-6] = 1.0
    return middle.float(), size.float()


def _linear(rows: int, columns: int, generator: torch.Generator) -> nn.Linear:
    made = nn.Linear(columns, rows)
    with torch.no_grad():
        made.weight.copy_(torch.randn(rows, columns, generator=generator) / columns**0.5 / 4)
        made.bias.zero_()
    return made


def _loss(
    model: nn.Module,
    some: Sequence[EntryRows],
    pool: pools.AnyPool,
    score: Score,
    middle: torch.Tensor,
    size: torch.Tensor,
) -> torch.Tensor:
    """The mean logistic loss of some texts' scores."""
    rows = torch.cat([one.values.flatten(1) for one in some])
    numbers = model((rows - middle) / size).split([len(one.values) for one in some])
    of_rows = [_POOLED[type(pool)](each, pool) for each in numbers]
    scores = torch.stack([of.amax() if score == "highest" else of[-1] for of in of_rows])
    labels = torch.tensor([float(one.counted.entry.label) for one in some])
    return nn.functional.binary_cross_entropy_with_logits(scores, labels)


# -- pools as torch has them: numbers [n, outputs] of a text's rows -> its score at each row, [n] --


def _each(z: torch.Tensor, pool: Any) -> torch.Tensor:
    return z[:, 0]


def _mean(z: torch.Tensor, pool: Any) -> torch.Tensor:
    return z[:, 0].cumsum(0) / torch.arange(1, len(z) + 1)


def _multimax(z: torch.Tensor, pool: Any) -> torch.Tensor:
    return z.cummax(0).values.sum(1)


def _exponential(z: torch.Tensor, pool: pools.Exponential) -> torch.Tensor:
    decay = (1 - pool.a) ** torch.arange(len(z))
    kernel = (pool.a * decay).flip(0)[None, None]
    inputs = torch.cat([torch.zeros(len(z) - 1), z[:, 0]])[None, None]
    # The first row counts as all that were before it.
    return nn.functional.conv1d(inputs, kernel)[0, 0] + (1 - pool.a) * decay * z[0, 0]


def _rolling_max(z: torch.Tensor, pool: pools.RollingMax) -> torch.Tensor:
    sums = torch.cat([torch.zeros(1), z[:, 0].cumsum(0)])
    at = torch.arange(1, len(z) + 1)
    counts = at.clamp(max=pool.window)
    means = (sums[at] - sums[at - counts]) / counts
    full = means[pool.window - 1 :]
    return torch.cat([means[: pool.window - 1], full.cummax(0).values if len(full) else full])


def _attention(z: torch.Tensor, pool: Any) -> torch.Tensor:
    q, v = z.chunk(2, dim=1)
    shares = (q - q.detach().cummax(0).values[-1:]).exp()
    total = shares.cumsum(0) + torch.finfo(z.dtype).tiny
    return ((shares * v).cumsum(0) / total).sum(1)


_POOLED: Mapping[type, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    pools.Each: _each,
    pools.Mean: _mean,
    pools.Max: _multimax,
    pools.MultiMax: _multimax,
    pools.Exponential: _exponential,
    pools.RollingMax: _rolling_max,
    pools.Attention: _attention,
}
"""Pool -> the same in torch."""
