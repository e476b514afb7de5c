# SPDX-License-Identifier: Apache-2.0
"""Proof on your machine: what the engine reads and writes, against Hugging Face.

The same comparison as `tests/conformance/test_conformance.py`, on three architectures that carry
the residual stream in three different ways.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ARCHITECTURES = {
    "llama": "stream as a deferred sum, fused with the norms",
    "gemma2": "norms on both sides of each branch",
    "gpt2": "one tensor, plain sums",
}


IN_CLONE = (Path(__file__).parents[1] / "tests" / "conformance").is_dir()
"""True if the comparison is here: the demo of the wheel has none."""


@dataclass(frozen=True)
class Proof:
    """One architecture and point; errors are relative L2 of the worst row.

    read: captured rows; write: log-probabilities under steering; moved: the least that any of the
    steering moved them, so that agreement means something.
    """

    architecture: str
    point: str
    read: float
    write: float
    moved: float

    @property
    def held(self) -> bool:
        from tests.conformance import runner

        return (
            self.read <= runner.READ_TOLERANCE
            and self.write <= runner.WRITE_TOLERANCE
            and self.moved >= runner.LEAST_MOVE
        )


def prove(cache: Path) -> list[Proof]:
    """Compares all layers and positions; tiny random models are kept below `cache`."""
    from tests.conformance import models, runner
    from tests.conformance.engine import make_llm, shut_down

    prompts = runner.prompts()
    proofs = []
    with ExitStack() as engines:
        for name in ARCHITECTURES:
            row = models.MODELS[name]
            path = models.save(row, cache)
            llm = make_llm(
                path, enable_steering=True, capture_consumers=["inline"], use_tqdm_on_load=False
            )
            # Upstream lets no engine work after another of its process was shut down.
            engines.callback(shut_down, llm)
            reference = runner.Reference(row, models.load(row, path))
            reads = runner.read_errors(llm, reference, prompts)
            writes = runner.write_errors(llm, reference, prompts)
            for point in row.points:
                written = [m for m in writes if m.point == point]
                proofs.append(
                    Proof(
                        architecture=row.architecture,
                        point=point,
                        read=max(m.error for m in reads if m.point == point),
                        write=max(m.error for m in written),
                        moved=min(m.moved for m in written if m.moved is not None),
                    )
                )
    return proofs


def show(console: Console, proofs: list[Proof]) -> None:
    """The table, worst row of every layer and position."""
    table = Table(
        title="Proof on your machine: this engine against Hugging Face, float32, every layer "
        "(relative L2, worst row)"
    )
    for heading in (
        "architecture",
        "point",
        "read error",
        "write error",
        "steering moved",
        "holds",
    ):
        table.add_column(heading, justify="left" if heading[0] in "ap" else "right")
    for proof in proofs:
        table.add_row(
            proof.architecture,
            proof.point,
            f"{proof.read:.1e}",
            f"{proof.write:.1e}",
            f"{proof.moved:.2f}",
            "[green]yes[/]" if proof.held else "[bold red]NO[/]",
        )
    console.print(table)
