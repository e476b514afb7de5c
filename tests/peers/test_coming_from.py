# SPDX-License-Identifier: Apache-2.0
"""docs/coming-from.md: every line that says "exact" is run here, against transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import ROOT
from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE
from tests.peers.calls import CALLS, FILED, GENERATED, LAYER, PROMPT, Call, V
from tests.support.serving import relative
from vllm import LLM, SamplingParams
from vllm.config.steering import FAMILIES
from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\| (.+?) \| .* \| \*\*exact\*\*.* \|$", re.MULTILINE)

Pair = tuple[LLM, Any]


def exact_lines(page: str) -> list[tuple[str, str]]:
    """(section, first cell) of the lines that say that they are exact."""
    return [(name, cell) for name, body in _SECTION.findall(page) for cell in _LINE.findall(body)]


@pytest.mark.quick
def test_each_line_that_says_exact_is_run() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    assert exact_lines(page) == list(CALLS)
    assert page.count("**exact**") == len(CALLS) + 1  # and what the word means
    assert exact_lines("## A\n\n| `x` | `y` | **exact** |\n| `z` | `y` | differs |\n") == [
        ("A", "`x`")
    ]


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path = tiny_models.path("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        steering_families=[family for family in FAMILIES if family != "focus"],
        capture_consumers=["inline"],
        enable_prefix_caching=False,
    )
    llm.steering.register_module("happy", {"post_block": {LAYER: V}})
    file = tmp_path_factory.mktemp("modules") / "filed.json"
    file.write_text(json.dumps(FILED))
    llm.steering.register_module("filed", str(file))
    yield llm, models.load(tiny_models.row("llama"), path).double()
    shut_down(llm)


def streams(model: Any, token_ids: list[int], call: Call) -> dict[tuple[str, int], torch.Tensor]:
    """(point, layer) -> float64 [n, hidden] of transformers, with what the call does."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    handles = []

    def taken(layer: int) -> Any:
        def before(module: Any, args: Any, kwargs: Any) -> None:
            found["pre_attn", layer] = (args[0] if args else kwargs["hidden_states"])[0]

        return before

    def edited(layer: int) -> Any:
        def after(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if layer in call.does:
                hidden = call.does[layer](hidden[0])[None]
            found["post_block", layer] = hidden[0]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return after

    for layer, block in enumerate(model.model.layers):
        handles.append(block.register_forward_pre_hook(taken(layer), with_kwargs=True))
        handles.append(block.register_forward_hook(edited(layer)))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("line", CALLS, ids=lambda line: f"{line[0]}: {line[1]}"[:60])
def test_exact(pair: Pair, line: tuple[str, str]) -> None:
    llm, model = pair
    for call in CALLS[line]:
        asked = {"hooks": {call.point: call.layers}, "positions": call.positions}
        params = SamplingParams(
            temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False,
            capture={"inline": asked}, **call.ours,
        )  # fmt: skip
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params, use_tqdm=False)
        assert output.capture_results is not None
        result = output.capture_results["inline"]
        assert result.status == "ok"
        token_ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
        want, plain = streams(model, token_ids, call), streams(model, token_ids, Call())
        part = call.reads(len(token_ids))
        tolerance = READ_TOLERANCE + (WRITE_TOLERANCE if call.does else 0)
        for site, rows in result.payload.items():
            assert rows.positions.tolist() == list(range(len(token_ids)))[part]
            assert relative(rows.values, want[site][part].float()) <= tolerance
            shifted = want[site].roll(1, 0)[part].float()
            assert relative(rows.values, shifted) >= LEAST_MOVE  # the twin of what is read
        if call.does:  # the twin: the same rows without it
            site = ("post_block", max(call.does))
            moved = relative(result.payload[site].values, plain[site].float())
            assert moved >= LEAST_MOVE
