# SPDX-License-Identifier: Apache-2.0
"""docs/analyzers.md on the first layers of its model: every number of it again, from the attention
of transformers' eager attention. Each has a twin: the same of another head, document or range. On
the whole model (tier long) it finds what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.cookbook import ROOT, run
from tests.conformance.engine import shut_down
from tests.support.real import first_layers, model_folder
from vllm.pilot.attention import find_texts
from vllm.pilot.linking import link
from vllm.pilot.reranker import rank, rerank, rerank_capture
from vllm.pilot.tracker import HeadScores, attention_tracker, important_heads

pytestmark = pytest.mark.full

PAGE = ROOT / "docs" / "analyzers.md"
LAYERS, HEADS = 4, 9
EXACT = 1e-5
"""How far a weight, a share or a sum of some may be off: six times what was seen, because CPUs of
other kinds add up in another order."""
MARGIN = 100 * EXACT
"""How far twins are off at least."""


class Eager:
    """What transformers says of a prompt."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )

    def weights(self, prompt: str) -> np.ndarray:
        """float64 [layers, heads, queries, keys]."""
        with torch.no_grad():
            out = self.model(**self.tokenizer(prompt, return_tensors="pt"), output_attentions=True)
        return torch.cat(out.attentions).double().numpy()

    def hidden(self, prompt: str, layer: int) -> torch.Tensor:
        """What a block returns, [tokens, hidden]."""
        with torch.no_grad():
            out = self.model(
                **self.tokenizer(prompt, return_tensors="pt"), output_hidden_states=True
            )
        return out.hidden_states[layer + 1][0]

    def spans(self, prompt: str, texts: list[str]) -> list[list[int]]:
        """The positions of texts, by decoding the tokens one by one: the tokenizer is of bytes."""
        ends = np.cumsum(
            [len(self.tokenizer.decode([t])) for t in self.tokenizer(prompt).input_ids]
        )
        starts = np.concatenate([[0], ends[:-1]])
        found = []
        for text in texts:
            first = prompt.rindex(text)
            found.append(np.flatnonzero((starts < first + len(text)) & (ends > first)).tolist())
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("analyzers")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return first_layers(model_folder(), LAYERS, folder / "model")


@pytest.fixture(scope="module")
def made(folder: Path, model: Path) -> Iterator[dict[str, Any]]:
    """The page's variables when it is over."""
    text = PAGE.read_text()
    assert text.count("head = (18, 6)") == 1
    page = folder / "page.md"
    page.write_text(text.replace("head = (18, 6)", "head = (2, 1)"))  # of a layer that is there
    variables = run(model, folder / "out", page)
    yield variables
    shut_down(variables["llm"])


@pytest.fixture(scope="module")
def eager(model: Path) -> Eager:
    return Eager(model)


def test_every_picture_is_drawn_and_shown(made: dict[str, Any], folder: Path) -> None:
    shown = re.findall(r"!\[.+?\]\(drawings/(analyzers-[\w-]+\.png)\)", PAGE.read_text())
    assert sorted(shown) == sorted(file.name for file in (folder / "out").glob("*.png"))
    assert len(shown) == 3 == len({(folder / "out" / name).read_bytes() for name in shown})
    assert made["found"][1].num_cached_tokens >= 64  # the documents


def test_tracker_is_what_eager_attention_says(made: dict[str, Any], eager: Eager) -> None:
    for kind, data in (("normal", "plain"), ("attacked", "injected")):
        for i in (0, 13):
            first, second = made["instructions"][i], made[data][i]
            prompt = f"{first} {second}\nAnswer:"
            (of_first,), (of_second,) = (eager.spans(prompt, [text]) for text in (first, second))
            last = eager.weights(prompt)[:, :, -1]
            on, off = last[..., of_first].sum(-1), last[..., of_second].sum(-1)
            want = (on / (on + off + 1e-8)).ravel()
            found: HeadScores = made[kind][i]
            assert found.heads == [
                (layer, head) for layer in range(LAYERS) for head in range(HEADS)
            ]
            assert abs(found.values - want).max() <= EXACT
            assert found.of([[1, 2], (0, 3)]) == pytest.approx(
                want[[HEADS + 2, 3]].mean(), abs=EXACT
            )
            assert found.score == pytest.approx(want.mean(), abs=EXACT)
            # The twins: the next head, and the ranges exchanged.
            assert abs(found.values - np.roll(want, 1)).max() > MARGIN
            assert abs(found.values - (1 - want)).max() > MARGIN


def test_other_forms_of_the_tracker(made: dict[str, Any], eager: Eager) -> None:
    """From positions and whole weights, as from ranges; the maximum; not normalised."""
    prompt = f"{made['instructions'][1]} {made['plain'][1]}\nAnswer:"
    few, rest = range(2, 5), [7, 9, 10]
    asked: dict[str, Any] = {"heads": {0: "all", 2: [1, 3]}, "queries": [-2, -1]}
    ranges = {"keys": {"few": list(few), "rest": rest}, "give": ["mass", "peak"]}
    captures = {
        "inline": [{"attention": asked | {"give": ["weights"]}}, {"attention": asked | ranges}]
    }
    (output,) = made["ask"]([prompt], [captures])
    weights = eager.weights(prompt)
    for query in (-1, -2):
        w = np.stack(
            [
                weights[layer, head, query]
                for layer, head in (*((0, head) for head in range(HEADS)), (2, 1), (2, 3))
            ]
        )
        total = w[:, few].sum(-1) + w[:, rest].sum(-1)
        for reduce, on in (("sum", w[:, few].sum(-1)), ("max", w[:, few].max(-1))):
            for normalize in (True, False):
                want = on / (total + 1e-8) if normalize else on
                forms = [
                    attention_tracker(output, few, rest, consumer="inline[0]", query=query,
                                      reduce=reduce, normalize=normalize),
                    attention_tracker(output, "few", "rest", consumer="inline[1]", query=query,
                                      reduce=reduce, normalize=normalize),
                ]  # fmt: skip
                for found in forms:
                    assert found.heads[-2:] == [(2, 1), (2, 3)]
                    assert abs(found.values - want).max() <= EXACT
        of_both = attention_tracker(output, few, rest, consumer="inline[0]").values
        assert abs(of_both - w[:, few].sum(-1)).max() > MARGIN  # is not normalised


def test_important_heads_are_those_apart() -> None:
    heads = [(0, 0), (0, 1), (1, 0)]
    high = [HeadScores(heads, np.array(values)) for values in ([0.9, 0.5, 0.8], [0.7, 0.7, 0.8])]
    low = [HeadScores(heads, np.array(values)) for values in ([0.3, 0.6, 0.1], [0.1, 0.2, 0.1])]
    # Means 0.8 and 0.2, deviations 0.1 and 0.1: apart by 0.6 - 0.2 k; the third has none.
    assert important_heads(high, low, k=2.9) == [(1, 0), (0, 0)]
    assert important_heads(high, low, k=3.1) == [(1, 0)]
    assert important_heads(low, high, k=0.1) == []


def documents_of(made: dict[str, Any], eager: Eager, query: str) -> tuple[np.ndarray, list[Any]]:
    """[layers, heads, keys], the mean over the query's tokens; where the documents are."""
    prompt = made["start"] + query
    (tokens,) = eager.spans(prompt, [query])
    return eager.weights(prompt)[:, :, tokens].mean(2), eager.spans(prompt, made["documents"])


def kept(c: np.ndarray) -> np.ndarray:
    return c[c >= c.mean() - 2 * torch.from_numpy(c).std().item()]


def test_ranking_is_what_eager_attention_says(made: dict[str, Any], eager: Eager) -> None:
    ranking = made["ranking"]
    (a, spans), (b, others) = (documents_of(made, eager, made[name]) for name in ("query", "blank"))
    assert made["spans"] == spans == others
    calibrated = [(a[..., d] - b[..., e]).sum((0, 1)) for d, e in zip(spans, others, strict=True)]
    want = np.array([kept(c).sum() for c in calibrated])
    assert any(len(kept(c)) < len(c) for c in calibrated), "no token is left out: shows nothing"
    assert abs(ranking.scores - want).max() <= EXACT
    assert ranking.order == np.argsort(-want).tolist()
    for tokens, c in zip(ranking.tokens, calibrated, strict=True):
        assert abs(tokens - c).max() <= EXACT
    # The twins: not calibrated; every token; another document's.
    for wrong in (
        [a[..., d].sum() for d in spans], [c.sum() for c in calibrated], np.roll(want, 1)
    ):  # fmt: skip
        assert abs(ranking.scores - wrong).max() > MARGIN


def test_ranking_by_a_few_heads(made: dict[str, Any], eager: Eager) -> None:
    """As CoRe does; and a list of one document, of one token."""
    heads = [[0, 1], [2, 0], [2, 3]]
    texts = [made[name] for name in ("query", "blank")]
    outputs = [
        made["ask"](
            [made["start"] + text], [rerank_capture({"text": text, "which": "last"}, heads)]
        )[0]
        for text in texts
    ]
    (a, spans), (b, _) = (documents_of(made, eager, text) for text in texts)
    both: tuple[Any, Any] = tuple(made["found"])
    layers, numbers = zip(*heads, strict=True)
    a, b = a[layers, numbers].sum(0), b[layers, numbers].sum(0)
    for documents in (spans, [spans[3][:1]], [range(4, 9), [12]]):
        calibrated = [a[list(d)] - b[list(d)] for d in documents]
        want = [(kept(c) if len(c) > 1 else c).sum() for c in calibrated]
        found = rerank(outputs[0], outputs[1], documents)
        assert abs(found.scores - want).max() <= EXACT
        assert abs(found.scores - rerank(*both, documents).scores).max() > MARGIN
    same = rerank(outputs[0], outputs[0], spans)
    assert not same.scores.any() and same.order == list(range(len(spans)))


def test_which_tokens_are_left_out() -> None:
    """One token of n that is 1 lower is (n - 1) / sqrt(n) deviations of a sample below the mean:
    1.79 of 5, 2.04 of 6."""
    five, six = np.array([0.0, 0, -1, 0, 0]), np.array([0.0, -1, 0, 0, 0, 0])
    found = rank([five, six], [np.zeros(5), np.zeros(6)])
    assert found.scores.tolist() == [-1.0, 0.0] and found.order == [1, 0]


def test_links_are_what_eager_attention_says(made: dict[str, Any], eager: Eager) -> None:
    sentence, words, links = made["sentence"], made["words"], made["links"]
    spans = eager.spans(sentence, words)
    assert list(made["items"].values()) == spans
    weights, (layer, head) = eager.weights(sentence), made["head"]

    def by_hand(layer: int, head: int, temperature: float) -> dict[str, tuple[float, float]]:
        scores = np.array([weights[layer, head, -1, at].mean() for at in spans])
        powers = (scores + 1e-8) ** (1 / temperature)
        return dict(zip(words, zip(scores, powers / powers.sum(), strict=True), strict=True))

    for temperature, top_p in ((1.0, 0.8), (0.2, 0.8), (3.0, 0.5), (1.0, 1.0), (1.0, 1e-3)):
        found = link(made["looked"], made["items"], temperature=temperature, top_p=top_p)
        want = by_hand(layer, head, temperature)
        assert found.names == sorted(words, key=lambda name: -want[name][1])
        assert abs(found.scores - [want[name][0] for name in found.names]).max() <= EXACT
        assert abs(found.chances - [want[name][1] for name in found.names]).max() <= 1e-3
        together = sum(want[name][1] for name in found.chosen)
        assert together > top_p - 1e-3
        assert len(found.chosen) == 1 or together - want[found.chosen[-1]][1] < top_p + 1e-3
        assert found.chosen == found.names[: len(found.chosen)]
        other = by_hand(layer, (head + 1) % HEADS, temperature)
        assert abs(found.scores - [other[name][0] for name in found.names]).max() > MARGIN
    assert links.chosen == link(made["looked"], made["items"]).chosen


def test_reduced_rows_are_the_blocks(made: dict[str, Any], eager: Eager) -> None:
    want, reduce_rows = eager.hidden(made["sentence"], 1), made["reduce_rows"]
    other = eager.hidden(made["sentence"], 0)
    for how, of in (
        ("none", lambda rows: rows), ("mean", lambda rows: rows.mean(0)),
        ("norm", lambda rows: rows.norm(dim=-1)),
    ):  # fmt: skip
        found = reduce_rows(made["rows"], how)
        assert (found - of(want)).norm() <= 1e-4 * of(want).norm()
        assert (found - of(other)).norm() >= 0.05 * of(want).norm()
    assert reduce_rows(made["rows"].half(), "mean").dtype == torch.float16
    assert reduce_rows(made["rows"].half(), "norm").dtype == torch.float32


def test_texts_are_found_in_order(made: dict[str, Any], eager: Eager) -> None:
    prompt = "Ada ran to the sunny market. Ada ran to the sunny garden."
    ids, (one, two) = find_texts(made["tokenizer"], prompt, ["the sunny", "the sunny"])
    decoded = [made["tokenizer"].decode([ids[i] for i in part]) for part in (one, two)]
    assert decoded == [" the sunny"] * 2 and max(one) < min(two)
    assert two == eager.spans(prompt, ["the sunny"])[0]
    assert ids == made["tokenizer"](prompt).input_ids


@pytest.mark.long
def test_whole_model_finds_what_the_page_says(folder: Path) -> None:
    """On prompts that chose nothing heads see injections, and not with the two kinds exchanged."""
    whole = run(model_folder(), folder / "whole", PAGE)
    normal, attacked = whole["held_out"]
    assert whole["heads"] != [(0, 0)] and len(normal) == len(attacked) == 8
    assert float(whole["auroc"](normal, attacked)) > 0.9 > 0.1 > whole["auroc"](attacked, normal)
    ranking, links = whole["ranking"], whole["links"]
    assert ranking.order[0] == 2 and ranking.scores[2] > 1.2 * np.sort(ranking.scores)[-2]
    assert links.chosen == ["Babbage"] and links.chances[0] > 0.9
    shut_down(whole["llm"])
