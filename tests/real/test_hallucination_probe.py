# SPDX-License-Identifier: Apache-2.0
"""`examples/hallucination_probe.py` on SmolLM2: eight channels tell false answers from true ones
about facts that they were not chosen on, drawn ones and words alone do not, and a rule flags."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from examples import hallucination_probe
from examples.hallucination_probe import FOLDS, LAYERS, NODES
from tests.support.real import model_folder
from vllm.v1.probes.files import load_probe

pytestmark = pytest.mark.long


def test_each_word_is_as_often_true_as_false() -> None:
    said = hallucination_probe.statements()
    for fold in range(FOLDS):
        of_fold = [one for one in said if one.fold == fold]
        words = {
            side: Counter((one.relation, one.answer) for one in of_fold if one.false is side)
            for side in (True, False)
        }
        assert words[True] == words[False] and max(words[True].values()) == 1
    assert len({(one.prompt, one.answer) for one in said}) == len(said)


def test_nodes_tell_false_answers(tmp_path: Path) -> None:
    model = str(model_folder())
    found = hallucination_probe.make(model, tmp_path)
    assert found["all channels"].min() > 0.95
    assert found["nodes"].min() > 0.9
    # What they must differ from: channels that are drawn, the word by itself, other relations.
    assert found["as many drawn"].max() < 0.9
    assert 0.4 < found["all of layer 0"].mean() < 0.6
    assert found["all, other relations"].min() > 0.9 > found["nodes, other relations"].mean()
    (rule,) = hallucination_probe.rules()["rules"]
    probe = load_probe(tmp_path / rule["probe"]["file"])
    assert probe.sites == tuple(("post_block", layer) for layer in LAYERS)
    assert (probe.weight != 0).sum() == NODES

    judged = hallucination_probe.serve(model, tmp_path)
    assert json.loads((tmp_path / "rules.json").read_text()) == hallucination_probe.rules()
    flagged = {side: [was for right, was in judged if right is side] for side in (True, False)}
    assert all(len(of_side) >= 5 for of_side in flagged.values())
    assert sum(flagged[False]) / len(flagged[False]) > 0.6
    assert sum(flagged[True]) / len(flagged[True]) < 0.3
