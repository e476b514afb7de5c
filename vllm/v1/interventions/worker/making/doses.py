# SPDX-License-Identifier: Apache-2.0
"""Doses: how long the vectors that a row got are beside the row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.step_rows import Block
from vllm.v1.interventions.worker.making.maker import Captured, Maker, Material
from vllm.v1.interventions.worker.tables.matrices import CHUNK_BYTES


@dataclass(frozen=True)
class Steered:
    """Tables by which the taps of a worker steer its sites."""

    sites: Sequence[Site]
    """The sites that may be captured, by their index."""
    slots: torch.Tensor
    """int32 [max tokens], the table row of each token of a step."""
    tables: Mapping[Site, torch.Tensor]
    """Site -> [rows, hidden] in the model's dtype; none of a site that is never steered."""


class DoseMaker(Maker):
    """Makes `Dose`, float32 [count, sites, 1].

    A row is read after it was steered, and the table has what was added to it: its length beside
    that of the rest of the row is the dose. No operation acts there, or the row without vectors
    would be another one.
    """

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.steered: Steered | None = None
        """Tables of the steered sites; None until they are known, and without steering."""

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Compare the rows of each site with what the site's table added."""
        steered = self.steered
        doses = torch.zeros(block.count, len(stream.places), 1, device=self.material.arena.device)
        if steered is None or not stream.places:
            return doses
        slots = steered.slots[captured.tokens]
        for run, rows in self.material.by_run(block, stream):
            for i, of_site in enumerate(rows.unbind(1), run.start):
                site = steered.sites[block.group.sites[stream.places[i]]]
                if site in steered.tables:
                    doses[:, i, 0] = _doses(of_site, steered.tables[site], slots)
        return doses


def _doses(rows: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """|v| / |h - v|, float32 [n], of rows h [n, hidden] with v at their slots; a bounded number at
    a time."""
    at_once, made = max(CHUNK_BYTES // (4 * rows.shape[1]), 1), []
    for some, at in zip(rows.split(at_once), slots.split(at_once), strict=True):
        added = table[at].float()
        size = torch.linalg.vector_norm(added, dim=1)
        plain = torch.linalg.vector_norm(some.float() - added, dim=1)
        made.append(torch.where(size == 0, 0.0, size / plain))
    return torch.cat(made)
