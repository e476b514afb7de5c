# SPDX-License-Identifier: Apache-2.0
"""The pictures: layer x scale -> measured effect, and the chosen layer against random directions;
and where a head looks."""

from __future__ import annotations

from pathlib import Path

from demo.heads import Head
from vllm.pilot.picture import curve, subplots
from vllm.pilot.training import Trained
from vllm.v1.capture.figures import attention_map, axes_of, save_figure


def draw_head(target: Path, name: str, found: Head) -> None:
    """Writes a PNG of the head's weights to `target`."""
    title = f"Head {found.head} of layer {found.layer} of {name}"
    with axes_of(target, 8.5, 7.5, title=title) as (axes,):
        attention_map(axes, found.weights, found.tokens, found.tokens)


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
