# SPDX-License-Identifier: Apache-2.0
"""From pairs to a checked vector: `train`, which `vllm steering train` and the demo run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from vllm.pilot.bench import Bench, Steering, bench_of
from vllm.pilot.choice import (
    Choice,
    Guard,
    KlGuard,
    candidate_layers,
    choose,
    written_surprise,
)
from vllm.pilot.directions import Method
from vllm.pilot.evidence import Evidence, effect_evidence, separation_evidence
from vllm.pilot.fitting import Directions, Separation, find_directions, separate
from vllm.pilot.metrics import Metric, Odds
from vllm.pilot.pairs import Pairs, Text
from vllm.pilot.persona import written_pairs
from vllm.pilot.rows import Read, encode, need_layers, need_read
from vllm.pilot.sweeps import Sweep, sweep

if TYPE_CHECKING:
    from vllm import LLM

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
CASES = 64
"""Pairs whose effect is measured, of each split, at most."""
_NEUTRAL_TEXTS = 32
_NEUTRAL_TOKENS = 32


@dataclass(frozen=True)
class Settings:
    """Settings that find and choose directions; `train` says what each means.

    Raises:
        ValueError: a setting is none, whatever the model and the data; the message names it.
    """

    method: Method = "mean"
    read: Read = None
    layers: Sequence[int] | Literal["all"] = "all"
    point: str = "post_block"
    scales: Sequence[float] = SCALES
    candidates: int | None = 5
    guard: Guard = "kl"
    max_nats: float = 0.1
    randoms: int = 8
    cases: int = CASES
    seed: int = 0
    memory: int = 4 << 30

    def __post_init__(self) -> None:
        """Find what can be found before a model is loaded."""
        if not self.scales or min(self.scales) <= 0:
            raise ValueError("scales: positive numbers are needed; each is tried with both signs")
        for name, count in (("candidates", self.candidates), ("cases", self.cases)):
            if count is not None and count < 1:
                raise ValueError(f"{name}: {count}; at least 1 is needed")
        need_read(self.read)


@dataclass(frozen=True)
class Trained:
    """Directions, which layer and scale were chosen, and what speaks for it."""

    model: str
    settings: Settings
    data: Pairs
    counts: dict[str, tuple[int, int]]
    """Split -> its positive and negative examples."""
    directions: Directions
    separation: Separation
    """On the choose split."""
    sweep: Sweep | None
    """None where no effect can be measured."""
    choice: Choice
    evidence: Evidence
    """On the report split."""

    def __repr__(self) -> str:
        """Say what was chosen, and whether it held."""
        choice, evidence, settings = self.choice, self.evidence, self.settings
        return (
            f"Trained({self.model!r}, {settings.method}: {settings.point} of layer {choice.layer}, "
            f"scale {choice.scale:g}, {evidence.strength:+.3g} {evidence.unit}, held: {self.held})"
        )

    @property
    def held(self) -> bool:
        """True if the effect is above random directions, within the guard."""
        return self.evidence.above_random and self.choice.within and not self.broken

    @property
    def broken(self) -> bool:
        """True if v plus -v changed an answer, which it must not."""
        return self.evidence.changed_by_zero > 0

    def module(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return the chosen layer's vector for `register_module`; scale 1 is the chosen scale."""
        layer, scale = self.choice.layer, self.choice.scale
        return {self.settings.point: {layer: self.directions.at(layer) * scale}}


def train(
    llm: "LLM | Bench | str",
    pairs: Pairs,
    *,
    metrics: tuple[Metric, Metric] | None = None,
    background: list[Text] | None = None,
    neutral: list[Text] | None = None,
    say: Callable[[str], Any] = lambda _: None,
    **settings: Any,
) -> Trained:
    """Find a direction for each layer, choose a layer and a scale, and test the choice.

    Pairs are cut in three: from some directions are made, on others layer and scale are chosen, and
    the last ones say what it is worth.

    Args:
        llm: an engine with steering and the consumer `inline`, or a server's URL.
        metrics: what steering is to change, to choose by and to report. Default: how likely the
            positive text is against the negative one, where pairs have a prompt; else no effect is
            measured, and the best separating layer is taken.
        background: texts for the method `mean-centred`.
        neutral: texts for the guard "kl"; default: what the plain model writes.
        say: is told what happens.
        settings: fields of `Settings`. `method`; `read`, see `vllm.pilot.rows.Read`; `layers`;
            `point`; `scales`, positive, each is tried with both signs; `candidates`, how many
            layers are, those that separate best, None for all; `guard`, and `max_nats` a token that
            it allows; `randoms`, how many random directions; `cases`, how many pairs at most of a
            split are measured; `seed`; `memory`, bytes for rows.

    Raises:
        ValueError: the data or a setting does not do; the message names it.
        TypeError: there is no such setting.
    """
    bench = bench_of(llm)
    chosen = Settings(**settings)
    layers = need_layers(bench, chosen.layers, chosen.point)
    if pairs.persona is not None:
        say(f"{len(pairs.persona.questions)} questions are answered under two system prompts")
        pairs = written_pairs(bench, pairs)
    parts = pairs.split()
    chosen = replace(chosen, read=chosen.read if chosen.read is not None else pairs.read or "last")
    if metrics is None and pairs.comparable:
        metrics = (
            Odds(parts["choose"].first(chosen.cases)),
            Odds(parts["report"].first(chosen.cases)),
        )
    if chosen.guard == "written" and metrics is None:
        raise ValueError("guard: 'written' needs a score, whose texts it looks at")
    sizes = {name: (len(part.positive), len(part.negative)) for name, part in parts.items()}
    say(", ".join(f"{name} {p}+{n}" for name, (p, n) in sizes.items()) + " examples")
    read, point, seed = chosen.read, chosen.point, chosen.seed
    found = find_directions(
        bench, parts["train"], layers, chosen.method, read, point, background, seed, chosen.memory
    )
    for warning in found.warnings:
        say(f"warning: {warning}")
    separation, _ = separate(bench, parts["choose"], found, read, point)
    swept = None
    if metrics is None:
        say("pairs have no prompt and there is no score: what steering does is not measured")
        choice = _choose_by_separation(bench, parts["choose"], found, separation, chosen, neutral)
    else:
        tried = candidate_layers(found, separation, chosen.candidates)
        last = max(bench.layers)
        tried = [layer for layer in tried if layer != last or chosen.candidates is None] or tried
        say(f"layers {tried} are steered")
        vectors = {layer: found.at(layer) for layer in layers}
        both = sorted({sign * scale for scale in chosen.scales for sign in (-1, 0, 1)})
        swept = sweep(bench, vectors, tried, both, metrics[0], point)
        choice = _choose_by_effect(bench, swept, vectors, metrics[0].prompts, chosen, neutral)
    say(f"layer {choice.layer}, scale {choice.scale:g}; it is tested beside random directions")
    evidence = separation_evidence(
        bench, parts["report"], found, choice, read, point, chosen.randoms, seed
    )
    if metrics is not None and swept is not None:
        evidence = effect_evidence(
            bench, metrics[1], found, choice, swept.scales, point, chosen.randoms, seed, evidence
        )
    return Trained(bench.name, chosen, pairs, sizes, found, separation, swept, choice, evidence)


def _choose_by_effect(
    bench: Bench,
    swept: Sweep,
    vectors: dict[int, torch.Tensor],
    prompts: Sequence[Text],
    settings: Settings,
    neutral: list[Text] | None,
) -> Choice:
    scales = [scale for scale in swept.scales if scale]
    if settings.guard == "written":
        if swept.plain_answers is None:
            raise ValueError("guard: 'written' needs a metric that has texts written")
        plain = written_surprise(bench, swept.plain_answers)

        def nats_of(layer: int) -> dict[float, float]:
            return {s: written_surprise(bench, swept.answers[layer, s]) - plain for s in scales}
    else:
        ids = [bench.encode(prompt, answer=True) for prompt in dict.fromkeys(prompts)]
        guard = KlGuard(bench, _neutral(bench, neutral, ids), own=not neutral)
        plain = guard.plain

        def nats_of(layer: int) -> dict[float, float]:
            steerings = [Steering(layer, vectors[layer], s, settings.point) for s in scales]
            return dict(zip(scales, guard(steerings), strict=True))

    return choose(swept, nats_of, plain, settings.max_nats, max(bench.layers))


def _choose_by_separation(
    bench: Bench,
    pairs: Pairs,
    found: Directions,
    separation: Separation,
    settings: Settings,
    neutral: list[Text] | None,
) -> Choice:
    """The layer that separates best, and scale 1, or the largest below it that the guard allows."""
    rank = sorted(zip(separation.d_prime, found.layers, strict=True), reverse=True)
    inner = [layer for _, layer in rank if layer != max(bench.layers)]
    layer = (inner or [rank[0][1]])[0]
    examples = [*pairs.positive, *pairs.negative][:_NEUTRAL_TEXTS]
    halves = [ids[: (len(ids) + 1) // 2] for ids in (encode(bench, e).ids for e in examples)]
    guard = KlGuard(bench, _neutral(bench, neutral, halves), own=not neutral)
    scales = [s for s in settings.scales if s <= 1] or [min(settings.scales)]
    signed = [sign * scale for scale in scales for sign in (-1, 1)]
    vector = found.at(layer)
    nats = dict(
        zip(
            signed, guard([Steering(layer, vector, s, settings.point) for s in signed]), strict=True
        )
    )
    allowed = [s for s in scales if max(nats[s], nats[-s]) <= settings.max_nats]
    return Choice(layer, max(allowed, default=min(scales)), nats, guard.plain, bool(allowed))


def _neutral(
    bench: Bench, neutral: list[Text] | None, prompts: list[list[int]]
) -> list[tuple[list[int], int]]:
    """Tokens that count for the guard: the texts that are given, or what the plain model writes."""
    if neutral:
        return [(bench.encode(text), 1) for text in neutral]
    some = prompts[:_NEUTRAL_TEXTS]
    asked = [
        {"max_tokens": _NEUTRAL_TOKENS, "temperature": 1.0, "seed": i} for i in range(len(some))
    ]
    replies = bench.ask(some, asked)
    return [([*r.prompt_ids, *r.token_ids], len(r.prompt_ids)) for r in replies]
