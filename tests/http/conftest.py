# SPDX-License-Identifier: Apache-2.0
"""The server, its client and the reference.

vLLM is imported in the fixtures: pytest reads this file before it sets the environment up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.http.checks import Reference
    from tests.http.server import Server
    from vllm.entrypoints.serve.steering.client import SteeringClient


@pytest.fixture(scope="package")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.http.server import save_model

    return save_model(tiny_models, tmp_path_factory.mktemp("http") / "model")


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's filesystem consumer writes."""
    return tmp_path_factory.mktemp("acts")


@pytest.fixture(scope="package")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JumpReLU autoencoder of SAELens, made up."""
    from tests.support.autoencoders import save_autoencoder

    return save_autoencoder(tmp_path_factory.mktemp("saes") / "made")


@pytest.fixture(scope="package")
def options(root: Path, features: Path) -> tuple[str, ...]:
    """Of the server, beside those of `tests.http.server`."""
    from tests.http.server import SECRET

    secrets = {"storage_options": {"secret": SECRET}}
    writer = json.dumps({"name": "filesystem", "root": str(root), **secrets})
    return (
        "--enable-log-requests",
        "--playground",
        "--default-steering-modules=house",
        f"--capture-consumers={writer}",
        *("--capture-points", "pre_attn", "post_attn", "post_block", "q", "z", "final"),
        *("--steering-points", "pre_attn", "z", "post_attn", "post_block"),
        *("--steering-families", "add", "ablate", "replace", "clamp", "scale", "gate", "focus"),
        f"--features=made={features}@post_block.1",
        f"--features-root={features.parent}",
        "--capture-lens=logit",
        "--enable-auto-tool-choice",
        "--tool-call-parser=pythonic",
    )


@pytest.fixture(scope="package")
def server(
    model: Path, options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from tests.http.server import serve

    log = tmp_path_factory.mktemp("http-log") / "server.log"
    with serve(model, log, *options, cold=True) as started:  # as users start it
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[SteeringClient]:
    """Leaves no global steering behind."""
    from tests.http.server import KEY, NAME
    from vllm.entrypoints.serve.steering.client import SteeringClient

    with SteeringClient(server.url, steering_key=KEY, model=NAME) as made:
        yield made
        made.clear()
        made.set_rules([])
        for name in made.modules():
            made.unregister_module(name)


@pytest.fixture(scope="package")
def reference(model: Path) -> Reference:
    from tests.http.checks import Reference

    return Reference(model)
