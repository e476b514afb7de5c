# SPDX-License-Identifier: Apache-2.0
"""Ways to steer, compared: on a bench that answers what it was asked, by formulas done by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.pilot.test_train_command import run
from vllm.entrypoints.cli.steering import train as command
from vllm.pilot.bench import Fields, Reply
from vllm.pilot.comparing import (
    Concept,
    Way,
    compare,
    harmonic_mean,
    read_concepts,
    save_comparison,
)
from vllm.pilot.pairs import Text, last_words

pytestmark = pytest.mark.quick

INSTRUCTIONS = [f"text {i}" for i in range(4)]
MODULE = Way("caa", module="glad")
FEATURE = Way("sae", op={"op": "feature", "id": 3, "value": 8.0}, scaled="value")
PROMPT = Way("prompt", system="Be glad.")


class Echo:
    """A bench whose answer is what it was asked, in JSON."""

    def __init__(self) -> None:
        self.name = "echo"
        self.hidden = 3
        self.layers: dict[int, tuple[str, ...]] = {0: ("post_block",)}

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        return list(json.dumps(text).encode())

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        made = []
        for prompt, each in zip(prompts, fields, strict=True):
            said = json.dumps({"prompt": bytes(prompt).decode(), **each})
            made.append(Reply(tuple(prompt), (0,), said, True, [], {}))
        return made


def judge(concept: str, instruction: str, text: str) -> list[float]:
    """The stronger, the gladder; fluency is lost above 1, in text 1 at 1, in text 3 always."""
    asked = json.loads(text)
    assert concept == "joy" and instruction in asked["prompt"]
    factor = 0.0
    for _, scale in asked.get("steering_modules", []):
        factor = scale
    for op in asked.get("steering", []):
        factor = op["value"] / 8
    if "Be glad" in asked["prompt"]:
        factor = 0.5
    most = {"text 1": 0.5, "text 3": 0.0}.get(instruction, 1.0)
    fluent = 0.0 if factor > most else 2.0
    return [min(2.0, 2 * factor), 2.0, fluent]


def test_the_factor_is_chosen_on_one_half_and_reported_on_the_other(tmp_path: Path) -> None:
    concepts = [Concept("joy", [MODULE, FEATURE, PROMPT])]
    found = compare(Echo(), concepts, INSTRUCTIONS, judge, factors=(0.5, 1.0, 2.0))
    results = {result.way: result for result in found.results}
    assert set(results) == {"plain", "caa", "sae", "prompt"}
    # Texts 0 and 2 choose factor 1, at which each grade is 2. Over all four 0.5 were better.
    for name in ("caa", "sae"):
        best = results[name]
        assert best.factors == {"joy": 1.0} and best.answers == 2
        assert (best.score, best.concept, best.instruction, best.fluency) == (0.0, 2.0, 2.0, 0.0)
    half = harmonic_mean([1.0, 2.0, 2.0])
    assert half == pytest.approx(3 / (1 + 0.5 + 0.5)) and harmonic_mean([0.0, 2.0, 2.0]) == 0.0
    assert results["prompt"].score == pytest.approx(half / 2)
    assert results["prompt"].error == pytest.approx(half / 2)
    assert results["plain"].score == 0.0 and found.results[0].way == "prompt"
    assert len(found.written) == 4 * (1 + 3 + 3 + 1)
    assert repr(found).splitlines()[1].startswith("prompt  0.750 +- 0.750")
    save_comparison(found, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["results"][0]["score"] == 0.75
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_the_weakest_of_equal_factors(tmp_path: Path) -> None:
    found = compare(Echo(), [Concept("joy", [MODULE])], INSTRUCTIONS, lambda *_: (1, 1, 1))
    assert {tuple(r.factors.items()) for r in found.results} == {(("joy", 0.25),), (("joy", 1.0),)}


def test_a_system_prompt_stands_before() -> None:
    assert PROMPT.prompt("Hi") == "Be glad.\n\nHi" and MODULE.prompt("Hi") == "Hi"
    chat = ((("role", "user"), ("content", "Hi")),)
    made: Any = PROMPT.prompt(chat)
    assert [dict(message)["role"] for message in made] == ["system", "user"]
    assert last_words(made) == "Hi" and PROMPT.fields(2.0) == {}
    assert FEATURE.fields(0.5)["steering"][0]["value"] == 4.0 and FEATURE.op is not None
    assert FEATURE.op["value"] == 8.0


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "start_bench", lambda _: Echo())
    monkeypatch.setattr(command, "end_bench", lambda *_: None)
    ways = {"caa": {"module": "glad"}, "prompt": {"system": "Be glad."}}
    (tmp_path / "joy.jsonl").write_text(json.dumps({"concept": "joy", "ways": ways}))
    (tmp_path / "texts.txt").write_text("\n".join(INSTRUCTIONS))
    asked = ["bench", "model", f"--data={tmp_path}/joy.jsonl", f"--out={tmp_path}/out"]
    asked += [f"--instructions={tmp_path}/texts.txt", "--factors", "1", "2"]
    assert run(*asked, "--judge=tests.pilot.test_comparing:judge") == 0
    said = capsys.readouterr().out
    assert "joy, caa, factor 2: 4 answers" in said and "report.json, scores.png" in said
    assert [concept.name for concept in read_concepts(tmp_path / "joy.jsonl")] == ["joy"]
    assert run(*asked, "--judge=tests.pilot.test_comparing:none") == 2
    assert "judge: 'tests.pilot.test_comparing:none' is no module" in capsys.readouterr().err
