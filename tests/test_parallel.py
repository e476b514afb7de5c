# SPDX-License-Identifier: Apache-2.0
"""Two workers share the model: split by width (V1) or by depth (V2, which is the runner upstream
can split by depth on a CPU). The reference is Hugging Face, as for one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.engine import Runner, engine

if TYPE_CHECKING:
    from tests.conftest import TinyModels

PROMPTS = check.prompts(lengths=(17, 5))


@pytest.mark.v2
def test_two_workers_agree_with_transformers(
    tiny_models: TinyModels, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A forked worker would inherit the threads of this process, but not their locks' owners.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    path = tiny_models.path("llama")
    row = tiny_models.row("llama")
    reference = check.Reference(row, models.load(row, path))
    split: dict[str, Any] = {"enable_steering": True}
    if runner == "v1":
        split |= {"tensor_parallel_size": 2, "capture_consumers": ["inline"]}
    else:
        split |= {"pipeline_parallel_size": 2}
    with engine(path, **split) as llm:
        results = check.write_errors(llm, reference, PROMPTS)
        rows = check.read_errors(llm, reference, PROMPTS) if runner == "v1" else []
    assert not [r for r in results if r.error > check.WRITE_TOLERANCE]
    assert not [r for r in results if r.moved is not None and r.moved < check.LEAST_MOVE]
    assert not [r for r in rows if r.error > check.READ_TOLERANCE]
