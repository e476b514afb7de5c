# SPDX-License-Identifier: Apache-2.0
"""A short run of `benchmarks.serve_soak`, and that it notices what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import serve_soak
from benchmarks.soak_asks import Asks
from tests.http.server import KEY, Server

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def asks(model: Path) -> Asks:
    return serve_soak.make_asks(model, 6, seed=1)


def run(server: Server, asks: Asks, root: Path, tag: str, jobs: list[serve_soak.Job]) -> list[str]:
    lines = serve_soak.soak(
        server.url, KEY, asks, root, jobs, clients=8, pid=server.process.pid, tag=tag
    )
    return list(lines)


def test_every_answer_is_its_twins(server: Server, asks: Asks, root: Path) -> None:
    jobs = serve_soak.draw_jobs(asks, 60, seed=1)
    assert {job.mode for job in jobs} == serve_soak.MODES.keys()
    report = run(server, asks, root, "soak", jobs)
    assert not report[-1], "\n".join(report)


def test_a_wrong_answer_is_noticed(server: Server, asks: Asks, root: Path) -> None:
    """The twins of two asks, which differ in their prompts only, change places."""
    number = next(n for n, ask in enumerate(asks.asks) if ask.consumers == ("inline", "filesystem"))
    twins = list(asks.twins)
    twins[number], twins[number ^ 1] = twins[number ^ 1], twins[number]
    jobs = [serve_soak.Job(n, "whole", number) for n in range(2)]
    report = "\n".join(run(server, replace(asks, twins=twins), root, "soak-wrong", jobs))
    for said in ("its twin '", "its rows differ", "disagreements"):
        assert said in report
    # In one answer: its text, its rows inline, and those of its file.
    assert report.endswith("6 disagreements")
