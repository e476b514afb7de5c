# SPDX-License-Identifier: Apache-2.0
"""From pairs to a checked vector, on the demo's model: what is claimed is measured, and what is no
better than chance is no result."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import corpus
from demo.subject import grammar_mood
from vllm import SamplingParams
from vllm.pilot import (
    EngineBench,
    Odds,
    Pairs,
    Score,
    mean_centred,
    mean_difference,
    read_rows,
    rows_of,
    sweep,
    train,
)
from vllm.pilot.bench import Steering, likelihoods
from vllm.pilot.captures import row_table, save_direction
from vllm.pilot.choice import KlGuard
from vllm.pilot.fitting import find_directions
from vllm.pilot.pairs import Example, Persona, last_words
from vllm.pilot.report import need_folder, save_trained, verdict

pytestmark = pytest.mark.full

QUICK: dict[str, Any] = {"scales": (1.0, 2.0), "candidates": 2, "randoms": 3, "max_nats": 0.5}


def make_pairs(count: int = 30, prompt: bool = True) -> Pairs:
    """Cheerful and gloomy passages with the same openings, cut where the mood is to show again."""
    rng = random.Random(0)
    openings = corpus.openings("train")
    positive: list[Example] = []
    negative: list[Example] = []
    for i in range(count):
        opening, draws = openings[i], rng.random()
        for mood, examples in zip(corpus.Mood, (positive, negative), strict=True):
            passage = corpus.sample(opening, mood, random.Random(draws))
            text = corpus.render(passage.words[: passage.bridge])
            start = opening.text()
            examples.append(Example(text.removeprefix(start), start) if prompt else Example(text))
    return Pairs(positive, negative)


def shuffled(pairs: Pairs) -> Pairs:
    """The same with every label drawn."""
    rng = random.Random(5)
    swapped = [
        (b, a) if rng.random() < 0.5 else (a, b)
        for a, b in zip(pairs.positive, pairs.negative, strict=True)
    ]
    positive, negative = map(list, zip(*swapped, strict=True))
    return dataclasses.replace(pairs, positive=positive, negative=negative)


def test_a_direction_that_holds_is_a_module(bench: EngineBench, tmp_path: Path) -> None:
    said: list[str] = []
    trained = train(bench, make_pairs(), say=said.append, **QUICK)
    assert trained.held and trained.evidence.measured, verdict(trained)
    assert trained.evidence.changed_by_zero == 0 and trained.choice.layer < 4
    assert "train 18+18, choose 6+6, report 6+6 examples" in said
    folder = save_trained(trained, tmp_path / "happy", "vllm steering train")
    assert {path.name for path in folder.iterdir()} == {
        "happy.safetensors",
        "happy.gguf",
        "all_layers.safetensors",
        "README.md",
        "report.json",
        "report.html",
    }
    # It prints as a line, not as its numbers, and survives pickling.
    assert re.fullmatch(
        r"Trained\('.*', mean: post_block of layer \d, .*, held: True\)", repr(trained)
    )
    assert re.fullmatch(r"Pairs\('pairs', 30 positive, 30 negative, pairs\)", repr(trained.data))
    again = pickle.loads(pickle.dumps(trained))
    assert repr(again.sweep) == repr(trained.sweep) and again.choice == trained.choice
    assert torch.equal(
        again.module()["post_block"][again.choice.layer],
        next(iter(trained.module()["post_block"].values())),
    )
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["held"] and numbers["choice"]["layer"] == trained.choice.layer
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 1 and not re.search(r"(src|href)=.https?:", page)
    card = (folder / "README.md").read_text()
    assert "--steering-modules happy=happy.safetensors" in card
    assert "| examples | train 18 + 18, choose 6 + 6, report 6 + 6 |" in card
    assert f"\nLayer {trained.choice.layer}, scale {trained.choice.scale:g}: effect +" in card
    # What is written is what was measured, and scale 1 of it the chosen one.
    steering = bench.llm.steering
    for name, file in (("a", "happy.safetensors"), ("b", "happy.gguf")):
        steering.register_module(name, str(folder / file))
    steering.register_module("c", str(folder / "all_layers.safetensors"))
    modules = steering.modules()
    assert modules["a"]["digest"] == modules["b"]["digest"] != modules["c"]["digest"]
    say: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
    vector = trained.directions.at(trained.choice.layer)
    inline = {"vector": vector, "scale": trained.choice.scale}
    at = {"post_block": {trained.choice.layer: inline}}
    prompt = corpus.openings("held-out")[1].text()
    texts = [
        bench.llm.generate([prompt], SamplingParams(**say, **fields), use_tqdm=False)[0].outputs[0]
        for fields in ({"steering_modules": ["a"]}, {"steering_vectors": at}, {})
    ]
    assert texts[0].token_ids == texts[1].token_ids != texts[2].token_ids
    for name in "abc":
        steering.unregister_module(name)


def test_drawn_labels_are_no_result(bench: EngineBench, tmp_path: Path) -> None:
    trained = train(bench, shuffled(make_pairs()), **QUICK)
    assert not trained.held and "no result" in verdict(trained)
    folder = save_trained(trained, tmp_path / "noise")
    assert {path.name for path in folder.iterdir()} == {"README.md", "report.json", "report.html"}


@pytest.mark.parametrize("paired", [True, False])
def test_without_prompts_the_separation_counts(bench: EngineBench, paired: bool) -> None:
    pairs = dataclasses.replace(make_pairs(prompt=False), paired=paired)
    said: list[str] = []
    trained = train(bench, pairs, say=said.append, **QUICK)
    assert trained.held and not trained.evidence.measured and trained.sweep is None
    assert trained.evidence.auroc > 0.95 and any("is not measured" in line for line in said)
    if paired:
        assert not train(bench, shuffled(pairs), **QUICK).held


def test_a_guard_that_allows_nothing(bench: EngineBench) -> None:
    trained = train(bench, make_pairs(), **(QUICK | {"max_nats": -1.0}))
    assert not trained.held and "nats a token" in verdict(trained)


def test_a_score_of_what_is_written(bench: EngineBench) -> None:
    prompts = [opening.text() for opening in corpus.openings("sweep")[:16]]
    metrics = (Score(grammar_mood, prompts[:8], 24), Score(grammar_mood, prompts[8:], 24))
    trained = train(bench, make_pairs(), metrics=metrics, guard="written", **QUICK)
    assert trained.evidence.effect[-1] > 0 > trained.evidence.effect[0]
    assert set(trained.evidence.answers) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    with pytest.raises(ValueError, match="'written' needs"):
        train(bench, make_pairs(prompt=False), guard="written", **QUICK)


def test_rows_are_read_where_asked(bench: EngineBench) -> None:
    pairs = make_pairs(4)
    last, _ = read_rows(bench, pairs)
    assert torch.equal(last, read_rows(bench, pairs, read=-1)[0])
    mean, _ = read_rows(bench, pairs, [1, -1], "answer-mean")
    example, other = pairs.positive[0], pairs.negative[0]
    ids, others = (bench.encode(f"{e.prompt}{e.text}") for e in (example, other))
    start = next(i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    asked = {"inline": {"hooks": {"post_block": [1, 4]}, "positions": "all_prompt"}}
    (reply,) = bench.ask([ids], [{"max_tokens": 1, "capture": asked}])
    rows = reply.rows["post_block", 1]
    assert torch.allclose(mean[0, 0], rows[start:].mean(0), atol=1e-5)
    assert torch.allclose(last[0, 1], rows[-1], atol=1e-5)
    assert not torch.allclose(mean[0, 0], rows.mean(0), atol=1e-2)
    assert torch.equal(last, read_rows(bench, pairs, read="answer-last")[0])
    tail, _ = read_rows(bench, pairs, [1], {"start": -3})
    assert torch.allclose(tail[0, 0], rows[-3:].mean(0), atol=1e-5)
    assert not torch.allclose(tail[0, 0], rows[-2:].mean(0), atol=1e-2)


def test_rows_of_texts_are_those_of_pairs(bench: EngineBench) -> None:
    """In a list of any length the same rows, and none of an empty list."""
    texts = [f"The {word} is here" for word in ("cat", "dog", "tree")]
    last, others = read_rows(bench, Pairs.of(texts[:2], texts[1:]), [1, 3])
    found = rows_of(bench, texts, [1, 3])
    torch.testing.assert_close(found, torch.cat([last, others[1:]]), atol=1e-5, rtol=1e-5)
    assert (found[0] - found[1]).norm() > 0.1
    assert torch.equal(rows_of(bench, texts[0], 1), rows_of(bench, texts[:1], [1]))
    assert rows_of(bench, [], "all").shape == (0, len(bench.layers), bench.hidden)
    with pytest.raises(ValueError, match=r"^texts\[1\]: the text has no tokens"):
        rows_of(bench, ["a", ""])


def test_a_background_is_read_as_the_classes_are(bench: EngineBench) -> None:
    pairs, others = make_pairs(8), make_pairs(12, prompt=False).negative[8:]
    texts = [example.text for example in others]
    found = find_directions(bench, pairs, [1, 3], "mean-centred", "last", "post_block", texts)
    p, n = read_rows(bench, pairs, [1, 3])
    b, _ = read_rows(bench, Pairs.of(texts, ["."] * len(texts)), [1, 3])
    assert torch.allclose(found.vectors, mean_centred(p, n, b), atol=1e-5)
    assert not torch.allclose(found.vectors, mean_difference(p, n), atol=0.05)


def test_a_chat_begins_once(
    bench: EngineBench, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a template has the token of beginning, the tokenizer does not add a second."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    mark = bench.encode("The")[0]
    word = tokenizer.convert_ids_to_tokens(mark)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{word} $A", special_tokens=[(word, mark)]
    )
    tokenizer.bos_token = word
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}"
    )
    monkeypatch.setattr(bench, "tokenizer", tokenizer)
    said = ((("role", "user"), ("content", "garden")),)
    assert bench.encode("garden").count(mark) == 1 == bench.encode(said).count(mark)
    assert bench.encode(said)[0] == mark


def test_rows_as_one_array(bench: EngineBench, tmp_path: Path) -> None:
    """With prompts, positions and tokens beside it, of outputs that have different numbers."""
    prompts = [opening.text() for opening in corpus.openings("sweep")[:3]]
    asked = {"hooks": {"post_block": [3, 1]}, "positions": "all_prompt"}
    params = SamplingParams(max_tokens=1, n=2, seed=0, capture={"inline": asked})
    outputs = bench.llm.generate(prompts, params, use_tqdm=False)
    tokenizer = bench.llm.get_tokenizer()
    table = row_table(outputs, layers=[3, 1], decode=lambda token: tokenizer.decode([token]))
    lengths = [len(output.prompt_token_ids or ()) for output in outputs for _ in range(2)]
    assert table.values.shape == (sum(lengths), 2, bench.hidden) and len(set(lengths)) > 1
    at = 0
    for i, length in enumerate(lengths):
        rows = slice(at, at + length)
        output = outputs[i // 2]
        assert (table.output[rows] == i).all() and set(table.prompts[rows]) == {prompts[i // 2]}
        assert table.token_ids[rows].tolist() == output.prompt_token_ids
        assert table.positions[rows].tolist() == list(range(length))
        results = output.outputs[i % 2].capture_results
        assert results is not None
        for column, layer in enumerate((3, 1)):
            want = results["inline"].payload["post_block", layer].numpy()
            assert np.array_equal(table.values[rows, column], want)
        assert not np.array_equal(table.values[rows, 0], table.values[rows, 1])
        at += length
    assert "".join(table.tokens[: lengths[0]]).strip() == prompts[0]
    every = row_table(outputs)
    assert every.layers == [1, 3] and np.array_equal(every.values[:, ::-1], table.values)
    assert every.tokens[0] == str(every.token_ids[0])
    assert (
        repr(table) == f"RowTable([{sum(lengths)}, 2, {bench.hidden}] of 6 outputs, layers [3, 1])"
    )
    plain = bench.llm.generate(prompts[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    for wrong, said in ((plain, "has no rows at post_block"), ([], "there are none")):
        with pytest.raises(ValueError, match=said):
            row_table(wrong)
    with pytest.raises(ValueError, match="has no rows at post_block"):
        save_direction(tmp_path / "a.safetensors", plain, plain)
    params = SamplingParams(max_tokens=1, capture={"inline": asked})
    same = bench.llm.generate(prompts, params, use_tqdm=False)
    with pytest.raises(ValueError, match="do not differ"):
        save_direction(tmp_path / "a.safetensors", same, same)
    assert not (tmp_path / "a.safetensors").exists()


def test_few_layers_at_a_time_are_the_same(bench: EngineBench) -> None:
    pairs, layers = make_pairs(8), [0, 1, 2, 3, 4]
    p, n = read_rows(bench, pairs)
    found = find_directions(bench, pairs, layers, "mean", "last", "post_block")
    assert torch.allclose(found.vectors, mean_difference(p, n), atol=1e-6)
    assert float(found.projection(p[:, 2], 2).mean()) == pytest.approx(1, abs=1e-4)
    whole = find_directions(bench, pairs, layers, "pca", "last", "post_block")
    rows = 16 * bench.hidden * 4
    lots = find_directions(bench, pairs, layers, "pca", "last", "post_block", memory=7 * rows)
    assert torch.allclose(whole.vectors, lots.vectors, atol=1e-5)
    with pytest.raises(ValueError, match="--memory: 16 rows of one layer"):
        find_directions(bench, pairs, layers, "pca", "last", "post_block", memory=rows)
    with pytest.raises(ValueError, match="'pca' needs pairs"):
        loose = dataclasses.replace(pairs, paired=False)
        find_directions(bench, loose, layers, "pca", "last", "post_block")


def test_odds_are_transformers(bench: EngineBench, demo_model: Path) -> None:
    pairs = make_pairs(2)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    want = []
    for ours, others in zip(pairs.positive, pairs.negative, strict=True):
        sums = []
        for example in (ours, others):
            start = len(bench.encode(example.prompt))
            text = bench.encode(example.text, special=False)
            ids = torch.tensor([[*bench.encode(example.prompt), *text]])
            with torch.inference_mode():
                table = model(ids).logits[0].log_softmax(-1)
            sums.append(
                float(table[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]].sum())
            )
        want.append(sums[0] - sums[1])
    got = Odds(pairs)(bench, [None]).values[0]
    assert np.allclose(got, want, atol=1e-3)


def test_a_sweep_and_its_picture(bench: EngineBench, tmp_path: Path) -> None:
    pairs = make_pairs(4)
    vectors = mean_difference(*read_rows(bench.llm, pairs))
    swept = sweep(bench.llm, vectors, [2, 3], [-2, 0, 2], Odds(pairs))
    assert swept.effect.shape == (2, 3) and (swept.values[:, 1] == 0).all()
    assert (swept.effect[:, 2] > swept.effect[:, 0] + 1).all() and (swept.effect[:, 0] < 0).all()
    assert "Sweep of post_block" in repr(swept)
    swept.draw(tmp_path / "a.png")
    swept.draw(tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    named = sweep(bench, {2: vectors[2]}, [2], [2], Odds(pairs))
    assert named.effect[0, 0] == pytest.approx(swept.effect[0, 2])


@pytest.fixture
def chat(bench: EngineBench, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template for the model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    monkeypatch.setattr(bench, "tokenizer", tokenizer)


def test_a_persona_writes_its_own_pairs(bench: EngineBench, chat: None) -> None:
    questions = tuple(opening.text() for opening in corpus.openings("sweep")[:12])
    persona = Persona("All was song and delight.", "All was tears and regret.", questions)
    pairs = Pairs([], [], read="answer-mean", persona=persona)
    trained = train(bench, pairs, **QUICK)
    assert trained.evidence.measured and trained.settings.read == "answer-mean"
    # How likely an answer is, is asked without the system prompt that made the model write it.
    first = trained.data.positive[0]
    assert last_words(first.asked) in questions
    assert [dict(m)["role"] for m in first.prompt] == ["system", "user"]  # type: ignore[arg-type]
    assert [dict(m)["role"] for m in first.asked] == ["user"]  # type: ignore[arg-type]
    assert trained.data.positive[0].text != trained.data.negative[0].text


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda b: train(b, make_pairs(2)), "split 'report' has no positive"),
        (lambda b: train(b, make_pairs(), scales=[0.0]), "scales: positive numbers"),
        (lambda b: train(b, make_pairs(), layers=[9]), "layers: 9 has no post_block"),
        (lambda b: train(b, make_pairs(), point="post_norm"), "the model has no 'post_norm'"),
        (lambda b: train(b, make_pairs(), method="mean-centred"), "--background"),
        (lambda b: Odds(make_pairs(prompt=False)), "pairs with a prompt are needed"),
        (lambda b: Score(grammar_mood, []), "prompts are needed"),
        (lambda b: sweep(b, {}, [1], [1.0], Odds(make_pairs(2))), "none for layer 1"),
        (lambda b: sweep(b, torch.ones(2, 8), [1], [1.0], Odds(make_pairs(2))), "2 of them for 5"),
        (lambda b: sweep(b, {1: torch.ones(8)}, [1], [1.0], Odds(make_pairs(2))), "has 128 values"),
        (lambda b: sweep(b, {}, "all", [], Odds(make_pairs(2))), "scales: none"),
    ],
)
def test_what_cannot_be_done(
    bench: EngineBench, call: Callable[[EngineBench], object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        call(bench)


def test_the_folder_is_seen_to_before_the_work(tmp_path: Path) -> None:
    assert need_folder(tmp_path / "new" / "one").is_dir()
    (tmp_path / "new" / "one" / "file").touch()
    with pytest.raises(ValueError, match="there is something in it"):
        need_folder(tmp_path / "new" / "one")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        need_folder(tmp_path / "file")


def test_the_guard_bounds_the_divergence_from_below(bench: EngineBench) -> None:
    """On texts that others wrote, against the sum over all tokens; how much likelier these texts
    are to the plain model is something else."""
    rng = random.Random(3)
    passages = [
        corpus.sample(o, corpus.Mood.CHEERFUL, rng) for o in corpus.openings("held-out")[:5]
    ]
    texts = [(bench.encode(corpus.render(p.words)), 1) for p in passages]
    pairs = make_pairs()
    found = find_directions(bench, pairs, [2], "mean", "last", "post_block")
    steerings = [Steering(2, found.vectors[0], scale) for scale in (-2.0, 0.5, 1.0, 2.0)]
    plain, *steered = likelihoods(bench, texts, [None, *steerings], others=-1)
    exact = [
        float(
            np.mean(
                [
                    np.exp(np.array([*p.values()])) @ [p[token] - q[token] for token in p]
                    for a, b in zip(plain, of, strict=True)
                    for p, q in zip(a, b, strict=True)
                ]
            )
        )
        for of in steered
    ]
    bounds = KlGuard(bench, texts, own=False)(steerings)
    likelier = KlGuard(bench, texts, own=True)(steerings)
    for whole, bound, other in zip(exact, bounds, likelier, strict=True):
        assert whole > 0.0001 and 0.9 * whole <= bound <= whole * (1 + 1e-5)
        assert not 0.9 * whole <= other <= whole * (1 + 1e-5)
