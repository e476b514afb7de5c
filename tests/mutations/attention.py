# SPDX-License-Identifier: Apache-2.0
"""Mistakes in how attention is read and focused: keys of blocks, by changes of source text, and
what workers do, by other functions in place of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mutations.rules import Mistake
from vllm.model_executor.layers.attention_taps import HeadTap
from vllm.model_executor.layers.row_capture import capture_rows
from vllm.v1.interventions.focus import SHARE
from vllm.v1.interventions.frontend.request import focus as focus_request
from vllm.v1.interventions.frontend.request import segments
from vllm.v1.interventions.scheduler import identity as block_identity
from vllm.v1.interventions.worker import token_map
from vllm.v1.interventions.worker.attention import formula as focused_weights
from vllm.v1.interventions.worker.attention import keys as layer_reader
from vllm.v1.interventions.worker.attention import layers as attention_layers
from vllm.v1.interventions.worker.attention import reader as attention_reader
from vllm.v1.interventions.worker.attention.pages import sight_of
from vllm.v1.interventions.worker.check import taps as tap_check
from vllm.v1.interventions.worker.focus import table as focus_table
from vllm.v1.interventions.worker.focus.table import FocusTable
from vllm.v1.interventions.worker.making import attention as block_attention

_SEEN = "[(a, b) if b <= position else (a,) for a, b in runs]"
_EDGES = "edges |= {edge for focus in self.focused for edge in focus.op.runs if edge < END}"

KEYS = [
    Mistake(name, module, *change)
    for name, (module, *change) in {
        "without open runs": (
            focus_request, _SEEN, "[(a, b) for a, b in runs if b <= position]",
        ),
        "open runs as whole ones": (focus_request, _SEEN, "runs"),
        "keys that come later": (focus_request, "if run[0] <= position]", "]"),
        "without the number": (focus_request, "{self.op.number.hex()},", ""),
        "without the rule": (focus_request, 'f"{self.op.rule},', 'f"'),
        "without heads": (focus_request, ".hex()},{heads}", ".hex()}"),
        "of queries before the span": (
            focus_request, "queries & Positions([(first, END)])", "queries",
        ),
        "not cut where runs begin and end": (segments, _EDGES, ""),
        "plain": (block_identity, "_join(s.program, s.focus_key)", "s.program"),
    }.items()
]  # fmt: skip
"""In what tells blocks apart."""

Change = Callable[[pytest.MonkeyPatch], None]
"""Makes a mistake, until the patch is undone."""


def _no_slopes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layer_reader, "sight_of", lambda m: sight_of(m)._replace(slopes=None))


def _interleaved(patch: pytest.MonkeyPatch) -> None:
    """Query heads use key heads in turn."""

    def heads_in_turn(heads: Any, group: int) -> Any:
        number = -(-len(heads) // group)
        return [(k, [i for i, h in enumerate(heads) if h % number == k]) for k in range(number)]

    patch.setattr(layer_reader, "grouped_heads", heads_in_turn)


def _next_group(patch: pytest.MonkeyPatch) -> None:
    right = attention_layers.key_tables

    def next_group(runner: Any, modules: Any) -> Any:
        tables = right(runner, modules)
        groups = len(runner.kv_cache_config.kv_cache_groups)
        return {n: t._replace(group=(t.group + 1) % groups) for n, t in tables.items()}

    patch.setattr(tap_check, "key_tables", next_group)


PROVED: dict[str, tuple[str, Change]] = {
    "no ALiBi": ("bloom", _no_slopes),
    "key heads interleaved": ("gemma2", _interleaved),
    "table of another group": ("gemma2", _next_group),
}
"""What the start-up proof finds in every layer, and on which model."""


def _numbers(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def made(patch: pytest.MonkeyPatch) -> None:
        right = focus_table._write

        def write(ops: Any, layer: int, here: range, form: Any, runs: Any, numbers: Any) -> None:
            right(ops, layer, here, form, runs, numbers)
            numbers.copy_(change(numbers))

        patch.setattr(focus_table, "_write", write)

    return made


def _stale_row(patch: pytest.MonkeyPatch) -> None:
    """What a row had before stays, once it had any."""
    right = FocusTable.write
    seen: set[int] = set()

    def write(self: FocusTable, placed: list[tuple[int, Any]]) -> None:
        if new := [each for each in placed if each[0] not in seen]:
            right(self, new)
        seen.update(row for row, _ in placed)

    patch.setattr(FocusTable, "write", write)


def _stale_tokens(patch: pytest.MonkeyPatch) -> None:
    """Tokens keep the program of those before, where no request of a step has any."""
    patch.setattr(token_map.TokenMap, "_clear_focus", lambda self: None)


def _other_request(patch: pytest.MonkeyPatch) -> None:
    """The keys are those of the next request of the batch."""
    right = token_map.TokenMap.map

    def mapped(self: token_map.TokenMap, req_ids: Any, *args: Any) -> None:
        right(self, req_ids, *args)
        self.requests.copy_((self.requests + 1) % len(req_ids))

    patch.setattr(token_map.TokenMap, "map", mapped)


def _key_before(patch: pytest.MonkeyPatch) -> None:
    right = focus_table._write

    def write(ops: Any, layer: int, here: range, form: Any, runs: Any, numbers: Any) -> None:
        right(ops, layer, here, form, runs, numbers)
        runs[:2] -= 1

    patch.setattr(focus_table, "_write", write)


def _ratio_as_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(focused_weights, "RATIO", SHARE)


def _all_queries(patch: pytest.MonkeyPatch) -> None:
    mistake = Mistake("", focus_request, 'if "positions" in given:', "if False:")
    patch.setattr(
        "vllm.v1.interventions.frontend.request.steering.FocusParser", mistake.made().FocusParser
    )


def _plain_weights(patch: pytest.MonkeyPatch) -> None:
    right = block_attention.Captured.of_blocks
    patch.setattr(
        block_attention.Captured,
        "of_blocks",
        lambda self, blocks: right(self._replace(programs=None), blocks),
    )


SERVED: dict[str, Change] = {
    "factor applied twice": _numbers(lambda numbers: 2 * numbers),
    "of the next head": _numbers(lambda numbers: numbers.roll(1, 0)),
    "stale row of the table": _stale_row,
    "stale programs of tokens": _stale_tokens,
    "keys of another request": _other_request,
    "the key before": _key_before,
    "ratio as share": _ratio_as_share,
    "all queries": _all_queries,
    "captured weights without focus": _plain_weights,
}
"""What the comparison with transformers finds: the proof has one request, and no answer."""


def _own_alone(self: HeadTap, rows: torch.Tensor) -> None:
    """In place of those of other ranks there are zeros."""
    rows = rows.flatten(1)
    capture_rows(
        torch.nn.functional.pad(rows, (0, self.width - rows.shape[1])),
        self.arena,
        self.dest,
        self.switch,
    )


RANKS = ("missing gather", "weights not joined", "heads of the first rank")
"""What each of several ranks may do wrongly."""

_RIGHT = HeadTap.read, attention_reader.all_reduce


def of_rank(worker: Any, mistake: str | None) -> None:
    """Have a worker make one of these, or none. Runs there."""
    interventions = worker.worker.model_runner.interventions
    HeadTap.read, attention_reader.all_reduce = _RIGHT  # type: ignore[method-assign]
    table = interventions.focus.table
    table._rank = interventions._config.parallel_config.rank
    if mistake == "missing gather":
        HeadTap.read = _own_alone  # type: ignore[method-assign]
    elif mistake == "weights not joined":
        attention_reader.all_reduce = lambda *args, **kwargs: None
    elif mistake == "heads of the first rank":
        table._rank = 0
