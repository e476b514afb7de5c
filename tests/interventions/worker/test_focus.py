# SPDX-License-Identifier: Apache-2.0
"""Focused attention of pages, without an engine: torch's and the kernel's beside float64, with all
that a layer may do to its products."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.interventions.focus import FACTOR, RATIO, SHARE, FocusOp
from vllm.v1.interventions.messages import WorkerRequest
from vllm.v1.interventions.worker.attention import formula as focused_weights
from vllm.v1.interventions.worker.attention import keys as layer_reader
from vllm.v1.interventions.worker.attention.pages import Pages, Sight
from vllm.v1.interventions.worker.focus import kernel as focus_kernel
from vllm.v1.interventions.worker.focus import table as focus_table
from vllm.v1.interventions.worker.focus.kernel import Workspace
from vllm.v1.interventions.worker.focus.table import FocusedAttention, FocusTable
from vllm.v1.interventions.worker.token_map import TokenMap

pytestmark = [pytest.mark.quick, pytest.mark.v2]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
LAYER = 2
HEADS, BLOCK = 6, 8
PLAIN = Sight(0.3, 0.0, 0, 0, None, None)
SLOPES, SINKS = torch.linspace(0.05, 0.4, HEADS), torch.linspace(-1.0, 2.0, HEADS)
SIGHTS = {
    "plain": (PLAIN, 2, 8, 8),
    "cap": (PLAIN._replace(cap=0.5), 6, 16, 16),
    "window": (PLAIN._replace(window=6), 1, 24, 24),
    "chunk": (PLAIN._replace(chunk=8), 2, 8, 8),
    "slopes": (PLAIN._replace(slopes=SLOPES), 3, 8, 5),
    "sinks": (PLAIN._replace(sinks=SINKS), 2, 8, 8),
    "all": (Sight(0.3, 0.7, 9, 16, SLOPES, SINKS), 2, 32, 20),
}
"""Name -> what a layer does, its key heads, D and E."""

OPS = [
    FocusOp(FACTOR, 8.0, {LAYER: ()}, [2, 5, 9, 11]),
    FocusOp(FACTOR, 0.0, {LAYER: (1, 4)}, [20, 60]),
    FocusOp(FACTOR, 0.001, {LAYER: (0, 1, 2)}, [0, 1, 6, 7]),
    FocusOp(SHARE, 0.7, {LAYER: ()}, [3, 6]),
    FocusOp(RATIO, 0.6, {LAYER: (0, 5)}, [3, 6, 30, 99]),
    FocusOp(FACTOR, 0.0, {LAYER: ()}, [0, 99]),
    FocusOp(FACTOR, 1e30, {LAYER: ()}, [4, 5]),
    FocusOp(FACTOR, 50.0, {LAYER + 1: ()}, [4, 5]),
    FocusOp(FACTOR, 3.0, {LAYER: ()}, [0, 99]),
]
PROGRAMS = [[0, 1, 2], [3], [4], [5], [6], [7], [0, 7], [8]]
PLACED = [(row, [OPS[i] for i in acting]) for row, acting in enumerate(PROGRAMS, 1)]
LENGTHS = [23, 70, 41, 9]
"""Of four requests."""
NEW = [1, 1, 38, 9]
"""Tokens of each in the step, the last ones."""
FIRSTS = [[0], [0], [0, 20, 30, 36], [0, 4, 7]]
USED = [(1,), (2,), (5, 4, 3, 7), (0, 6, 8)]
"""The programs of each, of its segments; 0 for none, 1 the first of PROGRAMS."""


def table() -> FocusTable:
    """A table whose rows 1.. are PROGRAMS, one after the other."""
    made = FocusTable({LAYER: HEADS}, len(PROGRAMS) + 2, CPU)
    made.write(PLACED)
    return made


def test_each_rank_has_its_heads() -> None:
    """Of a layer whose heads two ranks share: each has its part of what one would have."""
    whole = table().at[LAYER]
    parts = []
    for rank in range(2):
        part = FocusTable({LAYER: HEADS // 2}, len(PROGRAMS) + 2, CPU, rank)
        part.write(PLACED)
        parts.append(part.at[LAYER])
        assert torch.equal(parts[rank].forms, whole.forms)
        assert torch.equal(parts[rank].runs, whole.runs)
    assert torch.equal(torch.cat([part.numbers for part in parts], 1), whole.numbers)
    assert not torch.equal(parts[0].numbers, parts[1].numbers)


def mapped() -> tuple[TokenMap, int]:
    """The step's tokens."""
    names = [str(i) for i in range(len(LENGTHS))]
    tokens = TokenMap(64, CPU)
    told = {}
    for name, firsts, used in zip(names, FIRSTS, USED, strict=True):
        zeros = np.zeros(len(firsts), np.int32)
        told[name] = WorkerRequest(np.array(firsts), zeros, zeros, focus=used)
    tokens.update(set(), told)
    at = [p for n, new in zip(LENGTHS, NEW, strict=True) for p in range(n - new, n)]
    tokens.map(names, np.array(NEW), torch.tensor(at))
    return tokens, sum(NEW)


class Case:
    """A layer with pages, queries, and what attention gave without focus."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sight, self.key_heads, self.width, width_v = SIGHTS[name]
        generator = torch.Generator().manual_seed(1)
        both = self.width + width_v
        pages = torch.randn(60, self.key_heads, BLOCK, both, generator=generator)
        self.pages = Pages(pages[..., : self.width], pages[..., self.width :])
        self.block_table = torch.randperm(60, generator=generator)[:48].view(4, 12).int()
        # What lies behind a request's last token may be anything.
        for row, length in zip(self.block_table, LENGTHS, strict=True):
            pages[row[length // BLOCK].long(), :, length % BLOCK :] = float("nan")
        self.tokens, number = mapped()
        self.query = torch.randn(number, HEADS, self.width, generator=generator)
        self.before = torch.randn(number, HEADS, width_v, generator=generator)
        self.table = table()
        for module in (layer_reader, focus_table):
            monkeypatch.setattr(module, "pages_of", lambda module: self.pages)
            monkeypatch.setattr(module, "sight_of", lambda module: self.sight)
        monkeypatch.setattr(focus_table, "unreadable", lambda module: "")
        self.module: Any = SimpleNamespace(
            head_size=self.width, num_heads=HEADS, num_kv_heads=self.key_heads
        )

    def attention(self, workspace: Workspace | None = None) -> FocusedAttention:
        at = self.table.at[LAYER]
        return FocusedAttention(self.module, self.block_table, self.tokens, at, workspace)

    def want(self, wrong: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows in float64, and bool [n, heads] which are others; with factors and shares times
        `wrong`."""
        out = self.before.double().clone()
        changed = torch.zeros(out.shape[:2], dtype=torch.bool)
        for token, i, t in self._asked():
            segment = sum(first <= t for first in FIRSTS[i]) - 1
            program = USED[i][segment]
            ops = [OPS[n] for n in (PROGRAMS[program - 1] if program else [])]
            for head in range(HEADS):
                acting = [
                    op for op in ops
                    if LAYER in op.heads and head in (op.heads[LAYER] or range(HEADS))
                ]  # fmt: skip
                made = self._row(token, i, t, head, acting, wrong)
                if made is not None:
                    out[token, head], changed[token, head] = made, True
        return out, changed

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows without focus, and the logs of their sums, [heads, n]."""
        out, sums = torch.zeros_like(self.before), torch.zeros(HEADS, len(self.before))
        for token, i, t in self._asked():
            for head in range(HEADS):
                weight, values, sink, _ = self._seen(token, i, t, head)
                total = weight.sum() + sink
                out[token, head] = (weight[:, None] * values).sum(0) / total
                sums[head, token] = total.log()
        return out, sums

    @staticmethod
    def _asked() -> Iterator[tuple[int, int, int]]:
        """Each token's place in the step, its request, and its position."""
        token = 0
        for i, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
            for t in range(length - new, length):
                yield token, i, t
                token += 1

    def _seen(
        self, token: int, i: int, t: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor, float, list[int]]:
        """Weights before they are normalised, values, the sink's weight, and which keys."""
        rows = [(self.block_table[i, p // BLOCK].long(), p % BLOCK) for p in range(t + 1)]
        q, sight, key_head = self.query[token, head], self.sight, head * self.key_heads // HEADS
        logits, values, keys = [], [], []
        for j in range(t + 1):
            if sight.window and j <= t - sight.window:
                continue
            if sight.chunk and j // sight.chunk != t // sight.chunk:
                continue
            block, at = rows[j]
            s = sight.scale * float(q.double() @ self.pages.keys[block, key_head, at].double())
            s = sight.cap * math.tanh(s / sight.cap) if sight.cap else s
            s += float(sight.slopes[head]) * (j - t) if sight.slopes is not None else 0.0
            logits.append(s)
            values.append(self.pages.values[block, key_head, at].double())
            keys.append(j)
        weight = torch.tensor(logits, dtype=torch.float64).exp()
        sink = math.exp(float(sight.sinks[head])) if sight.sinks is not None else 0.0
        return weight, torch.stack(values), sink, keys

    def _row(
        self, token: int, i: int, t: int, head: int, ops: Any, wrong: float
    ) -> torch.Tensor | None:
        weight, values, sink, keys = self._seen(token, i, t, head)
        runs = [list(zip(op.runs[::2], op.runs[1::2], strict=True)) for op in ops]
        spans = [[any(a <= j < b for a, b in spanned) for spanned in runs] for j in keys]
        inside = torch.tensor(spans, dtype=torch.bool).reshape(len(keys), -1)
        if not ops or not inside.any():
            return None
        if inside.all(dim=0).any() and not sink:
            return None
        w = torch.ones(len(keys), dtype=torch.float64)
        for i, op in enumerate(ops):
            factor = op.number * wrong
            if op.rule != FACTOR:
                mass = float(weight[inside[:, i]].sum() / (weight.sum() + sink))
                a = op.number * wrong
                factor = a * (1 - mass) / (mass * (1 - a)) if op.rule == SHARE else a / mass
                if factor <= 1:
                    return None
            w[inside[:, i]] *= factor
        weight = weight * w
        return (weight[:, None] * values).sum(0) / (weight.sum() + sink)


@pytest.mark.parametrize(
    "name",
    # Interpreted, each takes a minute and more. tests/serving/test_focus.py has a plain one, too.
    [pytest.param(n, marks=[] if n == "all" else pytest.mark.v2("long")) for n in SIGHTS],
)
def test_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch and, where Triton is interpreted, in the kernel; rows that are not written keep
    their bits."""
    case = Case(name, monkeypatch)
    want, changed = case.want()
    made = case.before.clone()
    case.attention().attend(case.query, made)
    compare(case, made, want, changed)
    if not INTERPRETED:
        return
    for tokens in (4, 512):
        monkeypatch.setattr(focus_kernel, "TOKENS", tokens)
        made = case.before.clone()
        case.attention(Workspace.of(HEADS, want.shape[2], CPU)).attend(case.query, made)
        compare(case, made, want, changed)
    # With the rows and sums of attention, as FlashAttention gives them: what only gains is made
    # from these and the span, by one program, or by two where the span is long.
    case.before, lse = case.plain()
    for tokens, alone in ((4, 0), (512, 4)):
        monkeypatch.setattr(focus_kernel, "TOKENS", tokens)
        monkeypatch.setattr(focus_kernel, "ALONE", alone)
        made = case.before.clone()
        workspace = Workspace.of(HEADS, want.shape[2], CPU)
        case.attention(workspace).attend(case.query, made, lse)
        compare(case, made, want, changed)


def test_runs_are_looked_up_once_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch, of each program; and weights are made of the heads that it changes alone."""
    case = Case("plain", monkeypatch)
    looked_up: list[int] = []
    made_of: list[int] = []
    searchsorted, apply = torch.searchsorted, focused_weights.Focus.apply

    def counted(sorted_: torch.Tensor, values: torch.Tensor, **how: Any) -> torch.Tensor:
        looked_up.append(values.numel())
        return searchsorted(sorted_, values, **how)

    def applied(self: Any, logits: torch.Tensor, *more: Any) -> torch.Tensor:
        made_of.append(logits.shape[1])
        return apply(self, logits, *more)

    monkeypatch.setattr(torch, "searchsorted", counted)
    monkeypatch.setattr(focused_weights.Focus, "apply", applied)
    case.attention().attend(case.query, case.before.clone())
    assert sum(looked_up) <= sum(max(LENGTHS) for _ in PROGRAMS)
    assert len(made_of) == len(PROGRAMS) - 1  # one of them is of another layer
    assert sorted({*made_of}) == [2, HEADS]


def test_sums_of_attention_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that only gain keep what attention gave them of other keys, here without values' 1."""
    if not INTERPRETED:
        pytest.skip("the kernel alone takes them")
    case = Case("plain", monkeypatch)
    want, changed = case.want()
    case.before, lse = case.plain()
    case.pages.values[:] += 1
    made = case.before.clone()
    case.attention(Workspace.of(HEADS, want.shape[2], CPU)).attend(case.query, made, lse)
    moved = (made - want)[changed].abs()
    assert moved.amin() < 0.5 and moved.amax() > 0.9


def compare(case: Case, made: torch.Tensor, want: torch.Tensor, changed: torch.Tensor) -> None:
    assert torch.equal(made[~changed], case.before[~changed])
    assert 20 < int(changed.sum()) < changed.numel() - 20
    assert (made - want)[changed].abs().max() < 1e-5
    wrong, _ = case.want(wrong=0.9)
    assert (made - wrong)[changed].abs().max() > 1e-2
