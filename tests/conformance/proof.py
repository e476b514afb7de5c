# SPDX-License-Identifier: Apache-2.0
"""The table of the hook contract: architecture x point, the worst errors of reading and writing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import models
from .engine import engine
from .runner import (
    LEAST_MOVE,
    READ_TOLERANCE,
    WRITE_TOLERANCE,
    Measurement,
    Reference,
    plain_errors,
    prompts,
    read_errors,
    steered_read_errors,
    write_errors,
)

PLAIN_TOLERANCE = 1e-4


@dataclass(frozen=True)
class ProofRow:
    """One line of the table; errors are relative L2, the worst row of all layers and prompts."""

    architecture: str
    point: str
    plain_error: float
    """Log-probabilities with nothing steered: of the whole model, the same for each point."""
    read_error: float
    write_error: float
    """Log-probabilities while steered at this point."""
    least_moved: float
    """The least that a vector of the stream's own length moved the log-probabilities."""

    @property
    def ok(self) -> bool:
        """Within the tolerances of the hook contract."""
        return (
            self.plain_error <= PLAIN_TOLERANCE
            and self.read_error <= READ_TOLERANCE
            and self.write_error <= WRITE_TOLERANCE
            and self.least_moved >= LEAST_MOVE
        )


def prove(name: str, cache: Path) -> list[ProofRow]:
    """Start an engine on one tiny model and compare it with transformers, a row for each point.

    Args:
        name: a key of `models.MODELS`.
        cache: directory for the tiny models; made when missing.
    """
    row = models.MODELS[name]
    path = models.save(row, cache)
    reference, token_prompts = Reference(row, models.load(row, path)), prompts()
    with engine(path, enable_steering=True, capture_consumers=["inline"]) as llm:
        results = [
            *plain_errors(llm, reference, token_prompts),
            *read_errors(llm, reference, token_prompts),
            *write_errors(llm, reference, token_prompts),
            *steered_read_errors(llm, reference, token_prompts),
        ]
    return [_row(row.architecture, point, results) for point in row.points]


def _row(architecture: str, point: str, results: list[Measurement]) -> ProofRow:
    # A case that steers every site counts against each point.
    def of(*checks: str) -> list[Measurement]:
        here = (point, "every", "logits")
        return [r for r in results if r.check in checks and r.point in here]

    return ProofRow(
        architecture,
        point,
        plain_error=max(r.error for r in of("plain")),
        read_error=max(r.error for r in of("read", "steered read")),
        write_error=max(r.error for r in of("write")),
        least_moved=min(r.moved for r in of("write") if r.moved is not None),
    )


def markdown(rows: Iterable[ProofRow]) -> str:
    """The table for the docs."""
    lines = [
        "| architecture | point | plain | read | write | moved at least | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.architecture} | {r.point} | {r.plain_error:.1e} | {r.read_error:.1e} "
        f"| {r.write_error:.1e} | {r.least_moved:.2f} | {'ok' if r.ok else 'FAILS'} |"
        for r in rows
    ]
    return "\n".join(lines)
