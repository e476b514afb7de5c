# SPDX-License-Identifier: Apache-2.0
"""Every error of docs/errors.md is raised here, and every error raised here is in docs/errors.md.

A case says what is asked and what the message must name: the path of the field, what was given and
what is allowed, where the page has a place for them.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.errors.analyzers import ANALYZERS
from tests.errors.attention import ATTENTION
from tests.errors.case import Case
from tests.errors.consumers import CONSUMERS
from tests.errors.converting import CONVERTING
from tests.errors.datasets import DATASETS
from tests.errors.early_stop import EARLY_STOP
from tests.errors.easysteer import EASYSTEER
from tests.errors.features import FEATURES
from tests.errors.files import FILES
from tests.errors.filesystem import FILESYSTEM
from tests.errors.focus import FOCUS
from tests.errors.http import HTTP
from tests.errors.kept_rows import KEPT_ROWS
from tests.errors.learning import LEARNING
from tests.errors.lens import LENS
from tests.errors.lenses import LENSES
from tests.errors.page import MESSAGES, PATTERNS
from tests.errors.peer_specs import HOTWIRE, INTERP
from tests.errors.probes import PROBES
from tests.errors.project import PROJECT
from tests.errors.requests import REQUESTS
from tests.errors.rules import RULES
from tests.errors.running import RUNNING
from tests.errors.steering import STEERING
from tests.errors.steering_calls import STEERING_CALLS
from tests.errors.sweeps import SWEEPS
from tests.errors.toolkit import TOOLKIT
from tests.errors.trainings import TRAININGS
from tests.interventions.frontend.test_results import captured, completion, output
from tests.support.collecting import chunk, collect, collector_for, plan_for
from tests.support.plans import GAPS, HIDDEN, SHAPE, config_of
from tests.support.rows import give
from vllm import SamplingParams
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.config.capture import CaptureConfig
from vllm.config.intervention_refusals import refuse_connector
from vllm.config.points import CAPTURE_POINTS
from vllm.config.steering import SteeringConfig
from vllm.model_executor.layers.residual_taps import UnboundTaps
from vllm.v1.capture import AttentionRows, stack
from vllm.v1.interventions.frontend.results.collector import RowCollector
from vllm.v1.interventions.makings import Attention
from vllm.v1.interventions.scheduler.request import RequestInterventions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.startup import start_taps
from vllm.v1.interventions.worker.check.taps import check_sites
from vllm.v1.interventions.worker.layers import find_layers, num_lanes, refuse_layers
from vllm.v1.interventions.worker.runner import WorkerInterventions
from vllm.v1.interventions.worker.variants.graphs import refuse_late_breaks

pytestmark = pytest.mark.quick


def executor_of(num_layers: int, shapes: list[TapShape | None]) -> Any:
    """An executor whose workers report `shapes` of a model with `num_layers` decoder layers."""
    model_config = SimpleNamespace(get_total_num_hidden_layers=lambda: num_layers)
    return SimpleNamespace(
        collective_rpc=lambda check: shapes,
        vllm_config=SimpleNamespace(model_config=model_config),
    )


def break_late() -> None:
    """Breakable CUDA graphs on in this process, which imported attention without."""
    records = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        refuse_late_breaks(SimpleNamespace(compilation_config=records))  # type: ignore[arg-type]


class Wired(nn.Module):
    """A decoder layer whose own forward has taps."""

    taps = UnboundTaps("pre_attn")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not called."""
        return x


class Overriding(Wired):
    """One that inherits the taps but not the calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not called."""
        return x


class Laned(nn.Module):
    """Has a stream of several lanes."""

    taps = UnboundTaps("pre_attn", "post_block", lanes="count")


class Refused(nn.Module):
    """A layer of a class that cannot have taps."""

    taps = UnboundTaps(refused="it has two streams")


class Stacks(nn.Module):
    """Two stacks of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Wired()])
        self.others = nn.ModuleList([Wired()])


class Silent:
    """A worker's taps of which none acts, as `check_sites` sees them."""

    shape = SHAPE
    sites = (("pre_attn", 0),)
    table = None
    capture = SimpleNamespace(arena=torch.zeros(1, HIDDEN), sites=sites, most_rows=1)

    def captures(self, site: Any) -> bool:
        return True

    def capturing(self, rows: Any, size: int) -> Any:
        """The poison stays in the arena."""
        self.capture.arena.fill_(float("nan"))
        return nullcontext()

    def capture_final(self, hidden_states: torch.Tensor) -> None:
        """Its site is another."""


def collector(positions: Any, *rows: int) -> RowCollector:
    made = collector_for(plan_for(positions))
    give(made, chunk(list(rows)))
    return made


def raw_params() -> SamplingParams:
    return SamplingParams(steering_vectors={})


_NONE = np.empty(0, np.int64)
NO_WEIGHTS = AttentionRows(
    _NONE, _NONE, torch.empty(0, 5), _NONE, Attention(("weights",), (), (), 0, "", 5), heads=(0,)
)

OTHERS = [
    *HTTP,
    Case({}, do=lambda: RequestInterventions(None, 5, raw_params())),
    # Start-up; the refused combinations are in tests/config/test_refusals.py.
    Case(
        {"given": "['mlp']", "allowed": "['pre_attn', 'z', 'post_attn', 'mlp_in', 'post_block']"},
        do=lambda: SteeringConfig(steering_points=["mlp", "pre_attn"]),
    ),
    Case(
        {"given": "['mlp']", "allowed": str(list(CAPTURE_POINTS))},
        do=lambda: CaptureConfig(capture_points=["mlp", "pre_attn"]),
    ),
    Case(
        {
            "given": "['twist']",
            "allowed": "['add', 'norm_match', 'ablate', 'clamp', 'pin', "
            "'replace', 'normalize', 'swap', 'feature', 'low_rank', 'scale', 'focus', "
            "'reconstruct', 'gate', 'all']",
        },
        do=lambda: SteeringConfig(steering_families=["add", "twist"]),
    ),
    Case({}, do=lambda: SteeringConfig(steering_modules=["a=b"])),
    Case(
        {"given": "Linear"},
        do=lambda: WorkerInterventions(config_of(), torch.device("cpu")).bind(nn.Linear(1, 1)),
    ),
    Case(
        {"path": "layers.0", "given": "Overriding"},
        do=lambda: find_layers(nn.ModuleDict({"layers": nn.ModuleList([Overriding()])})),
    ),
    Case(
        {"given": "Refused", "reason": "it has two streams"},
        do=lambda: refuse_layers({0: Refused()}, torch.bfloat16),
    ),
    Case(
        {"given": "compat", "allowed": "Laned"},
        do=lambda: num_lanes({0: Laned()}, config_of(compat=["easysteer"])),
    ),
    Case(
        {"given": "[1, 3, 4]"},
        do=lambda: start_taps(executor_of(num_layers=6, shapes=[None, GAPS])),
    ),
    Case({"given": "0", "path": "others.0"}, do=lambda: find_layers(Stacks())),
    Case({}, do=lambda: break_late()),
    Case(
        {"given": "[('pre_attn', 0)]"},
        do=lambda: check_sites(Silent(), lambda draw: [torch.zeros(2, HIDDEN)]),  # type: ignore[arg-type]
    ),
    # Results.
    Case({"given": "'mass'", "allowed": "weights"}, do=lambda: NO_WEIGHTS.mass),
    Case({"given": "9"}, do=lambda: NO_WEIGHTS.at(9)),
    Case({"rows": "6", "given": "6"}, do=lambda: collect(collector([2, 6], 2), 2)),
    Case(
        {"missing": "3", "rows": "5", "given": "2"},
        do=lambda: collect(collector("all_prompt", 0, 1), 0, end="abort"),
    ),
    Case(
        {"missing": "2", "rows": "5", "given": "3"},
        do=lambda: collect(collector("all_prompt", 0, 1, 2), 1),
    ),
    Case({"given": "2"}, do=lambda: output(completion(0), completion(1)).capture_results),
    Case(
        {"given": "9", "allowed": "[2 3 4]"},
        do=lambda: captured(0).capture_results["inline"].payload["post_block", 0].at(9),  # type: ignore[index]
    ),
    Case({}, do=lambda: stack([], "post_block", [0])),
    Case({"output": "0"}, do=lambda: stack([captured(0)], "post_block", [])),
    Case(
        {"output": "1", "rows": "2", "given": "3"},
        do=lambda: stack([captured(0), captured(0, number=2)], "post_block", position=None),
    ),
    Case(
        {"output": "0", "given": "lost"},
        do=lambda: stack([captured(0, "error", "lost")], "post_block", [0]),
    ),
    Case(
        {"output": "0", "point": "pre_attn", "given": "0"},
        do=lambda: stack([captured(0)], "pre_attn", [0]),
    ),
    Case({"rows": "3", "given": "-4"}, do=lambda: stack([captured(0)], "post_block", [0], -4)),
    Case({"output": "0", "given": "1"}, do=lambda: stack([captured(0)], "post_block", [0], 1)),
]

CASES = REQUESTS + ATTENTION + OTHERS + STEERING + STEERING_CALLS + FILES + CONSUMERS + PROJECT
CASES += FEATURES + LEARNING + PROBES + EARLY_STOP + KEPT_ROWS + RUNNING
CASES += FILESYSTEM + LENS + TOOLKIT + FOCUS + LENSES + DATASETS + SWEEPS + EASYSTEER + ANALYZERS
CASES += TRAININGS
CASES += RULES + CONVERTING + HOTWIRE + INTERP


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.says)[:70])
def test_error(case: Case) -> None:
    message = case.message()
    found = {row: match for row, p in PATTERNS.items() if (match := p.fullmatch(message))}
    assert len(found) == 1, f"{message!r} is described by {list(found)}"
    [match] = found.values()
    said = match.groupdict()
    # What was probably meant stands in brackets (test_mistakes.py), as some of what is given does.
    bare = {**said, "given": re.sub(r" \(.*\)$", "", said.get("given", ""), flags=re.DOTALL)}
    assert case.says.items() <= said.items() or case.says.items() <= bare.items()
    assert len(message) < 450


def refused_connector() -> str:
    """Of an engine with steering: the message."""
    config: Any = SimpleNamespace(
        steering_config=SteeringConfig(enable_steering=True),
        capture_config=CaptureConfig(),
        kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
    )
    with pytest.raises(ValueError, match="KV connector") as raised:
        refuse_connector(config)
    return str(raised.value)


def test_every_documented_error_is_raised_here() -> None:
    raised = [case.message() for case in CASES]
    raised.append(
        "steering cannot be combined with pooling models: rows would be incomplete or in the "
        "wrong place. Turn one of them off."
    )  # by tests/config/test_refusals.py, which raises the next, too
    raised.append(refused_connector())
    missing = [row for row, p in PATTERNS.items() if not any(p.fullmatch(m) for m in raised)]
    assert missing == []
    assert len(set(MESSAGES)) == len(MESSAGES) > 90
