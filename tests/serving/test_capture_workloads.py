# SPDX-License-Identifier: Apache-2.0
"""Random workloads on engines that make it hard: exactly the selected rows, whatever happens.

`make workloads` runs many more, from seeds that nobody chose; a failure names the engine and the
seed, and `WORKLOADS=1 WORKLOADS_FROM=seed` with `-k engine` runs that one again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import MAX_MODEL_LEN, Runner, make_llm, shut_down
from tests.conformance.runner import Reference
from tests.serving.test_async_scheduling import asynchronous, need_asynchronous
from tests.serving.test_capture_serving import add_tokenizer
from tests.serving.test_speculation import ALL_SITES, ROW_BYTES, keep_engines_startable
from tests.support import workloads
from tests.support.serving import Judge, by_threads
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

COUNT = int(os.environ.get("WORKLOADS", "6"))
"""Workloads of an engine, but for slow ones."""
FROM = int(os.environ.get("WORKLOADS_FROM", "0"))
DRAFTS = 3

TIGHT: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 24,
    "long_prefill_token_threshold": 7,
    "max_steering_configs": 3,
}
"""Chunked prompts, and requests that wait for slots."""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
DRAFT_MODEL = {
    "method": "draft_model",
    "num_speculative_tokens": DRAFTS,
    "max_model_len": MAX_MODEL_LEN,
}
ENGINES: dict[str, dict[str, Any]] = {
    "sync": TIGHT,
    "async": {**TIGHT, "stream_interval": 3},
    "ngram": {**TIGHT, "speculative_config": NGRAM},
    "draft": {**TIGHT, "speculative_config": DRAFT_MODEL},
    "async-draft": {**TIGHT, "speculative_config": DRAFT_MODEL},
}


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, and with tokens that end a sequence."""
    directory = tmp_path_factory.mktemp("llama") / "model"
    shutil.copytree(tiny_models.path("llama"), directory)
    add_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": workloads.EOS}))
    return directory


@pytest.fixture(scope="module")
def judge(tiny_models: TinyModels) -> Judge:
    row = tiny_models.row("llama")
    return Judge(Reference(row, models.load(row, tiny_models.path("llama"))))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, model: Path, runner: Runner) -> Iterator[LLM]:
    """Six usable blocks of 32, and an arena for five positions at all sites."""
    name: str = request.param
    if name == "ngram" and runner == "v2":
        pytest.skip("upstream's ngram drafter does not run under the Triton interpreter")
    keep_engines_startable()
    options = dict(ENGINES[name])
    if options.get("speculative_config") == DRAFT_MODEL:
        options["speculative_config"] = {**DRAFT_MODEL, "model": str(model)}
    with asynchronous() if name.startswith("async") else nullcontext():
        llm = make_llm(
            model,
            enable_steering=True,
            capture_consumers=["inline"],
            skip_tokenizer_init=False,
            num_gpu_blocks_override=7,
            capture_buffer_bytes=(5 * ALL_SITES + 7) * ROW_BYTES,
            **options,
        )
    if name.startswith("async"):
        need_asynchronous(llm)
    # Some copy all rows by threads, however few they are.
    with by_threads() if name.startswith("async") else nullcontext():
        yield llm
    shut_down(llm)


def test_workloads(
    engine: LLM, judge: Judge, request: pytest.FixtureRequest, runner: Runner
) -> None:
    name = request.node.callspec.params["engine"]
    counts: Counter[str] = Counter()
    slowness = (3 if "draft" in name else 1) * (4 if runner == "v2" else 1)
    for seed in range(FROM, FROM + max(COUNT // slowness, 1)):
        torch.manual_seed(seed)
        served = workloads.serve(engine, workloads.draw(seed))
        try:
            workloads.check(served, judge)
            assert served.steps.largest_row_count <= 5 * ALL_SITES + 7
        except AssertionError as error:
            raise AssertionError(f"engine {name}, {runner}, seed {seed}: {error}") from error
        counts += workloads.tally(served)
    print(f"{name}: {dict(counts)}")
