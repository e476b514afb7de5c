# SPDX-License-Identifier: Apache-2.0
"""Global tiers, positions and modules under speculation: what is generated is what a plain engine
generates, also across a change. Upstream's ngram drafter is V1 only here (test_speculation.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.models import HIDDEN
from tests.conformance.reference import Site
from tests.conformance.runner import Reference
from tests.serving.test_speculation import OTHER, PROMPT, accepted_and_rejected, start
from tests.support import serving
from tests.support.serving import Judge, capture, vector
from tests.support.timeline import Own, Timeline, Vectors

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

ROWS = capture("all")
A: Vectors = {"post_block": {1: vector(400)}}
B: Vectors = {"pre_attn": {2: vector(401)}}
MODULE: Vectors = {"post_block": {2: vector(402)}}
DECODE = {"decode_steering_vectors": {"post_attn": {1: vector(403)}}}
PLACES = [3, len(PROMPT) - 1, 26, 27, 31]
PLACED = {"steering_vectors": {"post_attn": {1: {"vector": vector(404), "positions": PLACES}}}}


def placed(length: int) -> dict[Site, torch.Tensor]:
    """What PLACED adds."""
    at = torch.tensor([p for p in PLACES if p < length])
    return {("post_attn", 1): torch.zeros(length, HIDDEN).index_fill(0, at, 1) * vector(404)}


def module(length: int) -> dict[Site, torch.Tensor]:
    """What the module adds at half its strength."""
    return {("post_block", 2): 0.5 * MODULE["post_block"][2].expand(length, HIDDEN)}


ASKS: list[tuple[list[int], dict[str, Any], Own | None]] = [
    (PROMPT, {}, None),
    (PROMPT, DECODE, None),
    (PROMPT, PLACED, placed),
    (OTHER, {"steering_modules": [("half", 0.5)]}, module),
    (PROMPT, {"steering_inherit_global": False}, None),
]


def served(line: Timeline, change_at: int | None = None) -> list[str]:
    """All of ASKS; from `change_at` tokens of the first on under A, until then under B."""
    line.set("base", B)
    line.llm.steering.register_module("half", MODULE)
    limit = {"max_tokens": 40, **ROWS}
    names = [line.add(prompt, {**fields, **limit}) for prompt, fields, _ in ASKS]
    if change_at is not None:
        line.until(names[0], change_at)
        line.set("base", A, replace=True)
    line.finish()
    return names


def test_as_without_speculation(tiny_models: TinyModels) -> None:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm, judge = start(tiny_models, enable_prefix_caching=True, max_model_len=models.MAX_LENGTH)
    try:
        line = Timeline(llm, judge)
        with serving.watching(llm) as steps:
            names = served(line)
            outputs = [line.outputs[name] for name in names]
        accepted, rejected = accepted_and_rejected(steps, outputs)
        assert accepted >= 10 and rejected >= 10, (accepted, rejected)
        constant = [line.sequence(name) for name in names]
        for name, (_, _, own) in zip(names, ASKS, strict=True):
            line.check(name, own)
        # The change falls among accepted and rejected drafts, at another position of each request.
        line = Timeline(llm, judge)
        names = served(line, change_at=12)
        ends = []
        for name, (_, _, own) in zip(names, ASKS, strict=True):
            line.check(name, own)
            ends += line.boundaries(name)[:1]
        assert len(set(ends)) > 1, "all requests were equally far: were there drafts?"
        changed = [line.sequence(name) for name in names]
        line.close()
    finally:
        shut_down(llm)

    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        max_model_len=models.MAX_LENGTH,
    )
    try:
        judge = Judge(Reference(row, models.load(row, path)))
        line = Timeline(llm, judge)
        names = served(line)
        assert [line.sequence(name) for name in names] == constant
        line.close()
        for i, (prompt, fields, own) in enumerate(ASKS):
            line = Timeline(llm, judge)
            line.set("base", B)
            name = line.add(prompt, {**fields, "max_tokens": 40, **ROWS})
            line.until(name, ends[i] - len(prompt) + 1)
            line.set("base", A, replace=True)
            line.finish()
            line.check(name, own)
            assert line.boundaries(name) == [ends[i]]
            assert line.sequence(name) == changed[i]
            line.close()
        assert sum(a != b for a, b in zip(constant, changed, strict=True)) >= 3
    finally:
        shut_down(llm)
