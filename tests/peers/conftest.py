# SPDX-License-Identifier: Apache-2.0
"""A server with the doors of other tools open.

vLLM is imported in the fixture: pytest reads this file before it sets the environment up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.http.server import Server


@pytest.fixture(scope="package")
def server(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.http.server import NAME, save_model, serve

    options = (
        "--compat", "lens", "easysteer", "hotwire", "interp-engine",
        "--capture-points", "pre_attn", "post_attn", "post_block", "q", "k", "z",
        "--dtype=float32", "--enforce-eager", "--max-model-len=96", "--max-num-seqs=8",
        "--block-size=32", "--kv-cache-memory-bytes=16777216", "--seed=0",
        f"--served-model-name={NAME}", "--generation-config=vllm",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("peers")
    with serve(save_model(tiny_models, folder / "model"), folder / "log", base=options) as started:
        yield started
