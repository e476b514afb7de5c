# SPDX-License-Identifier: Apache-2.0
"""The picture: layer x scale -> measured effect, and the chosen layer against random directions."""

from __future__ import annotations

from pathlib import Path

from vllm.pilot.picture import curve, save_figure, subplots
from vllm.pilot.training import Trained


def draw(target: Path, name: str, trained: Trained) -> None:
    """Writes a PNG to `target`; `name` is the model's, for the title."""
    swept, choice, evidence = trained.sweep, trained.choice, trained.evidence
    assert swept is not None
    figure, (left, right) = subplots(2)
    swept.draw_on(left, [(choice.layer, -choice.scale), (choice.layer, choice.scale)])
    left.set_title(f"Effect on {len(swept.plain)} sweep prompts", fontsize=11)
    curve(
        right,
        evidence.scales,
        evidence.effect,
        evidence.random_effects,
        evidence.unit,
        f"the direction, layer {choice.layer}",
    )
    right.set_title(f"Effect on {evidence.cases} held-out prompts", fontsize=11)
    figure.suptitle(f"Steering {name} along a captured direction: cheerful (+), gloomy (-)")
    save_figure(figure, target)
