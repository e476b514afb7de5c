# SPDX-License-Identifier: Apache-2.0
"""The demo's model in an engine, and a tiny one, for what is built on engines.

vLLM is imported in the fixtures: pytest reads this file before it sets the environment up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ROOT

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from vllm.pilot import EngineBench


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's model, trained if it is not there yet."""
    from rich.console import Console

    from demo.train import Recipe, cached_model

    return cached_model(ROOT / "build" / "demo-model", Recipe(), Console(quiet=True))


@pytest.fixture(scope="package")
def bench(demo_model: Path) -> Iterator[EngineBench]:
    from tests.conformance.engine import engine
    from vllm.pilot import EngineBench

    with engine(
        demo_model,
        enable_steering=True,
        capture_consumers=["inline"],
        max_steering_configs=16,
        skip_tokenizer_init=False,
        max_model_len=128,
        max_logprobs=-1,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=64 << 20,
    ) as llm:
        yield EngineBench(llm)


@pytest.fixture(scope="package")
def letters(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineBench]:
    """A tiny random model that reads single characters."""
    from tests.conformance.engine import engine
    from tests.support.spelled import spell
    from vllm.pilot import EngineBench

    model = spell(tiny_models.path("llama"), tmp_path_factory.mktemp("letters") / "model")
    options = {"enable_steering": True, "capture_consumers": ["inline"]}
    with engine(model, skip_tokenizer_init=False, max_num_seqs=64, **options) as llm:
        yield EngineBench(llm)
