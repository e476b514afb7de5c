# SPDX-License-Identifier: Apache-2.0
"""Ways to steer towards concepts, compared on a served model, after AxBench (arXiv 2501.17148).

The model answers instructions under each way and each factor. A judge gives every answer three
grades from 0 to 2: is the concept in it, does it follow the instruction, is it fluent? Its score is
their harmonic mean, 0 if one grade is 0. On half of the instructions the factor with the best mean
score is chosen, and on the others it is reported.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.pilot.bench import Bench, bench_of
from vllm.pilot.pairs import Text, last_words
from vllm.pilot.records import read_jsonl

if TYPE_CHECKING:
    from vllm import LLM

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
GRADES = ("concept", "instruction", "fluency")

PLAIN = "plain"
"""The way that steers nowhere, which is always compared."""

Judge = Callable[[str, str, str], Sequence[float]]
"""Called with a concept, an instruction and an answer; returns three grades from 0 to 2."""


@dataclass(frozen=True)
class Way:
    """A way to steer towards a concept."""

    name: str
    system: str | None = None
    """Instruction that stands before every prompt; a prompt has no factor."""
    module: str | None = None
    """Name of a registered module, whose scale is the factor."""
    op: Mapping[str, Any] | None = None
    """Operation of a request, such as `feature`."""
    scaled: str = "add"
    """The key of `op` that is multiplied by the factor."""

    def factors(self, tried: Sequence[float]) -> Sequence[float]:
        """Return the factors that there are for it."""
        return (1.0,) if self.module is None and self.op is None else tried

    def fields(self, factor: float) -> dict[str, Any]:
        """Return the fields of a request."""
        fields: dict[str, Any] = {}
        if self.module is not None:
            fields["steering_modules"] = [[self.module, factor]]
        if self.op is not None:
            fields["steering"] = [{**self.op, self.scaled: self.op[self.scaled] * factor}]
        return fields

    def prompt(self, instruction: Text) -> Text:
        """Return what the model is given."""
        if self.system is None:
            return instruction
        if isinstance(instruction, str):
            return f"{self.system}\n\n{instruction}"
        return ((("role", "system"), ("content", self.system)), *instruction)


@dataclass(frozen=True)
class Concept:
    """A concept, and the ways to steer towards it."""

    name: str
    ways: list[Way]


@dataclass(frozen=True)
class Result:
    """The grades of one way, means over concepts and the instructions that chose nothing."""

    way: str
    score: float
    error: float
    """Standard error of the score, over answers."""
    concept: float
    instruction: float
    fluency: float
    factors: dict[str, float]
    """Concept -> the factor that was chosen."""
    answers: int


@dataclass(frozen=True)
class Comparison:
    """The results of all ways, the best one first."""

    model: str
    results: list[Result]
    written: list[dict[str, Any]]
    """Every answer with its grades: concept, way, factor, instruction, text, grades, reported."""

    def __repr__(self) -> str:
        """Show the table."""
        width = max(len(result.way) for result in self.results)
        factors = [", ".join(f"{f:g}" for f in r.factors.values()) for r in self.results]
        rows = [
            f"{r.way:{width}} {r.score:6.3f} +- {r.error:5.3f}  {r.concept:7.3f} "
            f"{r.instruction:11.3f} {r.fluency:7.3f}  {chosen}"
            for r, chosen in zip(self.results, factors, strict=True)
        ]
        head = f"{'way':{width}}  score          concept instruction fluency  factors"
        return "\n".join([head, *rows])

    def as_numbers(self) -> dict[str, Any]:
        """Return everything, as JSON has it."""
        results = [asdict(result) for result in self.results]
        return {"model": self.model, "results": results, "answers": self.written}


def read_concepts(path: str | Path) -> list[Concept]:
    """Read concepts, a line of JSONL each: `{"concept": "joy", "ways": {"caa": {"module": "m"}}}`.

    Raises:
        ValueError: a line is none, or a way has other keys than `Way`; the message names the line.
        OSError: the file cannot be opened.
    """
    found = []
    for where, entry in read_jsonl(Path(path)):
        named = entry.get("ways") if isinstance(entry, dict) else None
        if not isinstance(named, dict) or not named or not isinstance(entry.get("concept"), str):
            raise ValueError(f'{where}: needs "concept", a text, and "ways", an object of them')
        ways = [_way(name, way, f"{where}: ways.{name}") for name, way in named.items()]
        found.append(Concept(entry["concept"], ways))
    if not found:
        raise ValueError(f"{path}: there are no concepts in it; write one a line")
    return found


def _way(name: str, given: Any, where: str) -> Way:
    kinds = {"system": str, "module": str, "op": dict}
    chosen = [key for key in kinds if isinstance(given, dict) and key in given]
    if len(chosen) != 1 or set(given) - {chosen[0], "scaled"} or name == PLAIN:
        raise ValueError(
            f'{where}: needs one of {", ".join(kinds)}, and beside "op" "scaled"; {PLAIN!r} is no '
            "name for it"
        )
    way = Way(name, **given)
    if not isinstance(given[chosen[0]], kinds[chosen[0]]):
        raise ValueError(f"{where}.{chosen[0]}: must be of type {kinds[chosen[0]].__name__}")
    if way.op is not None and not isinstance(way.op.get(way.scaled), int | float):
        raise ValueError(
            f'{where}.scaled: {way.scaled!r} is no number in "op"; name the key that the factor '
            "multiplies"
        )
    return way


def harmonic_mean(grades: Sequence[float]) -> float:
    """Return the harmonic mean of grades, 0 if one is 0."""
    return 0.0 if min(grades) <= 0 else len(grades) / sum(1 / grade for grade in grades)


def compare(
    llm: "LLM | Bench | str",
    concepts: Sequence[Concept],
    instructions: Sequence[Text],
    judge: Judge,
    *,
    factors: Sequence[float] = FACTORS,
    max_tokens: int = 64,
    temperature: float = 0.0,
    say: Callable[[str], Any] = lambda _: None,
) -> Comparison:
    """Compare ways: the model answers instructions under each, and the judge grades the answers.

    Args:
        llm: an engine or a server's URL, which has the modules.
        instructions: two or more; every other one chooses factors.
        judge: see `Judge`.
        factors: tried with every way but prompts.
        temperature: above 0 the seed is the index of the instruction.

    Raises:
        ValueError: there are no factors or concepts, less than two instructions, or the judge
            returns other than three grades from 0 to 2; a request cannot be honoured.
    """
    if not concepts or not factors or len(instructions) < 2:
        raise ValueError(
            f"instructions: {len(instructions)}, concepts: {len(concepts)}, factors: "
            f"{len(factors)}; two instructions, one concept and one factor are the least"
        )
    bench = bench_of(llm)
    written: list[dict[str, Any]] = []
    for concept in concepts:
        for way in [Way(PLAIN), *concept.ways]:
            ids = [bench.encode(way.prompt(text), answer=True) for text in instructions]
            for factor in way.factors(factors):
                common = {"max_tokens": max_tokens, "temperature": temperature}
                fields = [
                    {**common, **way.fields(factor), **({"seed": i} if temperature else {})}
                    for i in range(len(ids))
                ]
                for i, reply in enumerate(bench.ask(ids, fields)):
                    asked = last_words(instructions[i])
                    grades = _grades(judge, concept.name, asked, reply.text)
                    written.append(
                        {
                            "concept": concept.name, "way": way.name, "factor": factor,
                            "instruction": asked, "text": reply.text, "grades": grades,
                            "score": harmonic_mean(grades), "reported": i % 2 == 1,
                        }
                    )  # fmt: skip
                say(f"{concept.name}, {way.name}, factor {factor:g}: {len(ids)} answers")
    return Comparison(bench.name, _results(written), written)


def _grades(judge: Judge, concept: str, instruction: str, text: str) -> list[float]:
    grades = [float(grade) for grade in judge(concept, instruction, text)]
    if len(grades) != len(GRADES) or not all(0 <= grade <= 2 for grade in grades):
        raise ValueError(f"judge: returned {grades}; three grades from 0 to 2 are needed")
    return grades


def _results(written: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Judge each way by one half of the answers, with the factors that the other half chose."""
    by: dict[str, dict[str, dict[float, list[Mapping[str, Any]]]]] = {}
    for one in written:
        of_way = by.setdefault(one["way"], {}).setdefault(one["concept"], {})
        of_way.setdefault(one["factor"], []).append(one)
    results = []
    for way, concepts in by.items():
        chosen: dict[str, float] = {}
        reported: list[Mapping[str, Any]] = []
        for concept, tried in concepts.items():
            means = {
                factor: np.mean([one["score"] for one in ones if not one["reported"]])
                for factor, ones in tried.items()
            }
            # Of equals the weakest.
            chosen[concept] = min(means, key=lambda f: (-means[f], abs(f)))
            reported += [one for one in tried[chosen[concept]] if one["reported"]]
        scores = np.array([one["score"] for one in reported])
        grades = np.array([one["grades"] for one in reported]).mean(0).tolist()
        spread = float(scores.std(ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
        named = dict(zip(GRADES, grades, strict=True))
        score = float(scores.mean())
        results.append(Result(way, score, spread, factors=chosen, answers=len(scores), **named))
    return sorted(results, key=lambda result: -result.score)


def save_comparison(found: Comparison, folder: Path) -> None:
    """Write `report.json` and `scores.png`, the grades of each way as bars.

    Raises:
        OSError: a file cannot be written.
        ImportError: matplotlib is not installed.
    """
    from vllm.pilot.picture import named_bars, subplots
    from vllm.pilot.report import write_text
    from vllm.v1.capture.figures import save_figure

    write_text(folder / "report.json", json.dumps(found.as_numbers(), indent=1))
    figure, axes = subplots(4, 3.2, 1.5 + 0.3 * len(found.results))
    names = [result.way for result in found.results]
    for axis, grade in zip(axes, ("score", *GRADES), strict=True):
        values = np.array([getattr(result, grade) for result in found.results])
        named_bars(axis, names, values, f"{grade}, 0 to 2")
    save_figure(figure, folder / "scores.png")
