# SPDX-License-Identifier: Apache-2.0
"""Scores of whole texts by a probe, made as rules make them, and what they say of the probe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from vllm.pilot.bench import Bench, LateBar
from vllm.pilot.probes.labelled import LabelledData
from vllm.pilot.probes.reading import Counted, Over
from vllm.pilot.probes.statistics import Interval, rate, roc_area
from vllm.pilot.rows import CHUNK
from vllm.v1.probes.probe import ServedProbe

Score = Literal["highest", "last"]
"""Score of a text: the highest of its rows', by which a rule fires, or that of its last row."""


def score_of(score: str) -> Score:
    """Return a word that says which score is a text's.

    Raises:
        ValueError: it is another word.
    """
    if score not in get_args(Score):
        raise ValueError(f"score: use one of {', '.join(get_args(Score))}, not {score!r}")
    return score  # type: ignore[return-value]


def judge(
    bench: Bench, probe: ServedProbe, entries: Sequence[Counted], title: str = "judging"
) -> dict[Score, np.ndarray]:
    """Score texts by a rule with the probe over the rows that count; no row leaves the engine.

    Returns:
        For each `Score` float64 [texts].

    Raises:
        ValueError: a text has no finite score, or the model does not take the probe; the message
            names the text or the probe's part.
    """
    of_each: list[tuple[float, float]] = []
    fields = probe.fields()
    with LateBar(total=len(entries), desc=title, unit="text") as bar:
        for at in range(0, len(entries), CHUNK):
            some = entries[at : at + CHUNK]
            asked = [
                {
                    "max_tokens": 1,
                    "temperature": 0.0,
                    "rules": [
                        {
                            "name": "probe",
                            "probe": fields,
                            "threshold": 0.0,
                            "over": {"start": one.start, "stop": one.stop},
                        }
                    ],
                }
                for one in some
            ]
            for one, reply in zip(some, bench.ask([one.ids for one in some], asked), strict=True):
                result = reply.rules["probe"]
                if result.max is None or result.last is None:
                    raise ValueError(f"{one.entry.where}: none of its rows has a finite score")
                of_each.append((result.max, result.last))
            bar.update(len(some))
    highest, last = np.array(of_each, dtype=np.float64).reshape(-1, 2).T
    return {"highest": highest, "last": last}


@dataclass(frozen=True)
class Evaluation:
    """Judgement of a probe on labelled texts."""

    model: str
    source: str
    digest: str
    """SHA-256 of the data's file."""
    over: Over
    score: Score
    scores: np.ndarray
    """float64 [texts]."""
    labels: np.ndarray
    """bool [texts]."""
    area: Interval
    """The area under the ROC curve."""
    other_area: float
    """The area by the other of `Score`."""
    threshold: float | None
    true_rate: Interval | None
    """Share of positive texts above the threshold."""
    false_rate: Interval | None
    """Share of negative texts above it."""

    def __repr__(self) -> str:
        """Say the area."""
        return f"Evaluation({self.source!r}, AUROC {self.area}, better than chance: {self.held})"

    @property
    def held(self) -> bool:
        """True if the area's interval is above chance."""
        return self.area.low > 0.5

    def numbers(self) -> dict[str, Any]:
        """Return what a probe's `about` and a report keep, as JSON has it."""
        positive = int(self.labels.sum())
        made: dict[str, Any] = {
            "data": {"source": self.source, "sha256": self.digest},
            "positive": positive,
            "negative": len(self.labels) - positive,
            "over": self.over,
            "score": self.score,
            "auroc": [*self.area],
            "auroc_of_the_other_score": self.other_area,
        }
        if self.true_rate is not None and self.false_rate is not None:
            made |= {
                "threshold": self.threshold,
                "true_positive_rate": [*self.true_rate],
                "false_positive_rate": [*self.false_rate],
            }
        return made


def evaluation(
    bench: Bench,
    probe: ServedProbe,
    data: LabelledData,
    entries: Sequence[Counted],
    over: Over,
    score: Score,
) -> Evaluation:
    """Judge texts of both classes.

    Raises:
        ValueError: as of `judge`, or a class has no texts.
    """
    data.need_both()
    labels = np.array([one.entry.label for one in entries])
    both = judge(bench, probe, entries)
    scores = both[score]
    (other,) = (both[name] for name in both if name != score)
    true = false = None
    if probe.threshold is not None:
        above = scores > probe.threshold
        true = rate(int(above[labels].sum()), int(labels.sum()))
        false = rate(int(above[~labels].sum()), int((~labels).sum()))
    return Evaluation(
        bench.name,
        data.source,
        data.digest,
        over,
        score,
        scores,
        labels,
        roc_area(scores, labels),
        roc_area(other, labels).value,
        probe.threshold,
        true,
        false,
    )


def verdict(found: Evaluation) -> str:
    """Return what was found, in a sentence."""
    positive = int(found.labels.sum())
    said = f"AUROC {found.area} of {positive} + {len(found.labels) - positive} texts"
    if not found.held:
        said = f"no better than chance: {said}"
    if found.true_rate is not None:
        said += (
            f"; above the threshold {found.threshold:.4g} are {found.true_rate} of positive and "
            f"{found.false_rate} of negative texts"
        )
    if found.other_area > found.area.high:
        other = "last" if found.score == "highest" else "highest"
        said += (
            f"; by the {other} score of each text AUROC {found.other_area:.3g} (--score {other})"
        )
    return said
