# SPDX-License-Identifier: Apache-2.0
"""Linear heads of one number: logistic regression on rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm.pilot.linear_probe import Probe, fit_probe
from vllm.pilot.probes.reading import EntryRows

PENALTIES = (0.1, 10.0, 1000.0)
"""Penalties that are tried, of rows whose channels vary by 1."""


def fit_linear(
    train: Sequence[EntryRows],
    choose: Sequence[EntryRows],
    penalty: float | None,
    say: Callable[[str], Any],
) -> tuple[Probe, dict[str, Any]]:
    """Fit the regression on all rows, with the penalty that loses least on other texts.

    Args:
        penalty: of rows whose channels vary by 1; None to choose among `PENALTIES`.

    Returns:
        The probe, and how it was fitted.

    Raises:
        ValueError: as `fit_probe` does.
    """
    rows, positive = _joined(train)
    others, labels = _joined(choose)
    spread = float(rows.double().var(0).mean()) or 1.0
    losses: dict[float, float] = {}
    found: dict[float, Probe] = {}
    for tried in PENALTIES if penalty is None else (penalty,):
        found[tried] = fit_probe(rows[positive], rows[~positive], tried * spread)
        scores = found[tried].scores(others)
        losses[tried] = float(
            torch.nn.functional.binary_cross_entropy_with_logits(scores, labels.float())
        )
        say(f"penalty {tried:g}: loss {losses[tried]:.4f} on the choose split")
    best = min(losses, key=lambda tried: losses[tried])
    return found[best], {"penalty": best, "row_variance": spread, "choose_loss": losses[best]}


def _joined(entries: Sequence[EntryRows]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, float32 [n, sites * hidden], and their labels, bool [n]."""
    rows = torch.cat([one.values.flatten(1) for one in entries])
    return rows, torch.cat([one.positive for one in entries])
