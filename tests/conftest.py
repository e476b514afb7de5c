# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares. `pytest` runs V1; `pytest --runner v2` runs the tests marked `v2`
again under vLLM's V2 model runner, which needs a process of its own (conformance/engine.py says
why).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests import ROOT
from tests.conformance.engine import Runner, prepare_environment

if TYPE_CHECKING:
    from tests.conformance.models import TinyModel

_CACHE = ROOT / "build" / "tiny-models"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--runner` and `--long`."""
    parser.addoption(
        "--runner", choices=("v1", "v2"), default="v1", help="the vLLM model runner under test"
    )
    parser.addoption("--long", action="store_true", help="run the tests marked `long` instead")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports vLLM."""
    config.addinivalue_line("markers", "v2: also run with --runner v2")
    config.addinivalue_line("markers", "long: minutes; run with --long only (make test-long)")
    prepare_environment(config.getoption("--runner"))
    # Wall-clock limits say nothing on a machine that does other work, too.
    # In CI the examples are the same each time: it says whether this change broke something.
    hypothesis.settings.register_profile(
        "shared",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )
    hypothesis.settings.load_profile("shared")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under V2 keep the tests marked for it; keep those marked `long`, or all others."""
    v2, long = config.getoption("--runner") == "v2", config.getoption("--long")

    def chosen(item: pytest.Item) -> bool:
        if (item.get_closest_marker("long") is not None) != long:
            return False
        return not v2 or item.get_closest_marker("v2") is not None

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config) -> Runner:
    """Which model runner this process tests."""
    value: Runner = pytestconfig.getoption("--runner")
    return value


class TinyModels:
    """Paths of tiny random models, made once and kept in build/tiny-models."""

    def path(self, name: str) -> Path:
        """The saved model of a row of `tests.conformance.models`, e.g. "llama"."""
        from tests.conformance import models

        return models.save(self.row(name), _CACHE)

    def row(self, name: str) -> TinyModel:
        """That row."""
        from tests.conformance import models

        return models.MODELS[name]


@pytest.fixture(scope="session")
def tiny_models() -> TinyModels:
    """`tiny_models.path("llama")` is a model directory for `LLM(model=...)`."""
    return TinyModels()
