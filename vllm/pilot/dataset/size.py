# SPDX-License-Identifier: Apache-2.0
"""Disk and time that a data set will take, measured on a sample of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm.pilot.dataset.capture_run import Captured
from vllm.pilot.dataset.examples import size_of


@dataclass(frozen=True)
class Estimate:
    """Estimated disk space and time of a run."""

    num_examples: int
    """Number of examples that are left to do."""
    num_bytes: int
    """Bytes of the files."""
    exact: bool
    """True if all examples of the sample were equally large."""
    seconds: float
    free_bytes: int | None
    """Bytes that are free on the disk; None for an object store."""
    out: str

    @property
    def fits(self) -> bool:
        """True if the disk has room for it, and a hundredth more."""
        return self.free_bytes is None or self.num_bytes * 1.01 <= self.free_bytes

    def __str__(self) -> str:
        """Say it in a line."""
        about = "" if self.exact else "about "
        free = "" if self.free_bytes is None else f", {size(self.free_bytes)} are free there"
        return (
            f"{self.num_examples:,} examples: {about}{size(self.num_bytes)} in {self.out}{free}; "
            f"about {duration(self.seconds)}"
        )


def estimate(
    sample: Sequence[Captured],
    stored: Callable[[torch.Tensor], int],
    num_examples: int,
    characters: float,
    seconds: float,
    free_bytes: int | None,
    out: str,
) -> Estimate:
    """Scale what a sample took up to all of the data.

    Args:
        stored: returns the bytes that rows of a site have in a file.
        num_examples: how many examples are to be done.
        characters: of their prompts, together.
        seconds: how long the sample took.
    """
    sizes = [sum(map(stored, one.values.values())) + 3 * one.positions.nbytes for one in sample]
    exact = len(set(sizes)) == 1
    if exact:
        num_bytes = float(sizes[0] * num_examples)
    else:
        # What is longer has more rows: as bytes a character, not as bytes an example.
        num_bytes = sum(sizes) / sum(size_of(one.example.prompt) for one in sample) * characters
    # The manifest's line of an example has some fifteen bytes for each row, and is there twice.
    rows = sum(len(one.positions) for one in sample) / len(sample)
    num_bytes += num_examples * 2 * (150 + 15 * rows)
    return Estimate(
        num_examples,
        int(num_bytes),
        exact,
        seconds / len(sample) * num_examples,
        free_bytes,
        out,
    )


def size(num_bytes: float) -> str:
    """Write a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Write a duration."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
