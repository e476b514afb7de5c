# SPDX-License-Identifier: Apache-2.0
"""What is learned by gradients, against formulas in float64: edits, losses, and when it ends."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.exact import in_float64
from tests.support.letters import letter_pairs
from tests.support.spelled import spell
from vllm.pilot.learn import TorchModel, learn
from vllm.pilot.learn.edits import Added, Edit, LoReft, ReftR1, module_of
from vllm.pilot.learn.losses import (
    RECIPES,
    Case,
    cases_of,
    completion_nats,
    divergence,
    likelihood,
    preference,
)
from vllm.pilot.learn.pages import save_learned
from vllm.pilot.rows import Encoded

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

SITE = ("post_block", 1)
DICE = random.Random(0)
GENERATOR = torch.Generator()


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    folder = spell(tiny_models.path("llama"), tmp_path_factory.mktemp("learn") / "model")
    return TorchModel.load(str(folder))


@pytest.fixture(scope="module")
def exact(model: TorchModel) -> TorchModel:
    """The same in float64."""
    return in_float64(model)


def drawn(edit: Edit, seed: int = 0) -> Edit:
    """The edit with numbers drawn, in float64."""
    generator = torch.Generator().manual_seed(seed)
    edit = edit.double()
    with torch.no_grad():
        for number in edit.parameters():
            number.copy_(torch.randn(number.shape, generator=generator))
    return edit.eval()


def stream(model: TorchModel, tokens: int = 9) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(1)
    return torch.randn(2, tokens, model.hidden, generator=seeded, dtype=torch.float64)


def test_loreft_is_its_formula(model: TorchModel) -> None:
    edit = LoReft(model.hidden, 0.3, 3, torch.Generator().manual_seed(2))
    rows, real = stream(model), torch.ones(2, 9, dtype=torch.bool)
    assert torch.allclose(edit(rows, real), rows, atol=1e-5)
    made: Any = drawn(edit)
    start = made.start
    raw = start + made.turned / model.hidden**0.5
    r = made.matrices()[1].T
    assert torch.allclose(r @ r.T, torch.eye(3).double(), atol=1e-12)
    # R spans what the learned columns span, W and b are learned beside it.
    projected = r.T @ (r @ raw)
    assert torch.allclose(projected, raw, atol=1e-12)
    w, b = (start + made.weight / model.hidden**0.5).T, 0.3 * made.bias
    want = torch.stack([torch.stack([h + r.T @ (w @ h + b - r @ h) for h in t]) for t in rows])
    assert torch.allclose(made(rows, real), want, atol=1e-12)
    assert float((want - rows).abs().max().detach()) > 0.1


def test_reft_r1_adds_the_mean_of_the_largest_activations(model: TorchModel) -> None:
    edit: Any = drawn(ReftR1(model.hidden, 0.5, 1, GENERATOR))
    rows, real = stream(model), torch.ones(2, 9, dtype=torch.bool)
    real[1, 7:] = False
    edit.train()
    made, penalty = edit(rows, real).detach(), float(edit.penalty().detach())
    w = (edit.units / edit.units.norm()).detach()
    means, others = [], []
    for text, count in ((0, 9), (1, 7)):
        active = sorted((max(float(h @ w), 0.0) for h in rows[text, 1:count]), reverse=True)
        means.append(sum(active[:5]) / 5)
        others.append(sum(active[5:]))
        assert torch.allclose(made[text], rows[text] + means[-1] * w, atol=1e-12)
    assert penalty == pytest.approx(0.005 * sum(others) / 2 / 0.5)
    edit.eval()
    served = sum(means) / 2 * w
    assert torch.allclose(edit(rows, real), rows + served, atol=1e-12) and edit.penalty() == 0.0
    put = module_of({SITE: edit})["vectors"]["post_block"][1]
    assert torch.allclose(put.double(), served, atol=1e-6) and float(served.norm()) > 0.05
    edit.train()
    assert float(edit.seen.sum()) == 0.0


def test_nats_of_completions_in_a_batch(exact: TorchModel) -> None:
    texts = [Encoded([5, 6, 7, 8, 9], 3), Encoded([9, 3, 1], 1), Encoded([5, 6, 7, 8, 2], 3)]
    found = completion_nats(exact, texts)
    for text, nats in zip(texts, found, strict=True):
        logits = exact.module(torch.tensor([text.ids])).logits[0]
        table = logits.log_softmax(-1)
        alone = sum(float(table[i - 1, text.ids[i]]) for i in range(text.start, len(text.ids)))
        assert float(nats) == pytest.approx(alone, abs=1e-9)
    assert abs(float(found[0] - found[2])) > 1e-3


def test_the_loss_and_its_gradient(exact: TorchModel) -> None:
    """Autograd and finite differences in float64, at both points."""
    case = Case(Encoded([5, 6, 7, 8], 2), Encoded([5, 6, 1, 2], 2), (-9.0, -8.0))
    more = Case(Encoded([4, 2, 9], 1), Encoded([4, 3, 3], 1), (-11.0, -12.0))
    for site in (SITE, ("pre_attn", 2)):
        edit = drawn(Added(exact.hidden, 0.5, 1, GENERATOR))
        for loss in (likelihood, preference):
            [gradient] = torch.autograd.grad(
                loss(exact, {site: edit}, [case, more], random.Random(1)), [*edit.parameters()]
            )
            for place in (0, 17):
                values = []
                for step in (1e-5, -1e-5):
                    moved: Any = copy.deepcopy(edit)
                    with torch.no_grad():
                        moved.units[place] += step
                        made = loss(exact, {site: moved}, [case, more], random.Random(1))
                        values.append(float(made))
                slope = (values[0] - values[1]) / 2e-5
                assert float(gradient[place]) == pytest.approx(slope, rel=1e-5, abs=1e-9)
            assert float(gradient.abs().max()) > 1e-4


def test_preference_is_bipos_loss(exact: TorchModel) -> None:
    cases = cases_of(exact, letter_pairs(3), 2)
    edit: Any = drawn(Added(exact.hidden, 0.5, 1, GENERATOR))
    found = {}
    for sign in (1.0, -1.0):
        changed = copy.deepcopy(edit)
        with torch.no_grad():
            changed.units.mul_(sign)
        total = 0.0
        for case in cases:
            nats = completion_nats(exact, [case.wanted, case.other], {SITE: changed})
            ratio = float(nats[0]) - case.plain[0] - (float(nats[1]) - case.plain[1])
            total += float(torch.nn.functional.softplus(torch.tensor(-sign * 0.1 * ratio))) / 3
        dice: Any = SimpleNamespace(choice=lambda _, sign=sign: sign)
        found[sign] = float(preference(exact, {SITE: edit}, cases, dice))
        assert found[sign] == pytest.approx(total, abs=1e-6)
    assert abs(found[1.0] - found[-1.0]) > 1e-4 and edit.sign == 1.0


def test_divergence(exact: TorchModel) -> None:
    edit = drawn(Added(exact.hidden, 0.5, 1, GENERATOR))
    texts = [[5, 6, 7], [1]]
    total = 0.0
    for text in texts:
        plain, edited = exact.log_probs([text])[0], exact.log_probs([text], {SITE: edit})[0]
        total += float((plain.exp() * (plain - edited)).sum().detach())
    found = float(divergence(exact, {SITE: edit}, texts))
    assert found == pytest.approx(total / 4, abs=1e-9) and found > 1e-3
    assert float(divergence(exact, {}, texts)) == 0.0


def test_seeds_and_when_it_ends(model: TorchModel) -> None:
    asked: dict[str, Any] = {"method": "reft", "layers": [1], "epochs": 3, "rank": 2}
    said: list[str] = []
    first = learn(model, letter_pairs(), say=said.append, **asked)
    again = learn(model, letter_pairs(), **asked)
    other = learn(model, letter_pairs(), seed=1, **asked)
    assert first.losses == again.losses and len(first.losses) == 3
    assert first.losses != other.losses
    ours, others = (one.module()["ops"][0]["A"] for one in (first, again))
    assert torch.equal(ours, others) and not torch.equal(ours, other.module()["ops"][0]["A"])
    assert said[0] == "18 pairs train, 6 choose, 6 report"
    assert [line for line in said if line.startswith("pass 3: loss ")]
    # A rate at which the loss rises ends it, and what is kept is the best pass.
    asked = {"method": "gradient", "layers": [1], "rate": 8.0, "patience": 2, "kl": 0.0}
    wild = learn(model, letter_pairs(), **asked)
    choose = [loss for _, loss in wild.losses]
    assert len(choose) - 1 - choose.index(min(choose)) == 2 and len(choose) < 40
    cases = cases_of(model, letter_pairs().split()["choose"], 8)
    with torch.no_grad():
        kept = float(likelihood(model, wild.edits, cases, DICE))
    assert kept == pytest.approx(min(choose), abs=1e-4) and kept < choose[-1] - 1e-2


def test_what_says_nothing_is_no_result(model: TorchModel, tmp_path: Path) -> None:
    """Sides that were drawn: no edit prefers one of them on other prompts."""
    pairs = letter_pairs()
    rng = random.Random(5)
    both = [
        (b, a) if rng.random() < 0.5 else (a, b)
        for a, b in zip(pairs.positive, pairs.negative, strict=True)
    ]
    mixed = replace(pairs, positive=[a for a, _ in both], negative=[b for _, b in both])
    asked: dict[str, Any] = {"method": "bipo", "layers": [1], "epochs": 6}
    none, some = learn(model, mixed, **asked), learn(model, pairs, **asked)
    assert some.evidence.held and not none.evidence.held
    save_learned(none, tmp_path / "none")
    save_learned(some, tmp_path / "some")
    assert {p.name for p in (tmp_path / "none").iterdir()} == {"README.md", "report.json"}
    assert (tmp_path / "some" / "some.safetensors").is_file()
    assert "no result: no better" in (tmp_path / "none" / "README.md").read_text().replace("N", "n")


def test_methods_of_the_command_are_the_recipes() -> None:
    from vllm.entrypoints.cli.steering.learn import METHODS

    assert tuple(RECIPES) == METHODS
