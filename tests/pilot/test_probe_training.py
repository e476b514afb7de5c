# SPDX-License-Identifier: Apache-2.0
"""Probes from labelled texts on a tiny model: a planted letter is found, drawn labels are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.labelled import PLANTED, planted, shuffled
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.pilot import EngineBench
from vllm.pilot.probes import (
    LabelledData,
    TrainedProbe,
    calibrate_probe,
    evaluate_probe,
    train_probe,
)
from vllm.pilot.probes.judging import judge, verdict
from vllm.pilot.probes.labelled import Labelled
from vllm.pilot.probes.reading import counted, read_entries
from vllm.v1.probes import pools

pytestmark = pytest.mark.full

SITES = [("post_block", 0), ("post_block", -1)]


@pytest.fixture(scope="module")
def trained(letters: EngineBench) -> TrainedProbe:
    return train_probe(letters, planted(100), SITES, pool=pools.Max())


def test_a_planted_letter_is_found(letters: EngineBench, trained: TrainedProbe) -> None:
    """With the twin: drawn labels are no result."""
    assert trained.held and trained.found.area.value > 0.97, trained
    assert trained.probe.sites == (("post_block", 0), ("post_block", 3))
    assert sum(map(sum, trained.counts.values())) == 200
    about = trained.probe.about
    assert about["evaluation"]["auroc"] == [*trained.found.area]
    assert about["training"]["texts"]["report"] == [*trained.counts["report"]]
    noise = train_probe(letters, shuffled(planted(100)), SITES, pool=pools.Max())
    assert not noise.held and verdict(noise.found).startswith("no better than chance: AUROC ")


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"score": "last"}, 0.75),
        ({"pool": pools.Exponential(0.5)}, 0.8),
        ({"pool": pools.Attention(), "score": "last"}, 0.97),
        ({"pool": pools.MultiMax(), "heads": 2}, 0.97),
        ({"head": "mlp", "pool": pools.Max(), "units": 8}, 0.97),
        ({"head": "mlp", "pool": pools.RollingMax(2), "activation": "gelu_tanh"}, 0.9),
    ],
    ids=lambda given: "-".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_heads_and_pools(letters: EngineBench, settings: dict[str, Any], least: float) -> None:
    """The same again gives the same numbers; another seed gives others, of what is learned."""
    made = train_probe(letters, planted(100), SITES, **settings)
    assert made.held and made.found.area.value >= least, made
    if "units" not in settings:
        return
    again, other = (
        train_probe(letters, planted(100), SITES, **settings, seed=seed) for seed in (0, 1)
    )
    assert np.array_equal(again.probe.weight, made.probe.weight)
    assert not np.array_equal(other.probe.weight, made.probe.weight)


def test_answers(letters: EngineBench) -> None:
    """Rows of completions count by themselves; of prompts, which say nothing, they tell nothing."""
    data = planted(100, answered=True)
    made = train_probe(letters, data, SITES, pool=pools.Max())
    assert made.found.over == "generated" and made.found.area.value > 0.97
    assert not train_probe(letters, data, SITES, pool=pools.Max(), over="prompt").held


def test_a_rule_says_what_was_evaluated(letters: EngineBench, trained: TrainedProbe) -> None:
    """An answer that the model writes is scored while it is written as afterwards from a file; with
    another probe the scores differ."""
    ids = letters.encode("abcdefgh")
    twin = dataclasses.replace(trained.probe, weight=trained.probe.weight + np.float32(0.01))
    rules = [
        {"name": name, "probe": probe, "threshold": 0.0}
        for name, probe in (("own", trained.probe), ("twin", twin))
    ]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, rules=rules)
    prompts = [TokensPrompt(prompt_token_ids=ids)]
    (output,) = letters.llm.generate(prompts, params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.rules is not None
    served, other = answer.rules["own"], answer.rules["twin"]
    assert served is not None and other is not None
    # The last token has no row.
    written = Labelled(ids, True, list(answer.token_ids[:-1]))
    entries = counted(letters, LabelledData([written]), "generated")
    made = judge(letters, trained.probe, entries)
    assert served.rows == 11 == entries[0].rows
    assert made["highest"][0] == pytest.approx(served.max, abs=1e-4)
    assert made["last"][0] == pytest.approx(served.last, abs=1e-4)
    assert made["highest"][0] != pytest.approx(other.max, abs=1e-3)
    # What the probe itself says of captured rows is the same.
    (rows,) = read_entries(letters, entries, trained.probe.sites, "reading")
    scores = trained.probe.scores(rows.values)
    assert float(scores.max()) == pytest.approx(served.max, abs=1e-4)


def test_spans(letters: EngineBench) -> None:
    """Rows of the marked letter alone are positive: each row is told apart, not each text."""
    data = planted(60)
    marked = [
        dataclasses.replace(
            e, spans=tuple((i, i + 1) for i, c in enumerate(str(e.prompt)) if c == PLANTED)
        )
        for e in data.entries
    ]
    spanned = dataclasses.replace(data, entries=marked)
    entries = counted(letters, spanned, "prompt")
    for one in read_entries(letters, entries, [("post_block", 0)], "reading"):
        text = str(one.counted.entry.prompt)
        assert one.positive.tolist() == [c == PLANTED for c in text]
    made = train_probe(letters, spanned, SITES, pool=pools.Each())
    assert made.found.area.value > 0.97
    with pytest.raises(ValueError, match="do not end with the text"):
        answered = Labelled("abc", True, "defZ", ((3, 4),), where="texts:1")
        list(
            read_entries(
                letters,
                counted(letters, LabelledData([answered]), "prompt"),
                [("post_block", 0)],
                "reading",
            )
        )


def test_calibration_keeps_its_rate(letters: EngineBench, trained: TrainedProbe) -> None:
    negatives = [e for e in planted(150, seed=3).entries if not e.label]
    found = calibrate_probe(letters, trained.probe, LabelledData(negatives), 0.1)
    assert found.false_rate.value == pytest.approx(0.1) and found.negatives == 150
    assert found.probe.about["calibration"]["false_positive_rate"] == [*found.false_rate]
    assert "with about" not in str(found)
    again = evaluate_probe(letters, found.probe, planted(150, seed=3))
    assert again.false_rate == found.false_rate and again.true_rate is not None
    assert again.true_rate.low > 0.8
    # The twin: a lower rate is another threshold, and of few texts it says how many it takes.
    lower = calibrate_probe(letters, trained.probe, LabelledData(negatives), 0.01)
    assert lower.probe.threshold is not None and found.probe.threshold is not None
    assert lower.probe.threshold > found.probe.threshold
    assert "with about" in str(lower)


def test_memory_is_asked_before_rows_are_read(letters: EngineBench) -> None:
    with pytest.raises(ValueError, match=r"--memory: .* rows of 192 numbers need"):
        train_probe(letters, planted(40), SITES, pool=pools.Max(), memory=1 << 20)
    # A row a text fits in as much.
    train_probe(letters, planted(40), SITES, score="last", memory=1 << 20)


def test_rows_are_those_of_the_model(letters: EngineBench) -> None:
    """Several sites stand side by side, each entry's in its order."""
    entries = counted(letters, planted(3), "prompt")
    both = list(read_entries(letters, entries, [("post_block", 2), ("pre_attn", 2)], "reading"))
    alone = list(read_entries(letters, entries[1:2], [("pre_attn", 2)], "reading"))
    assert torch.allclose(both[1].values[:, 1], alone[0].values[:, 0], atol=1e-5)
    assert not torch.allclose(both[1].values[:, 0], alone[0].values[:, 0], atol=1e-2)
