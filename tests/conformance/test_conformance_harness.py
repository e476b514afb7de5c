# SPDX-License-Identifier: Apache-2.0
"""The comparison itself: a faithful engine passes, and each known way to be wrong is caught.

The engine here is the reference model behind the interface of `LLM.generate`, with a fault that a
real implementation could have.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patches.taps.table import ROWS
from tests import ROOT
from tests.conformance import models, selection
from tests.conformance import runner as check
from tests.conformance.cases import TIERS, SteeringCase
from tests.conformance.proof import load_results
from tests.conformance.reference import Forward, Site
from vllm import SamplingParams

pytestmark = pytest.mark.quick

PROMPTS = check.prompts(lengths=(17, 5))


class ReferenceEngine:
    """Answers like our engine, computed by the reference, with one named fault or none."""

    def __init__(self, reference: check.Reference, fault: str = "") -> None:
        self.reference = reference
        self.fault = fault

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[Any]:
        pairs = zip(prompts, sampling_params, strict=True)
        return [self._answer(prompt["prompt_token_ids"], params) for prompt, params in pairs]

    def _answer(self, prompt: list[int], params: SamplingParams) -> Any:
        token_ids = list(prompt)
        for _ in range(params.max_tokens or 0):
            forward = self._forward(token_ids, len(prompt), params)
            token_ids.append(int(forward.logits[-1].argmax()))
        fed = token_ids[:-1]
        table = [
            {i: SimpleNamespace(logprob=value) for i, value in enumerate(row.tolist())}
            for row in forward.logits.log_softmax(-1)
        ]
        split = len(prompt) - 1
        payload = {
            site: SimpleNamespace(
                positions=torch.arange(len(fed)),
                token_ids=torch.tensor(fed),
                values=self._rows(forward, site),
            )
            for site in forward.rows
        }
        return SimpleNamespace(
            prompt_token_ids=list(prompt),
            prompt_logprobs=[None, *table[:split]],
            outputs=[SimpleNamespace(token_ids=token_ids[len(prompt) :], logprobs=table[split:])],
            capture_results={"inline": SimpleNamespace(status="ok", error=None, payload=payload)},
        )

    def _forward(self, token_ids: list[int], num_prompt: int, params: SamplingParams) -> Forward:
        vectors: dict[tuple[str, Site], torch.Tensor] = {}
        for phase, field in TIERS.items():
            for point, by_layer in (getattr(params, field) or {}).items():
                for layer, entry in by_layer.items():
                    seen = "all" if self.fault == "phase ignored" else phase
                    vectors[seen, self._site(point, layer)] = self._vector(entry)
        deltas = SteeringCase("", 0, "", vectors).deltas(len(token_ids), num_prompt)
        return self.reference.run(token_ids, deltas)

    def _vector(self, entry: torch.Tensor | dict[str, Any]) -> torch.Tensor:
        if isinstance(entry, torch.Tensor):
            return entry
        vector: torch.Tensor = entry["vector"]
        return vector if self.fault == "scale ignored" else entry["scale"] * vector

    def _site(self, point: str, layer: int) -> Site:
        if self.fault == "post_attn acts as post_block" and point == "post_attn":
            return "post_block", layer
        if self.fault == "pre_attn misses attention" and point == "pre_attn":
            return "post_attn", layer
        if self.fault == "layer off by one":
            return point, (layer + 1) % models.LAYERS
        return point, layer

    def _rows(self, forward: Forward, site: Site) -> torch.Tensor:
        rows = forward.rows[site]
        if self.fault == "branch without residual" and site[0] == "post_attn":
            return rows - forward.rows[("pre_attn", site[1])]
        if self.fault == "one row broadcast":
            return rows[-1].expand_as(rows)
        return rows


@pytest.fixture(scope="module")
def reference() -> Iterator[check.Reference]:
    row = models.MODELS["llama"]
    yield check.Reference(row, models.build(row))


def test_faithful_engine_passes(reference: check.Reference) -> None:
    engine = ReferenceEngine(reference)
    results = check.plain_errors(engine, reference, PROMPTS)
    results += check.read_errors(engine, reference, PROMPTS)
    results += check.write_errors(engine, reference, PROMPTS)
    results += check.steered_read_errors(engine, reference, PROMPTS)
    assert {r.check for r in results} == {"plain", "read", "write", "steered read"}
    assert all(r.error < 1e-5 for r in results)
    assert all(r.moved > check.LEAST_MOVE for r in results if r.moved is not None)


@pytest.mark.parametrize("fault", ["branch without residual", "one row broadcast"])
def test_wrong_reads_are_caught(reference: check.Reference, fault: str) -> None:
    results = check.read_errors(ReferenceEngine(reference, fault), reference, PROMPTS)
    assert max(r.error for r in results) > 100 * check.READ_TOLERANCE


@pytest.mark.parametrize(
    "fault",
    [
        "post_attn acts as post_block",
        "pre_attn misses attention",
        "layer off by one",
        "phase ignored",
        "scale ignored",
    ],
)
def test_wrong_writes_are_caught(reference: check.Reference, fault: str) -> None:
    results = check.write_errors(ReferenceEngine(reference, fault), reference, PROMPTS)
    assert max(r.error for r in results) > 10 * check.WRITE_TOLERANCE


def test_sources_are_the_same_until_their_code_changes(tmp_path: Path) -> None:
    for folder in selection.FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "upstream.toml", tmp_path)
    (tmp_path / selection.POINTS).parent.mkdir()
    shutil.copy(ROOT / selection.POINTS, tmp_path / selection.POINTS)

    def digest() -> str:
        return selection.sources_digest.__wrapped__(tmp_path)

    assert digest() == selection.sources_digest()
    rows = tmp_path / "patches/taps/rows.py"
    rows.rename(rows.with_name("other.py"))
    tests = tmp_path / "tests/conformance/test_conformance.py"
    tests.write_text("")
    taps = tmp_path / "vllm/model_executor/layers/residual_taps.py"
    text = taps.read_text()
    taps.write_text(f"import os\n# A comment.\n{text}")
    assert digest() == selection.sources_digest()
    changed = set()
    for file in (taps, tmp_path / "patches/taps/fused.py", tmp_path / "tests/conformance/tiny.py"):
        file.write_text(f"{file.read_text()}\nx = 1\n")
        changed.add(digest())
    pin = tmp_path / "upstream.toml"
    pin.write_text(pin.read_text() + "# another\n")
    changed.add(digest())
    assert len(changed - {selection.sources_digest()}) == 4


def test_an_architecture_is_left_out_while_its_result_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for a result of older sources, of another runner, or out of tolerance."""
    where = "cpu v1 float32"
    [old] = [r for r in load_results() if (r.name, r.where) == ("solar", where)]
    new = replace(old, sources=selection.sources_digest())

    def is_measured(result: Any, runner: Any = "v1") -> bool:
        monkeypatch.setattr(selection, "load_results", lambda: [result])
        return selection.is_measured("solar", runner)

    assert is_measured(new)
    assert not is_measured(new, "v2")
    assert not is_measured(replace(new, sources="older"))
    assert not is_measured(replace(new, sources=""))
    assert not is_measured(replace(new, plain=1.0))


def test_each_idiom_runs_always() -> None:
    """Every idiom that one of the chosen has."""
    idiom = {row.key: row.idiom for row in ROWS}
    idioms = {
        r.name: {idiom[cls] for cls in r.classes}
        for r in load_results()
        if r.name in selection.CHOSEN and r.where == "cpu v1 float32"
    }
    assert idioms.keys() == set(selection.CHOSEN)
    always = set().union(*(idioms[name] for name in selection.ALWAYS["v1"]))
    assert always == set().union(*idioms.values())
    assert not {*selection.ALWAYS["v2"], *selection.V2_MODELS} - set(selection.CHOSEN)
