# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares. `pytest` runs V1; `pytest --runner v2` runs the tests marked `v2`
again under vLLM's V2 model runner, which needs a process of its own (conformance/engine.py says
why). So do those whose models read images, marked `pictures`: they want torchvision
(support/vision.py), and run with `pytest --pictures`, alone.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests import ROOT
from tests.conformance.engine import Runner, prepare_environment, start_cheaply
from tests.support.vision import add_torchvision

if TYPE_CHECKING:
    from tests.conformance.models import TinyModel

TIERS = {
    "quick": "make test: without an engine, or one file of an area",
    "full": "make test-full runs these too",
    "long": "minutes each: make test-long runs these alone",
    "gpu": "on a GPU host: pytest -m gpu runs these alone",
}
"""Every test module is marked with one of these; a test may be marked with another."""

_CACHE = ROOT / "build" / "tiny-models"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--runner`, `--device` and `--tier`."""
    parser.addoption(
        "--runner", choices=("v1", "v2"), default="v1", help="the vLLM model runner under test"
    )
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what engines run on, one process"
    )
    parser.addoption(
        "--tier", choices=TIERS, default="full", help="which tests; full: quick ones, too"
    )

    parser.addoption("--pictures", action="store_true", help="the tests with images, and no other")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports vLLM."""
    config.addinivalue_line(
        "markers", "v2: also run with --runner v2; v2(tier): in that tier there"
    )
    config.addinivalue_line("markers", "pictures: needs torchvision: run with --pictures")
    for tier, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")
    if config.option.markexpr == "gpu":
        config.option.tier = "gpu"
    if config.option.tier == "gpu":
        return  # scripts in processes of their own, which set themselves up
    prepare_environment(config.getoption("--runner"), config.getoption("--device"))
    if config.getoption("--pictures"):
        try:
            add_torchvision()
        except FileNotFoundError as error:
            raise pytest.UsageError(f"--pictures: {error}") from error
    # Wall-clock limits say nothing on a machine that does other work, too.
    # In CI the examples are the same each time: it says whether this change broke something.
    hypothesis.settings.register_profile(
        "shared",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )
    hypothesis.settings.load_profile("shared")
    if "CI" in os.environ:
        # pytest would write the whole of each failed comparison there: minutes for two long lists
        # that a test wants to differ. An empty value is none for it.
        os.environ["CI"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier; under V2 those of them that are marked for it."""
    pictures = config.getoption("--pictures")
    v2, asked = config.getoption("--runner") == "v2", config.getoption("--tier")
    tiers = {"quick", "full"} if asked == "full" else {asked}

    def chosen(item: pytest.Item) -> bool:
        if pictures != (item.get_closest_marker("pictures") is not None):
            return False
        marker = item.get_closest_marker("v2")
        if v2 and marker is None:
            return False
        return (marker.args[0] if v2 and marker and marker.args else tier_of(item)) in tiers

    chosen_items = [item for item in items if chosen(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen_items)])
    items[:] = chosen_items


def pytest_collection_finish() -> None:
    """Modules of tests have imported most of what engines need."""
    if "vllm" in sys.modules:
        start_cheaply()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in which files most of the time goes; `--durations` says in which tests."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) < 60:
        return
    terminalreporter.section(f"{sum(seconds.values()):.0f} s, by file")
    for path, each in sorted(seconds.items(), key=lambda item: -item[1])[:60]:
        terminalreporter.write_line(f"{each:6.0f} s {path}")


def tier_of(item: pytest.Item) -> str:
    """The tier that a test, or else its module, is marked with.

    Raises:
        pytest.UsageError: the module is marked with none.
    """
    module = item.getparent(pytest.Module)
    if module is None or not any(mark.name in TIERS for mark in module.own_markers):
        raise pytest.UsageError(
            f"{item.location[0]} is in no tier: put `pytestmark = pytest.mark.quick` below its "
            f"imports, or `full` if it starts engines ({', '.join(TIERS)}: see tests/conftest.py)"
        )
    return next(mark.name for mark in item.iter_markers() if mark.name in TIERS)


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
