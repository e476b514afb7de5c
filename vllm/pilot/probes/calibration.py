# SPDX-License-Identifier: Apache-2.0
"""Thresholds at a wanted rate of false positives, and judgements of probes that are there."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.pilot.bench import Bench, bench_of
from vllm.pilot.probes.judging import Evaluation, Score, evaluation, judge, score_of
from vllm.pilot.probes.labelled import LabelledData
from vllm.pilot.probes.reading import Over, counted, over_of
from vllm.pilot.probes.statistics import Interval, allowed_hits, needed_for, rate
from vllm.v1.probes.probe import ServedProbe

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Calibration:
    """A probe with the threshold that was found."""

    probe: ServedProbe
    wanted: float
    false_rate: Interval
    """Share of negative texts above the threshold."""
    negatives: int
    true_rate: Interval | None
    """Share of positive texts above it, where the data have some."""

    def __str__(self) -> str:
        """Say the threshold and its rates, and how many texts would say more."""
        said = (
            f"threshold {self.probe.threshold:.6g}: false positives {self.false_rate} of "
            f"{self.negatives} negative texts, wanted {self.wanted:g}"
        )
        if self.true_rate is not None:
            said += f"; true positives {self.true_rate}"
        if self.false_rate.high > 2 * self.wanted:
            said += (
                f"; with about {needed_for(self.wanted)} negative texts the interval would end "
                f"below {2 * self.wanted:g}"
            )
        return said


def calibrate_probe(
    llm: "LLM | Bench | str",
    probe: ServedProbe,
    data: LabelledData,
    rate_wanted: float = 0.01,
    *,
    over: Over | None = None,
    score: Score | None = None,
    say: Callable[[str], Any] = lambda _: None,
) -> Calibration:
    """Find the lowest threshold that at most a share of negative texts is above.

    Args:
        llm: an engine with a capture consumer, or a server's URL.
        data: negative texts; positive ones among them say the true positive rate.
        rate_wanted: the share, above 0 and below 1.
        over, score: see `Over` and `Score`; default: what the probe was trained with.
        say: is told what happens.

    Raises:
        ValueError: there are too few negative texts, or as of `judge`; the message says how many it
            takes.
        ImportError: scipy is not installed.
    """
    negatives = data.counts[1]
    need_enough(data, rate_wanted)
    bench = bench_of(llm)
    rows, by = _asked(bench, probe, data, over, score, say)
    entries = counted(bench, data, rows)
    scores = judge(bench, probe, entries)[by]
    labels = np.array([one.entry.label for one in entries])
    allowed = allowed_hits(rate_wanted, negatives)
    threshold = _between(scores[~labels], allowed)
    above = scores > threshold
    false = rate(int(above[~labels].sum()), negatives)
    true = rate(int(above[labels].sum()), int(labels.sum())) if labels.any() else None
    calibrated = {
        "data": {"source": data.source, "sha256": data.digest},
        "negative": negatives,
        "over": rows,
        "score": by,
        "wanted": rate_wanted,
        "false_positive_rate": [*false],
        **({} if true is None else {"true_positive_rate": [*true]}),
    }
    about = {**probe.about, "over": rows, "score": by, "calibration": calibrated}
    made = dataclasses.replace(probe, threshold=threshold, about=about)
    return Calibration(made, rate_wanted, false, negatives, true)


def need_enough(data: LabelledData, wanted: float) -> None:
    """Raise ValueError where the negative texts are too few for a rate, or it is none."""
    negatives = data.counts[1]
    if not 0 < wanted < 1:
        raise ValueError(f"fpr: {wanted} is not between 0 and 1")
    if allowed_hits(wanted, negatives) < 1:
        raise ValueError(
            f"fpr: {wanted:g} takes {int(np.ceil(1 / wanted))} negative texts at least, "
            f"{data.source} has {negatives}; give more, or a higher rate"
        )


def evaluate_probe(
    llm: "LLM | Bench | str",
    probe: ServedProbe,
    data: LabelledData,
    *,
    over: Over | None = None,
    score: Score | None = None,
    say: Callable[[str], Any] = lambda _: None,
) -> Evaluation:
    """Judge a probe on labelled texts.

    Args:
        llm: an engine with a capture consumer, or a server's URL.
        over, score: see `Over` and `Score`; default: what the probe was trained with.
        say: is told what happens.

    Raises:
        ValueError: as of `judge`, or a class has no texts.
        ImportError: scipy is not installed.
    """
    data.need_both()
    bench = bench_of(llm)
    rows, by = _asked(bench, probe, data, over, score, say)
    return evaluation(bench, probe, data, counted(bench, data, rows), rows, by)


def _asked(
    bench: Bench,
    probe: ServedProbe,
    data: LabelledData,
    over: Over | None,
    score: Score | None,
    say: Callable[[str], Any],
) -> tuple[Over, Score]:
    """Return the rows that count and the score of a text, as the caller or the probe says."""
    about = probe.about
    trained_on = about.get("model", bench.name)
    if trained_on != bench.name:
        say(f"warning: the probe is of the model {trained_on}, this one is {bench.name}")
    rows = over_of(over or about.get("over"), data)
    by = score_of(score or about.get("score") or "highest")
    positive, negative = data.counts
    say(f"{positive} positive and {negative} negative texts, {rows} rows, the {by} score of each")
    return rows, by


def _between(negative: np.ndarray, allowed: int) -> float:
    """A threshold that at most `allowed` scores are above: halfway to the next higher one, so that
    rounding moves none across."""
    ordered = np.sort(negative)[::-1]
    at = ordered[allowed] if allowed < len(ordered) else ordered[-1]
    higher = ordered[ordered > at]
    return float((at + higher[-1]) / 2) if len(higher) else float(at)
