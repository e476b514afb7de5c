# SPDX-License-Identifier: Apache-2.0
"""A probe that is trained and judged over a running server is that of an engine of this process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.conformance.engine import engine
from tests.http.server import NAME
from tests.support.labelled import PLANTED, planted
from vllm.pilot import EngineBench, ServerBench
from vllm.pilot.probes import calibrate_probe, evaluate_probe, train_probe
from vllm.v1.probes import pools

if TYPE_CHECKING:
    from tests.http.server import Server

pytestmark = pytest.mark.full

SITES = [("post_block", 0), ("post_block", 2)]


def test_a_server_and_an_engine_are_alike(server: Server, model: Path) -> None:
    data = planted(40)
    marked = [
        dataclasses.replace(e, spans=((str(e.prompt).index(PLANTED), len(str(e.prompt))),))
        if e.label
        else e
        for e in data.entries
    ]
    data = dataclasses.replace(data, entries=marked)
    options: dict[str, Any] = {"enable_steering": True, "capture_consumers": ["inline"]}
    over_http = ServerBench(server.url, model=NAME)
    there = train_probe(over_http, data, SITES, pool=pools.Max())
    with engine(model, skip_tokenizer_init=False, **options) as llm:
        bench = EngineBench(llm)
        here = train_probe(bench, data, SITES, pool=pools.Max())
        # The weights of one are judged by the other, and those of another penalty differ.
        twin = train_probe(bench, data, SITES, pool=pools.Max(), penalty=1e4)
        judged = evaluate_probe(bench, there.probe, data)
    assert there.probe.weight == pytest.approx(here.probe.weight, abs=1e-4)
    assert there.found.scores == pytest.approx(here.found.scores, abs=1e-3)
    assert there.found.scores != pytest.approx(twin.found.scores, abs=1e-2)
    again = evaluate_probe(over_http, there.probe, data)
    assert again.scores == pytest.approx(judged.scores, abs=1e-3)
    calibrated = calibrate_probe(over_http, there.probe, data, 0.1)
    assert calibrated.negatives == 40
    assert int((again.scores[~again.labels] > calibrated.probe.threshold).sum()) == 4
    assert np.isfinite(again.scores).all()
