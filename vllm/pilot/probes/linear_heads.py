# SPDX-License-Identifier: Apache-2.0
"""Linear heads of one number: logistic regression on rows."""

from collections.abc import Iterator, Sequence

import torch

from vllm.pilot.linear_probe import Probe, fit_probes
from vllm.pilot.probes.reading import EntryRows

PENALTIES = (0.1, 10.0, 1000.0)
"""Penalties that are tried, of rows whose channels vary by 1."""


def regressions(
    train: Sequence[EntryRows], penalties: Sequence[float]
) -> Iterator[tuple[float, Probe]]:
    """Fit the regression on all rows with each penalty.

    Yields:
        A penalty, and the probe that was fitted with it.

    Raises:
        ValueError: as `fit_probe` does.
    """
    rows = torch.cat([one.values.flatten(1) for one in train])
    positive = torch.cat([one.positive for one in train])
    spread = float(rows.double().var(0).mean()) or 1.0
    sides = rows[positive], rows[~positive]
    del rows
    yield from zip(penalties, fit_probes(*sides, [p * spread for p in penalties]), strict=True)
