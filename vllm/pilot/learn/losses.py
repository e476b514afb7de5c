# SPDX-License-Identifier: Apache-2.0
"""Losses by which edits are learned, each of a batch of cases."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from vllm.pilot.learn.edits import Added, Edit, LoReft, ReftR1
from vllm.pilot.learn.model import Change, Site, TorchModel
from vllm.pilot.pairs import Pairs
from vllm.pilot.rows import Encoded, encode

BETA = 0.1
"""BiPO's weight of a nat."""


@dataclass(frozen=True)
class Case:
    """A pair in tokens, and what the plain model says of it."""

    wanted: Encoded
    other: Encoded
    plain: tuple[float, float]
    """log P of the two completions, without an edit, in nats."""


Edits = Mapping[Site, Edit]
Loss = Callable[[TorchModel, Edits, Sequence[Case], random.Random], torch.Tensor]
"""A number of a batch under edits; the last argument draws what the loss draws."""


def completion_nats(
    model: TorchModel, texts: Sequence[Encoded], edits: Mapping[Site, Change] | None = None
) -> torch.Tensor:
    """Sum log P over the tokens of texts after their prompts, in nats, [texts]."""
    table = model.log_probs([one.ids for one in texts], edits)
    return torch.stack(
        [
            table[i, one.start - 1 : len(one.ids) - 1]
            .gather(1, torch.tensor(one.ids[one.start :], device=table.device)[:, None])
            .sum()
            for i, one in enumerate(texts)
        ]
    )


def cases_of(model: TorchModel, pairs: Pairs, batch: int) -> list[Case]:
    """Return the pairs in tokens, with what the plain model says of them.

    Raises:
        ValueError: a prompt or a completion has no tokens, or is too long for the model.
    """
    sides = [[encode(model, e) for e in side] for side in (pairs.positive, pairs.negative)]
    most = getattr(model.module.config, "max_position_embeddings", None)
    for texts, examples in zip(sides, (pairs.positive, pairs.negative), strict=True):
        for text, example in zip(texts, examples, strict=True):
            if not text.start:
                raise ValueError(f"{example.where}: the prompt has no tokens; give one")
            if isinstance(most, int) and len(text.ids) > most:
                raise ValueError(
                    f"{example.where}: has {len(text.ids)} tokens, the model reads {most}; "
                    "shorten it"
                )
    nats: list[list[float]] = []
    with torch.no_grad():
        for texts in sides:
            parts = [texts[at : at + batch] for at in range(0, len(texts), batch)]
            nats.append([n for part in parts for n in completion_nats(model, part).tolist()])
    return [Case(w, o, (a, b)) for w, o, a, b in zip(*sides, *nats, strict=True)]


def likelihood(
    model: TorchModel, edits: Edits, batch: Sequence[Case], draw: random.Random
) -> torch.Tensor:
    """Surprise at the wanted completions, in nats a token."""
    wanted = [case.wanted for case in batch]
    tokens = sum(len(one.ids) - one.start for one in wanted)
    surprise = -completion_nats(model, wanted, edits).sum() / tokens
    return surprise + sum(edit.penalty() for edit in edits.values())


def preference(
    model: TorchModel, edits: Edits, batch: Sequence[Case], draw: random.Random
) -> torch.Tensor:
    """BiPO's loss (Cao et al. 2024, arXiv 2406.00045, equation 3).

    -log sigmoid(d beta (log-ratio of the wanted completion - log-ratio of the other)) with the edit
    times d, which is 1 or -1: backwards, the edit is to prefer the other completion.
    """
    sign = draw.choice((1.0, -1.0))
    for edit in edits.values():
        edit.sign = sign
    found = completion_nats(model, [c.wanted for c in batch] + [c.other for c in batch], edits)
    for edit in edits.values():
        edit.sign = 1.0
    plain = found.new_tensor([c.plain for c in batch])
    ratios = found.view(2, -1) - plain.T
    return -logsigmoid(sign * BETA * (ratios[0] - ratios[1])).mean()


def divergence(model: TorchModel, edits: Edits, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """KL(plain || edited) of the next token, in nats, the mean over all tokens of texts."""
    with torch.no_grad():
        plain = model.log_probs(texts)
    edited = model.log_probs(texts, edits)
    each = (plain.exp() * (plain - edited)).sum(-1)
    total = sum(each[i, : len(text)].sum() for i, text in enumerate(texts))
    return torch.as_tensor(total) / sum(map(len, texts))


@dataclass(frozen=True)
class Recipe:
    """A method: what is learned, and by which loss."""

    edit: Callable[[int, float, int, torch.Generator], Edit]
    """Called with the width, the size of an entry of the stream, the rank, and a generator."""
    loss: Loss
    kl: float
    """Weight of the divergence, unless another one is asked for."""
    strengths: tuple[float, ...] = (1.0,)
    """Strengths that are tried once it is learned."""
    ranked: bool = False
    """True if the edit has a rank."""


RECIPES = {
    "gradient": Recipe(Added, likelihood, 1.0),
    "reft": Recipe(LoReft, likelihood, 1.0, ranked=True),
    "reft-r1": Recipe(ReftR1, likelihood, 0.0, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)),
    "bipo": Recipe(Added, preference, 0.0),
}
"""Method of `learn` and of `vllm steering train` -> its recipe."""
