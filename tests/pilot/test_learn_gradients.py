# SPDX-License-Identifier: Apache-2.0
"""Attribution and highlighted tokens, against finite differences and exact patches in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.exact import in_float64
from tests.support.spelled import spell
from vllm.pilot.learn import TorchModel, attribute, highlight
from vllm.pilot.learn.highlighting import AFFIRMATION, EMBEDDING, scaled
from vllm.pilot.patching import PatchSweep

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

PROMPT, CLEAN = "abcdefgh", "abXdefgh"
ASKED: dict[str, Any] = {"answer": "Y", "other": "q"}


@pytest.fixture(scope="module")
def exact(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    folder = spell(tiny_models.path("llama"), tmp_path_factory.mktemp("gradients") / "model")
    return in_float64(TorchModel.load(str(folder)))


def rows_of(model: TorchModel, text: str, site: tuple[str, int]) -> torch.Tensor:
    kept = []

    def keep(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        kept.append(stream)
        return stream

    with torch.no_grad():
        model.log_probs([model.encode(text)], {site: keep})
    found: torch.Tensor = kept[0][0]
    return found


def patched(model: TorchModel, site: tuple[str, int], position: int, share: float = 1.0) -> float:
    """The metric where a share of the way to the clean row is gone, at one place."""
    clean = rows_of(model, CLEAN, site)

    def put(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        made = stream.clone()
        made[0, position] += share * (clean[position] - made[0, position])
        return made

    answer, other = (model.encode(text)[0] for text in ("Y", "q"))
    with torch.no_grad():
        last = model.log_probs([model.encode(PROMPT)], {site: put})[0, -1]
    return float(last[answer] - last[other])


def sweep_of(model: TorchModel, layers: list[int], share: float = 1.0) -> PatchSweep:
    """The exact sweep, in transformers, a share of the way to the clean rows."""
    values = [[patched(model, ("post_block", n), at, share) for at in range(8)] for n in layers]
    corrupt = patched(model, ("post_block", 0), 0, 0.0)
    return PatchSweep(
        metric="diff", points=["post_block"], layers=layers, positions=list(range(8)),
        tokens=None, heads=None, scales=None, values=np.array([values]), clean=None,
        corrupt=corrupt, noise_floor=None,
    )  # fmt: skip


def test_an_estimate_is_the_slope_of_a_patch(exact: TorchModel) -> None:
    found = attribute(exact, PROMPT, CLEAN, points=("pre_attn", "post_block"), **ASKED)
    assert found.values.shape == (2, 4, 8) and found.metric == "diff"
    step = 1e-4
    for point, layer, at in (("pre_attn", 1, 3), ("post_block", 2, 7), ("post_block", 0, 2)):
        ends = [patched(exact, (point, layer), at, share) for share in (step, -step)]
        slope = (ends[0] - ends[1]) / (2 * step)
        value = found.values[found.points.index(point), layer, at]
        assert value == pytest.approx(slope, rel=1e-5, abs=1e-10) and abs(value) > 1e-5
    # What is after a block is before the next one; rows before the change are the same in both.
    assert np.allclose(found.values[0, 1:], found.values[1, :-1], atol=1e-12)
    assert np.all(found.values[:, :, :2] == 0.0)
    turned = attribute(exact, CLEAN, PROMPT, **ASKED)
    assert turned.corrupt == pytest.approx(found.clean, abs=1e-9)
    assert not np.allclose(turned.values[0], found.values[1])


def test_integrated_gradients_are_complete(exact: TorchModel) -> None:
    """Over a layer's positions they sum to the difference of the prompts; one gradient does not."""
    found = attribute(exact, PROMPT, CLEAN, steps=64, **ASKED)
    whole = found.clean - found.corrupt
    assert np.allclose(found.values[0].sum(-1), whole, atol=1e-5) and abs(whole) > 1e-2
    rough = attribute(exact, PROMPT, CLEAN, steps=1, **ASKED)
    assert abs(rough.values[0].sum(-1) - whole).max() > 1e-4
    # At the last layer nothing but the last row counts: there they are the exact patch.
    last = patched(exact, ("post_block", 3), 7) - found.corrupt
    assert found.values[0, 3, 7] == pytest.approx(last, abs=1e-5)


def test_a_linear_metric_is_estimated_exactly(exact: TorchModel) -> None:
    """Without a norm before the head, log-odds are linear in the last layer's rows."""
    module: Any = exact.module
    norm, module.model.norm = module.model.norm, nn.Identity()
    try:
        found = attribute(exact, PROMPT, CLEAN, layers=[2, 3], **ASKED)
        sweep = sweep_of(exact, [2, 3])
    finally:
        module.model.norm = norm
    exactly = sweep.values - sweep.corrupt
    assert np.allclose(found.values[0, 1], exactly[0, 1], atol=1e-9)
    assert not np.allclose(found.values[0, 0], exactly[0, 0], atol=1e-3)


def test_the_correlation_with_a_sweep(exact: TorchModel, tmp_path: Path) -> None:
    found = attribute(exact, PROMPT, CLEAN, **ASKED)
    sweep = sweep_of(exact, [0, 1, 2, 3], share=1e-3)
    changes = (sweep.values - sweep.corrupt).ravel()
    want = np.corrcoef(changes, found.values.ravel())[0, 1]
    assert found.correlation(sweep) == pytest.approx(want) and want > 0.999
    whole = found.clean - found.corrupt
    shares = replace(sweep, metric="recovered", values=(sweep.values - sweep.corrupt) / whole)
    assert found.correlation(shares) == pytest.approx(want)
    turned = replace(sweep, values=sweep.values[:, :, ::-1])
    assert found.correlation(turned) < 0.5
    found.draw(tmp_path / "map.png", sweep)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_influence_is_the_gradient_at_the_embedding(exact: TorchModel, tmp_path: Path) -> None:
    """By finite differences of the embedding matrix's rows, in float64; letters occur once."""
    found = highlight(exact, "abcdefgh", share=0.3)
    module: Any = exact.module
    answer = exact.encode(AFFIRMATION, special=False)
    ids = torch.tensor([[*found.ids, *answer]])
    table = module.get_input_embeddings()(ids)

    def losses(embedded: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = module(inputs_embeds=embedded).logits.log_softmax(-1)
        return -sum(rows[:, len(found.ids) - 1 + i, token] for i, token in enumerate(answer))

    step = 1e-5
    for at in (0, 5):
        moved = torch.zeros(exact.hidden, *table.shape[1:], dtype=torch.float64)
        moved[:, at] = step * torch.eye(exact.hidden, dtype=torch.float64)
        slopes = (losses(table + moved) - losses(table - moved)) / (2 * step)
        want = float(slopes.norm())
        assert found.influence[at] == pytest.approx(want, rel=1e-5) and want > 1e-3
    assert found.counted == list(range(8)) and found.factor == 0.5
    top = sorted(range(8), key=lambda at: -found.influence[at])[:2]
    assert found.chosen == top and len(set(found.influence)) == 8
    # Soft removal is the scaled embedding.
    halved = table.clone()
    halved[0, top] *= 0.5
    plain, removed = (-float(losses(one)) for one in (table, halved))
    assert found.affirmation == pytest.approx((plain, removed), abs=1e-9)
    assert abs(found.affirmation[0] - found.affirmation[1]) > 1e-3
    found.draw(tmp_path / "tokens.png")
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")


def test_the_users_tokens_count(exact: TorchModel) -> None:
    """Of a chat, those of its last message."""
    exact.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    )
    chat = tuple(
        tuple({"role": role, "content": text}.items())
        for role, text in (("system", "Be kind."), ("user", "Say hi, hi"))
    )
    found = highlight(exact, chat, share=1.0)
    text = "<system>Be kind.<user>Say hi, hi<answer>"
    assert "".join(found.tokens) == text
    assert found.counted == list(range(text.index("Say"), text.index("<answer>")))
    assert sorted(found.chosen) == found.counted


def test_scaled_rows(exact: TorchModel) -> None:
    rows, real = torch.ones(1, 4, 3), torch.ones(1, 4, dtype=torch.bool)
    made = scaled([1, 3], 0.5)(rows, real)
    assert made[0, :, 0].tolist() == [1.0, 0.5, 1.0, 0.5] and EMBEDDING == ("pre_attn", 0)
