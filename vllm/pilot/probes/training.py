# SPDX-License-Identifier: Apache-2.0
"""From labelled texts to a probe that was judged: `train_probe`."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from vllm.pilot.bench import Bench, bench_of
from vllm.pilot.pairs import SPLITS
from vllm.pilot.probes.judging import Evaluation, Score, evaluation, judge, score_of
from vllm.pilot.probes.labelled import LabelledData
from vllm.pilot.probes.learned_heads import learn, outputs_of
from vllm.pilot.probes.linear_heads import PENALTIES, regressions
from vllm.pilot.probes.reading import (
    Counted,
    EntryRows,
    Over,
    counted,
    need_sites,
    over_of,
    read_entries,
)
from vllm.pilot.probes.statistics import best_threshold, roc_area
from vllm.v1.probes.files import made_probe
from vllm.v1.probes.heads import ACTIVATIONS, MAX_OUTPUTS, MAX_UNITS
from vllm.v1.probes.pools import AnyPool, Mean
from vllm.v1.probes.probe import ServedProbe, Site

if TYPE_CHECKING:
    from vllm import LLM

Head = Literal["linear", "mlp"]
MEMORY = 4 << 30
_REGRESSED, _LEARNED = 20, 2
"""Number of times that rows are in memory at once, in float32: of a regression, and of what is
learned by gradient descent."""


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a training; `train_probe` says what each means.

    Raises:
        ValueError: a setting is none, whatever the model and the data; the message names it.
    """

    head: Head = "linear"
    pool: AnyPool = field(default_factory=Mean)
    heads: int = 4
    units: int = 32
    activation: str = "relu"
    over: Over | None = None
    score: Score = "highest"
    penalty: float | None = None
    seed: int = 0
    memory: int = MEMORY

    def __post_init__(self) -> None:
        """Find what can be found before a model is loaded."""
        if self.head not in get_args(Head):
            raise ValueError(f"head: use one of {', '.join(get_args(Head))}, not {self.head!r}")
        for name, given, numbers, most in (
            ("heads", self.heads, self.outputs, MAX_OUTPUTS),
            ("units", self.units, self.units, MAX_UNITS),
        ):
            if given < 1 or numbers > most:
                raise ValueError(
                    f"{name}: {given} make {numbers} numbers a row, allowed are 1-{most}"
                )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: use one of {', '.join(ACTIVATIONS)}, not {self.activation!r}"
            )
        if self.penalty is not None and not self.penalty > 0:
            raise ValueError(f"penalty: {self.penalty} is not above 0")
        score_of(self.score)

    @property
    def outputs(self) -> int:
        """Number of numbers that the head gives of a row."""
        return outputs_of(self.pool, self.heads)

    @property
    def regression(self) -> bool:
        """True if the head is one linear function, which has a best fit."""
        return self.head == "linear" and self.outputs == 1

    @property
    def averaged(self) -> bool:
        """True if the regression is on the mean row of each text."""
        return self.regression and isinstance(self.pool, Mean)


@dataclass(frozen=True)
class TrainedProbe:
    """A probe, and what it is worth on texts that no decision was made on."""

    probe: ServedProbe
    settings: ProbeSettings
    counts: dict[str, tuple[int, int]]
    """Split -> its positive and negative texts."""
    found: Evaluation

    @property
    def held(self) -> bool:
        """True if it is better than chance."""
        return self.found.held

    def __repr__(self) -> str:
        """Say the probe, and its area."""
        return f"TrainedProbe({self.probe!r}, AUROC {self.found.area}, held: {self.held})"


def train_probe(
    llm: "LLM | Bench | str",
    data: LabelledData,
    sites: Sequence[Site],
    *,
    test: LabelledData | None = None,
    say: Callable[[str], Any] = lambda _: None,
    **settings: Any,
) -> TrainedProbe:
    """Fit a probe on labelled texts, and judge it on others.

    Texts are cut in three by prompt: on some the head is fitted, on others a penalty or the end of
    the descent is chosen and the threshold set (where the true and the false positive rate differ
    most), and the last ones say what it is worth, by a rule with the probe.

    Args:
        llm: an engine with the consumer `inline`, or a server's URL.
        sites: point and layer of each row; layers below 0 count from the end.
        test: texts to judge by in place of a part of `data`.
        say: is told what happens.
        settings: fields of `ProbeSettings`. `head`, "linear" or "mlp"; `pool`, one of
            `vllm.v1.probes.pools`; `heads`, how many an `Attention` or `MultiMax` has; `units` and
            `activation` of an MLP; `over`, the rows that count, see `Over` (default: those of
            completions, or of prompts where a text has none); `score`, see `Score`; `penalty` of a
            regression, of rows whose channels vary by 1 (default: the best of `PENALTIES`); `seed`;
            `memory`, bytes for rows.

    Raises:
        ValueError: the data or a setting does not do, or rows need more than `memory`; the message
            names it.
        TypeError: there is no such setting.
    """
    chosen = ProbeSettings(**settings)
    names = SPLITS if test is None else SPLITS[:2]
    parts = data.split(names) if test is None else {**data.split(names), SPLITS[2]: test}
    for part in parts.values():
        part.need_both()
        _need_no_lost_spans(part, chosen)
    bench = bench_of(llm)
    places = need_sites(bench, sites)
    over = over_of(chosen.over, data)
    chosen = dataclasses.replace(chosen, over=over)
    encoded = {name: counted(bench, part, over) for name, part in parts.items()}
    counts = {name: part.counts for name, part in parts.items()}
    kept = SPLITS[: 1 if chosen.regression else 2]
    _need_memory([one for name in kept for one in encoded[name]], len(places), bench, chosen)
    say(", ".join(f"{name} {p}+{n}" for name, (p, n) in counts.items()) + f" texts, {over} rows")
    read = [_read(bench, encoded[name], places, chosen) for name in kept]
    labels = np.array([one.entry.label for one in encoded["choose"]])

    def judged(probe: ServedProbe) -> np.ndarray:
        return judge(bench, probe, encoded["choose"])[chosen.score]

    if chosen.regression:
        probe, told = _regression(read[0], places, chosen, judged, labels, say)
    else:
        probe, told = _descent(read[0], read[1], places, chosen, say)
    probe = dataclasses.replace(probe, threshold=best_threshold(judged(probe), labels))
    last = SPLITS[2]
    found = evaluation(bench, probe, parts[last], encoded[last], over, chosen.score)
    about = {
        "model": bench.name,
        "over": over,
        "score": chosen.score,
        "training": {
            **told,
            "data": {"source": data.source, "sha256": data.digest},
            "texts": {name: [*pair] for name, pair in counts.items()},
            "threshold": "Youden's J on the choose split",
        },
        "evaluation": found.numbers(),
    }
    return TrainedProbe(dataclasses.replace(probe, about=about), chosen, counts, found)


def _regression(
    train: list[EntryRows],
    sites: Sequence[Site],
    settings: ProbeSettings,
    judged: Callable[[ServedProbe], np.ndarray],
    labels: np.ndarray,
    say: Callable[[str], Any],
) -> tuple[ServedProbe, dict[str, Any]]:
    """Fit regressions, and take the one by which other texts are told apart best: the one with the
    largest penalty of several. Return it, and how it was made."""
    penalties = PENALTIES if settings.penalty is None else (settings.penalty,)
    tried: dict[float, ServedProbe] = {}
    areas: dict[float, float] = {}
    for penalty, fitted in regressions(train, penalties):
        weight, bias = fitted.weight.numpy()[None], np.array([fitted.bias])
        tried[penalty] = made_probe(sites, weight, bias, pool=settings.pool)
        areas[penalty] = roc_area(judged(tried[penalty]), labels).value
        say(f"penalty {penalty:g}: AUROC {areas[penalty]:.3f} on the choose split")
    best = max(areas, key=lambda penalty: (areas[penalty], penalty))
    told = {"method": "logistic regression", "penalty": best, "choose_auroc": areas[best]}
    return tried[best], told


def _descent(
    train: list[EntryRows],
    choose: list[EntryRows],
    sites: Sequence[Site],
    settings: ProbeSettings,
    say: Callable[[str], Any],
) -> tuple[ServedProbe, dict[str, Any]]:
    """Learn a head; return the probe, and how it was made."""
    is_mlp = settings.head == "mlp"
    learned, told = learn(
        train,
        choose,
        settings.pool,
        settings.outputs,
        settings.units if is_mlp else 0,
        settings.activation,
        settings.score,
        settings.seed,
        say,
    )
    activation = settings.activation if is_mlp else ""
    probe = made_probe(sites, **vars(learned), activation=activation, pool=settings.pool)
    return probe, {"method": "AdamW", "seed": settings.seed, **told}


def _read(
    bench: Bench, entries: Sequence[Counted], sites: Sequence[Site], settings: ProbeSettings
) -> list[EntryRows]:
    """Read rows; of a regression on means that of each text alone."""
    read = read_entries(bench, entries, sites, "reading")
    if not settings.averaged:
        return list(read)
    return [
        EntryRows(
            one.counted,
            one.values.double().mean(0, keepdim=True).float(),
            torch.tensor([one.counted.entry.label]),
        )
        for one in read
    ]


def _need_no_lost_spans(data: LabelledData, settings: ProbeSettings) -> None:
    for entry in data.entries:
        if entry.spans and (settings.averaged or not settings.regression):
            raise ValueError(
                f"{entry.where}: has spans, by which rows of a linear head are labelled (--head "
                "linear, a pool other than mean); leave them out"
            )


def _need_memory(
    entries: Sequence[Counted], sites: int, bench: Bench, settings: ProbeSettings
) -> None:
    """Raise ValueError where the rows that are kept need more than `memory`."""
    width = sites * bench.hidden
    rows = len(entries) if settings.averaged else sum(one.rows for one in entries)
    size = rows * width * 4 * (_REGRESSED if settings.regression else _LEARNED)
    if size > settings.memory:
        raise ValueError(
            f"--memory: {rows} rows of {width} numbers need {size >> 20} MiB, allowed are "
            f"{settings.memory >> 20}; take fewer sites or texts, or --pool mean with a linear "
            "head, which keeps a row a text"
        )
