# SPDX-License-Identifier: Apache-2.0
"""Capture with a KV connector: tokens whose rows are wanted are computed and not loaded, request by
request. Upstream's ExampleConnector, which keeps prompts in files; offloading needs a GPU and is in
tests/gpu/offload.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch as safetensors

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import READ_TOLERANCE, Reference
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, worst_row
from vllm import LLM
from vllm.config import KVTransferConfig

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = prompt_of(75, 80)
STORED = 64
"""Tokens of it that are in whole blocks of 32."""


@dataclass(frozen=True)
class Pair:
    """An engine whose connector has `PROMPT`, and the model in transformers."""

    llm: LLM
    judge: Judge
    files: list[Path]

    def serve(self, *selectors: Any) -> list[tuple[int, Any]]:
        """Tokens that were loaded, and the output, of requests for rows at positions."""
        asks = [Ask(PROMPT, capture(selector, ("post_block",))) for selector in selectors]
        return [(o.num_cached_tokens, o) for o in serve(self.llm, asks)]


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    store = tmp_path_factory.mktemp("blocks")
    llm = make_llm(
        path,
        capture_consumers=["inline"],
        enable_prefix_caching=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(store)},
        ),
    )
    (first,) = serve(llm, [Ask(PROMPT)])
    assert first.num_cached_tokens == 0
    files = sorted(store.rglob("*.safetensors"))
    assert len(files) == 4, "one for each layer"
    yield Pair(llm, Judge(Reference(row, models.load(row, path))), files)
    shut_down(llm)


WANTED: list[tuple[Any, int]] = [
    ("last_prompt", STORED),
    ("all_generated", STORED),
    ({"start": STORED, "stop": 75}, STORED),
    ([STORED - 1], 0),
    ("all_prompt", 0),
    ([0, 74], 0),
]
"""Positions, and how many tokens are loaded."""


def test_wanted_rows_are_computed(pair: Pair) -> None:
    """In one batch; what is loaded and what is computed gives the model's rows."""
    selectors = [selector for selector, _ in WANTED]
    for (selector, loaded), (cached, output) in zip(WANTED, pair.serve(*selectors), strict=True):
        assert cached == loaded, selector
        pair.judge.check(Ask(PROMPT, capture(selector, ("post_block",))), output)


def test_loaded_tokens_are_told_from_computed_ones(pair: Pair) -> None:
    """The twin: with other numbers in the files, whoever loads has other rows, and only they."""
    whole = {file: safetensors.load_file(file) for file in pair.files}
    for file, tensors in whole.items():
        safetensors.save_file({name: -2.0 * t for name, t in tensors.items()}, file)
    try:
        outputs = pair.serve("last_prompt", "all_prompt")
    finally:
        for file, tensors in whole.items():
            safetensors.save_file(tensors, file)
    reference = pair.judge.reference.run(PROMPT).rows
    for (cached, output), loaded in zip(outputs, (STORED, 0), strict=True):
        assert cached == loaded
        rows = output.outputs[0].capture_results["inline"].payload["post_block", 3]
        error = worst_row(rows.values[-1:], reference["post_block", 3][-1:])
        assert error > 0.05 if loaded else error <= READ_TOLERANCE
