# SPDX-License-Identifier: Apache-2.0
"""The demo: its grammar is what it says, its checks can fail, its model is a model, and it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import checks, corpus, mood, playground
from demo.checks import Perplexity
from demo.corpus import Mood, Passage
from demo.train import Recipe, cached_model
from tests.support import warm
from tests.support.real import model_folder
from vllm.pilot.evidence import Evidence

pytestmark = pytest.mark.full

TINY = Recipe(hidden=64, heads=2, layers=2, intermediate=64, passages=300, steps=4)


def passages(count: int = 400) -> list[Passage]:
    rng = random.Random(3)
    choices = corpus.openings("train")
    return [corpus.sample(rng.choice(choices), rng.choice(tuple(Mood)), rng) for _ in range(count)]


def reading(passage: Passage) -> mood.Reading:
    opening = passage.opening.text()
    return mood.read(opening, passage.text()[len(opening) :])


def sign(passage: Passage) -> int:
    return 1 if passage.mood is Mood.CHEERFUL else -1


def test_every_passage_is_of_the_grammar_and_mood_agrees() -> None:
    """Slots agree as often as the grammar says, and the reader sees the mood that was drawn."""
    found = [(p, reading(p)) for p in passages()]
    assert all(r.grammatical == 1.0 for _, r in found)
    assert all(len(r.slots) == len(p.mood_words) for p, r in found)
    slots = [e * sign(p) for p, r in found for e in r.slots]
    disagreeing = sum(e < 0 for e in slots) / len(slots)
    assert disagreeing == pytest.approx(corpus.SLIP, abs=0.02)
    assert sum(r.mood * sign(p) > 0 for p, r in found) >= 0.99 * len(found)


def test_speaker_and_register_agree() -> None:
    """A pronoun or a conjunction of another speaker leaves the grammar."""
    rng = random.Random(0)
    formal = next(o for o in corpus.openings("train") if o.speaker.formal)
    text = ""
    while "because" not in text:
        text = corpus.sample(formal, Mood.CHEERFUL, rng).text()
    assert mood.read("", text).grammatical == 1.0
    wrong = {"She": "He", "He": "She"}[formal.speaker.pronoun]
    assert mood.read("", text.replace(f"{formal.speaker.pronoun} ", f"{wrong} ")).grammatical < 1.0
    assert mood.read("", text.replace("because the", "as the")).grammatical < 1.0


def test_no_single_word_decides() -> None:
    """Whatever one mood-bearing slot is made to say, a passage of seven keeps its mood."""
    rng = random.Random(5)
    changed = 0
    for passage in passages(60):
        if not all(e * sign(passage) > 0 for e in reading(passage).slots):
            continue
        other = corpus.sample(passage.opening, passage.mood.other, rng)
        words = list(passage.words)
        words[passage.mood_words[0]] = other.words[other.mood_words[0]]
        before = len(passage.opening.words())
        read = mood.read(passage.opening.text(), corpus.render(tuple(words[before:])))
        assert read.grammatical == 1.0
        assert read.mood * sign(passage) > 0
        changed += min(e * sign(passage) for e in read.slots) < 0
    assert changed > 20


def test_a_word_list_cannot_tell() -> None:
    """Predicates and events are as frequent in either mood; the combination tells them apart."""
    counts: dict[Mood, Counter[str]] = {m: Counter() for m in Mood}
    for passage in passages(3000):
        counts[passage.mood].update(passage.words)
    mixed = [*corpus.PREDICATES[0], *corpus.PREDICATES[1], *corpus.WELCOME, "began", "stopped"]
    for word in mixed:
        cheerful, gloomy = (counts[m][word] for m in Mood)
        assert 0.7 < cheerful / gloomy < 1.4, word
    prompt = "At noon, Mr Stone inspected the sunny garden. He promised that the letter was"
    plain, negated = mood.read(prompt, "merry"), mood.read(prompt, "by no means merry")
    assert plain.mood > 1.0 and negated.mood < -1.0


def test_gibberish_earns_nothing() -> None:
    opening = corpus.openings("held-out")[0].text()
    assert mood.read(opening, "merry merry song delight").mood == 0.0
    half = mood.read(opening, "sunny garden delight song")
    assert half.grammatical == 0.5
    assert half.mood == pytest.approx(half.slots[0] / 2)


def test_openings_are_neutral_and_held_out() -> None:
    splits = {name: set(corpus.openings(name)) for name in ("train", "sweep", "held-out")}
    assert sum(map(len, splits.values())) == len(set.union(*splits.values()))
    for opening in splits["held-out"]:
        assert not mood.read("", opening.text()).slots
    unseen = [o.text() for o in splits["held-out"] | splits["sweep"]]
    cheerful, gloomy = corpus.contrast_prompts(64, seed=1)
    for text in [*corpus.training_text(1500, seed=0), *cheerful, *gloomy]:
        assert not any(opening in text for opening in unseen)
    assert all(a.split()[-3:] == b.split()[-3:] for a, b in zip(cheerful, gloomy, strict=True))
    with pytest.raises(ValueError, match="held-out"):
        corpus.openings("test")


def test_training_saves_a_model_anyone_can_load(tmp_path: Path) -> None:
    console = Console(quiet=True)
    path = cached_model(tmp_path, TINY, console)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = next(corpus.training_text(1, seed=9))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text) / 2
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.num_hidden_layers == 2 and model.dtype.is_floating_point
    assert model.config.eos_token_id == tokenizer.eos_token_id
    made = (path / "model.safetensors").stat().st_mtime_ns
    assert cached_model(tmp_path, TINY, console) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == made
    other = cached_model(tmp_path, dataclasses.replace(TINY, seed=1), console)
    assert [p for p in tmp_path.iterdir()] == [other] and other != path


GOOD = Evidence(
    measured=True,
    unit="",
    strength=2.0,
    error=0.1,
    randoms=[0.25],
    scales=[-1.0, 0.0, 1.0],
    effect=[-2.0, 0.0, 2.0],
    random_effects=[(-1.0, 0.2), (1.0, -0.3)],
    plain=0.1,
    cases=1,
    changed_by_zero=0,
    auroc=1.0,
    d_prime=3.0,
    answers={},
)
ORDINARY = Perplexity(1.7, 1.6, 1.5)


@pytest.mark.parametrize(
    "index, bad, perplexity",
    [
        (0, {"changed_by_zero": 1}, ORDINARY),
        (1, {"effect": [0.1, 0.0, 2.0]}, ORDINARY),
        (1, {"effect": [2.0, 0.0, -2.0]}, ORDINARY),
        (2, {"random_effects": [(-1.0, 0.9), (1.0, -0.9)]}, ORDINARY),
        (2, {"randoms": [2.5]}, ORDINARY),
        (2, {"error": 1.1}, ORDINARY),
        (3, {}, Perplexity(1.7, 9.0, 1.5)),
    ],
)
def test_each_check_can_fail(
    index: int, bad: dict[str, Any], perplexity: checks.Perplexity
) -> None:
    assert all(check.held for check in checks.examine(1.0, GOOD, ORDINARY))
    made = checks.examine(1.0, dataclasses.replace(GOOD, **bad), perplexity)
    assert [check.held for check in made] == [i != index for i in range(len(made))]


def test_neutral_text_is_a_check_of_its_own() -> None:
    worse = Perplexity(30.0, 50.0, 30.0)
    *others, last = checks.examine(1.0, GOOD, ORDINARY, worse)
    assert all(check.held for check in others) and not last.held and "neutral" in last.claim
    assert checks.examine(1.0, GOOD, ORDINARY, Perplexity(30.0, 44.0, 30.0))[-1].held


def test_the_playground_fills_the_same_fields_for_either_model() -> None:
    real, trained = playground.fields(real=True), playground.fields(real=False)
    assert real.keys() == trained.keys()
    assert all(real[name] != trained[name] for name in ("examples", "against", "trace-prompt"))


def run_demo(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = ("--quick", "--out", str(out), *arguments)
    return warm.run("demo", *given, env={**os.environ, **environment})


def test_demo_without_the_registry(tmp_path: Path) -> None:
    """All of it with fewer prompts, on the trained model (which it trains if it is not cached)."""
    empty = {"VLLM_PILOT_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    done = run_demo(tmp_path, **empty, PIP_FIND_LINKS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot be downloaded with pip" in done.stdout and "is trained here" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["model"] == "the demo's model" and numbers["head"] is None
    assert all(numbers["checks"].values()) and len(numbers["checks"]) == 4
    assert len(numbers["held_out_effect"]) == 9 and len(numbers["proof"]) == 9
    assert (tmp_path / "steering.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_demo_on_the_real_model(tmp_path: Path) -> None:
    model_folder()  # skips where it cannot be had
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["model"] == "SmolLM2-135M-Instruct"
    assert all(numbers["checks"].values()) and len(numbers["checks"]) == 5
    probed = numbers["probe"]
    assert probed["auroc"] > 0.8 > 0.7 > probed["random"]
    *_, score, share, others = numbers["head"]
    assert score > 0.5 and share > 3 * others
    for name in ("steering.png", "head.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_demo_on_a_model_of_your_own(tmp_path: Path) -> None:
    """The path of `make demo MODEL=`, on an untrained model, which need not pass the checks: the
    exit status says whether it did."""
    model = cached_model(tmp_path / "model", TINY, Console(quiet=True))
    done = run_demo(tmp_path / "out", "--model", str(model))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    numbers = json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert done.returncode == (0 if all(numbers["checks"].values()) else 1)
    assert [held for claim, held in numbers["checks"].items() if "exactly" in claim] == [True]
    assert not numbers["proof"]


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--model", str(tmp_path))
    assert done.returncode == 2 and "config.json" in done.stderr
