# SPDX-License-Identifier: Apache-2.0
"""A linear probe: fitted on rows of the pairs, tested on sentences of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from demo.engine import last_rows
from vllm.pilot import auroc
from vllm.pilot.bench import EngineBench
from vllm.pilot.evidence import random_directions
from vllm.pilot.linear_probe import fit_probe

RANDOMS = 64
Sentences = tuple[Sequence[str], Sequence[str]]
"""Cheerful ones, and gloomy ones."""


@dataclass(frozen=True)
class Probed:
    """What the probe of a layer is worth; 0.5 is chance."""

    layer: int
    fitted: int
    tested: int
    auroc: float
    random: float
    """Of random directions, the mean of what each is away from 0.5, above it."""


def probe(bench: EngineBench, layer: int, fitted: Sentences, tested: Sentences) -> Probed:
    """Fit on the rows of last tokens of some sentences, and rank those of others."""
    rows = [last_rows(bench, side, layer) for side in (*fitted, *tested)]
    found = fit_probe(rows[0], rows[1], penalty=float(rows[0].square().sum(-1).mean()) / 10)
    positive, negative = (row.double() for row in rows[2:])
    directions = torch.stack([found.weight, *random_directions(found.weight, RANDOMS, 0)]).double()
    areas = auroc(positive @ directions.T, negative @ directions.T)
    return Probed(
        layer,
        len(rows[0]) + len(rows[1]),
        len(positive) + len(negative),
        float(areas[0]),
        0.5 + float((areas[1:] - 0.5).abs().mean()),
    )


def show(console: Console, probed: Probed) -> None:
    """Say it in a sentence."""
    console.print(
        f"[bold]A probe[/] of layer {probed.layer}'s rows, fitted on the {probed.fitted} texts of "
        f"the pairs, tells {probed.tested} sentences of another kind "
        f"apart: AUROC [bold]{probed.auroc:.3f}[/]; random directions {probed.random:.3f}, chance "
        "0.5."
    )
