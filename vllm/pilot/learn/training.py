# SPDX-License-Identifier: Apache-2.0
"""From pairs to an edit of the stream that was learned by gradients, and tested."""

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm.pilot.learn.edits import Added, module_of
from vllm.pilot.learn.losses import (
    RECIPES,
    Case,
    Edits,
    Recipe,
    cases_of,
    completion_nats,
    divergence,
)
from vllm.pilot.learn.model import POINTS, Site, TorchModel
from vllm.pilot.pairs import Pairs, Text
from vllm.pilot.rows import need_layers

_RANDOMS = 8


@dataclass(frozen=True)
class LearnSettings:
    """Settings of `learn`, which says what each means.

    Raises:
        ValueError: a setting is none, whatever the model and the data; the message names it.
    """

    method: str = "gradient"
    layers: Sequence[int] | Literal["all"] = "all"
    point: str = "post_block"
    rank: int | None = None
    kl: float | None = None
    rate: float = 0.02
    epochs: int = 40
    patience: int = 5
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Find what can be found before a model is loaded."""
        if self.method not in RECIPES:
            raise ValueError(f"method: {self.method!r} is none of {', '.join(RECIPES)}")
        if self.point not in POINTS:
            raise ValueError(
                f"point: {self.point!r} has no gradients here; take {' or '.join(POINTS)}"
            )
        if self.rank is not None and not self.recipe.ranked:
            raise ValueError(f"rank: method {self.method!r} has none; leave it out, or take 'reft'")
        counts = {name: getattr(self, name) for name in ("epochs", "patience", "batch")}
        for name, value in {"rank": self.rank or 1, **counts}.items():
            if value < 1:
                raise ValueError(f"{name}: {value}; at least 1 is needed")
        if not self.rate > 0 or (self.kl or 0) < 0:
            raise ValueError("rate, kl: a rate above 0 and a weight of 0 or more are needed")

    @property
    def recipe(self) -> Recipe:
        """The recipe of the method."""
        return RECIPES[self.method]


@dataclass(frozen=True)
class LearnedEvidence:
    """The edit on pairs that decided nothing, in nats."""

    cases: int
    wanted: float
    """Change of log P of the wanted completion, the mean."""
    margin: float
    """Change of log P(wanted) - log P(other), the mean."""
    error: float
    """Standard error of the margin; infinite of one case."""
    randoms: list[float]
    """The margins of random vectors, as long as what the edit changes in a row on average."""
    kl: float | None
    """KL(plain || edited) a token, on neutral texts; None without."""

    @property
    def held(self) -> bool:
        """True if the margin is above two standard errors, and above those of random vectors."""
        return self.margin > 2 * self.error and self.margin > max(self.randoms)


@dataclass(frozen=True)
class Learned:
    """An edit that was learned, how, and what it does."""

    model: str
    settings: LearnSettings
    data: Pairs
    edits: Edits
    losses: list[tuple[float, float]]
    """After each pass, the loss on the train split and on the choose split."""
    evidence: LearnedEvidence
    """On the report split."""

    def __repr__(self) -> str:
        """Say what was learned, and whether it held."""
        said = self.evidence
        return (
            f"Learned({self.model!r}, {self.settings.method} at {self.settings.point} of layers "
            f"{[layer for _, layer in self.edits]}: {said.margin:+.3g} nats, held: {said.held})"
        )

    def module(self) -> dict[str, Any]:
        """Return the fields of a module for `register_module`: what the engine serves of it."""
        return module_of(self.edits)


def learn(
    model: TorchModel | str,
    pairs: Pairs,
    *,
    neutral: Sequence[Text] | None = None,
    say: Callable[[str], Any] = lambda _: None,
    **settings: Any,
) -> Learned:
    """Learn an edit of the stream that makes positive completions of prompts likelier.

    Pairs are cut in three: on some the edit is learned by Adam, the loss on others ends it, and the
    last ones say what it is worth. The same data, settings and seed give the same numbers on one
    machine.

    Args:
        model: a checkpoint in transformers, or the folder of one.
        pairs: with prompts. "gradient", "reft" and "reft-r1" learn from positive completions;
            "bipo" from both.
        neutral: texts whose next tokens are to stay as they are. Default: the prompts up to their
            last token.
        say: is told what happens.
        settings: fields of `LearnSettings`. `method`: "gradient", "reft", "reft-r1" or "bipo";
            `layers`, each gets an edit and all are learned together; `point`; `rank` of "reft",
            default 4; `kl`, the weight of the divergence beside the loss, default 1, of "bipo" and
            "reft-r1" 0; `rate`, the share of the stream's usual entry that a step may change;
            `epochs` at most; `patience`, passes without a smaller loss before it ends; `batch`,
            pairs of a step; `seed`.

    Raises:
        ValueError: the data or a setting does not do, the model cannot be learned on, or the loss
            is not finite; the message names it.
    """
    chosen = LearnSettings(**settings)
    parts = split_pairs(pairs)
    model = TorchModel.load(model) if isinstance(model, str) else model
    layers = need_layers(model, chosen.layers, chosen.point)
    recipe, batch = chosen.recipe, chosen.batch
    kl = recipe.kl if chosen.kl is None else chosen.kl
    train, choose, report = (cases_of(model, parts[name], batch) for name in parts)
    elsewhere = _neutral(model, neutral, train)
    say(f"{len(train)} pairs train, {len(choose)} choose, {len(report)} report")
    generator = torch.Generator().manual_seed(chosen.seed)
    sizes = _sizes(model, train[:batch], [(chosen.point, layer) for layer in layers])
    edits = {
        site: recipe.edit(model.hidden, size, chosen.rank or 4, generator).to(model.device)
        for site, size in sizes.items()
    }
    losses = _fit(model, edits, train, choose, elsewhere if kl else [], kl, chosen, say)
    others = elsewhere[:batch]
    if len(recipe.strengths) > 1:
        _choose_strength(model, edits, recipe, choose, chosen, say)
    return Learned(
        model.name, chosen, pairs, edits, losses, _evidence(model, edits, report, others, chosen)
    )


def split_pairs(pairs: Pairs) -> dict[str, Pairs]:
    """Cut pairs in three.

    Raises:
        ValueError: they have no prompts, or a part would be empty.
    """
    if not pairs.comparable:
        raise ValueError(
            f"{pairs.source}: pairs with a prompt are needed, of which the completion is learned; "
            "give each a 'prompt'"
        )
    return pairs.split()


def _neutral(
    model: TorchModel, neutral: Sequence[Text] | None, cases: Sequence[Case]
) -> list[list[int]]:
    if neutral is None:
        prompts = [tuple(case.wanted.ids[: case.wanted.start - 1]) for case in cases]
        return [list(ids) for ids in dict.fromkeys(prompts) if ids]
    texts = [model.encode(text) for text in neutral]
    if empty := [i for i, ids in enumerate(texts) if not ids]:
        raise ValueError(f"neutral[{empty[0]}]: has no tokens; leave it out")
    return texts


def _sizes(model: TorchModel, cases: Sequence[Case], sites: Sequence[Site]) -> dict[Site, float]:
    """A usual entry of a row at each site: the median length over the root of the width."""
    found: dict[Site, float] = {}

    def look(site: Site) -> Any:
        def keep(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            found[site] = float(stream[real].float().norm(dim=-1).median()) / model.hidden**0.5
            return stream

        return keep

    with torch.no_grad():
        model.log_probs([c.wanted.ids for c in cases], {site: look(site) for site in sites})
    return {site: found[site] for site in sites}


def _fit(
    model: TorchModel,
    edits: Edits,
    train: Sequence[Case],
    choose: Sequence[Case],
    elsewhere: Sequence[list[int]],
    kl: float,
    settings: LearnSettings,
    say: Callable[[str], Any],
) -> list[tuple[float, float]]:
    """Learn until the loss on the choose split has not fallen for long, and keep the best."""
    loss, batch = settings.recipe.loss, settings.batch
    draw = random.Random(settings.seed)
    numbers = [number for edit in edits.values() for number in edit.parameters()]
    optimiser = torch.optim.Adam(numbers, lr=settings.rate)
    best, kept, since = math.inf, _copies(edits), 0
    losses: list[tuple[float, float]] = []

    def whole(cases: Sequence[Case], dice: random.Random, texts: Sequence[Any]) -> torch.Tensor:
        value = loss(model, edits, cases, dice)
        return value + kl * divergence(model, edits, texts) if texts else value

    while len(losses) < settings.epochs and since < settings.patience:
        for edit in edits.values():
            edit.train()
        order = draw.sample(range(len(train)), len(train))
        total = 0.0
        for at in range(0, len(order), batch):
            some = order[at : at + batch]
            texts = draw.sample(elsewhere, min(len(some), len(elsewhere)))
            optimiser.zero_grad()
            value = whole([train[i] for i in some], draw, texts)
            value.backward()
            optimiser.step()
            total += float(value.detach()) * len(some) / len(train)
        for edit in edits.values():
            edit.eval()
        with torch.no_grad():
            parts = [choose[at : at + batch] for at in range(0, len(choose), batch)]
            # The same dice each time, so that passes can be compared.
            dice = random.Random(settings.seed)
            values = [float(whole(p, dice, elsewhere[:batch])) * len(p) for p in parts]
        losses.append((total, sum(values) / len(choose)))
        say(f"pass {len(losses)}: loss {total:.4f}, on the choose split {losses[-1][1]:.4f}")
        if not all(map(math.isfinite, losses[-1])):
            raise ValueError("rate: the loss is not finite; take a smaller one")
        since = 0 if losses[-1][1] < best else since + 1
        if not since:
            best, kept = losses[-1][1], _copies(edits)
    for site, edit in edits.items():
        edit.load_state_dict(kept[site])
    return losses


def _copies(edits: Edits) -> dict[Site, Any]:
    return {site: copy.deepcopy(edit.state_dict()) for site, edit in edits.items()}


def _choose_strength(
    model: TorchModel,
    edits: Edits,
    recipe: Recipe,
    choose: Sequence[Case],
    settings: LearnSettings,
    say: Callable[[str], Any],
) -> None:
    """Take the strength with the smallest loss on the choose split."""
    found = {}
    for strength in recipe.strengths:
        _set_strength(edits, strength)
        with torch.no_grad():
            dice = random.Random(settings.seed)
            parts = [
                choose[at : at + settings.batch] for at in range(0, len(choose), settings.batch)
            ]
            found[strength] = sum(
                float(recipe.loss(model, edits, part, dice)) * len(part) for part in parts
            )
    best = min(found, key=lambda strength: found[strength])
    _set_strength(edits, best)
    say(f"strength {best:g} of {', '.join(f'{s:g}' for s in found)}")


def _set_strength(edits: Edits, strength: float) -> None:
    for edit in edits.values():
        edit.strength = strength


@torch.no_grad()
def _evidence(
    model: TorchModel,
    edits: Edits,
    cases: Sequence[Case],
    neutral: Sequence[list[int]],
    settings: LearnSettings,
) -> LearnedEvidence:
    lengths: dict[Site, float] = {}

    def measured(site: Site) -> Any:
        def change(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            made = edits[site](stream, real)
            lengths[site] = float((made - stream)[real][1:].float().norm(dim=-1).mean())
            return made

        return change

    def margins(changes: Any) -> torch.Tensor:
        """[2, cases]: the change of log P of the wanted completion, and of the other."""
        found = []
        for at in range(0, len(cases), settings.batch):
            part = cases[at : at + settings.batch]
            texts = [c.wanted for c in part] + [c.other for c in part]
            nats = completion_nats(model, texts, changes).double().cpu().view(2, -1)
            found.append(nats - torch.tensor([c.plain for c in part]).double().T)
        return torch.cat(found, dim=1)

    changed = margins({site: measured(site) for site in edits})
    margin = changed[0] - changed[1]
    generator = torch.Generator().manual_seed(settings.seed)
    randoms = []
    for _ in range(_RANDOMS):
        vectors = {}
        for site, length in lengths.items():
            vector = Added(model.hidden, 1.0, 1, generator)
            drawn = torch.randn(model.hidden, generator=generator)
            vector.units.copy_(drawn * (length / drawn.norm()))
            vectors[site] = vector.to(model.device)
        found = margins(vectors)
        randoms.append(float((found[0] - found[1]).mean()))
    return LearnedEvidence(
        cases=len(cases),
        wanted=float(changed[0].mean()),
        margin=float(margin.mean()),
        error=float(margin.std() / len(cases) ** 0.5) if len(cases) > 1 else math.inf,
        randoms=randoms,
        kl=float(divergence(model, edits, neutral)) if neutral else None,
    )
