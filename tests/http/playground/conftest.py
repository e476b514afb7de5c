# SPDX-License-Identifier: Apache-2.0
"""The page and its server, client and browser.

vLLM is imported in the fixtures: pytest reads this file before it sets the environment up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.http.server import Server
    from tests.support.browser import Page
    from vllm.entrypoints.serve.steering.client import SteeringClient


@pytest.fixture(scope="package")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    from tests.http.server import save_model
    from tests.support.playground import MARKUP

    folder = save_model(tiny_models, tmp_path_factory.mktemp("playground") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([MARKUP])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def server(
    model: Path, features: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from tests.http.server import serve

    options = (
        "--playground", "--steering-train", "--capture-lens=logit",
        f"--features=made={features}@post_block.1",
        *("--steering-families", "add", "ablate", "replace", "clamp", "scale", "gate", "feature"),
        *("--steering-points", "pre_attn", "post_attn", "post_block", "z"),
        *("--capture-points", "pre_attn", "post_attn", "post_block", "q", "z"),
    )  # fmt: skip
    with serve(model, tmp_path_factory.mktemp("log") / "server.log", *options) as started:
        yield started


@pytest.fixture(scope="package")
def client(server: Server) -> Iterator[SteeringClient]:
    from tests.http.server import KEY, NAME
    from vllm.entrypoints.serve.steering.client import SteeringClient

    with SteeringClient(server.url, steering_key=KEY, model=NAME) as made:
        yield made


@pytest.fixture(scope="package")
def tab() -> Iterator[Callable[[], Page]]:
    from tests.support.browser import browser
    from tests.support.playground import PICTURES

    PICTURES.mkdir(parents=True, exist_ok=True)
    with browser() as opened:
        yield opened


@pytest.fixture
def page(tab: Callable[[], Page], server: Server) -> Iterator[Page]:
    """The page, opened; nothing goes elsewhere and nothing is thrown."""
    made = tab()
    made.view(1280)
    made.open(f"{server.url}/playground")
    yield made
    assert made.requests and all(url.startswith((server.url, "blob:")) for url in made.requests)
    assert made.problems == []
