# SPDX-License-Identifier: Apache-2.0
"""The pictures: layer x scale -> measured effect, and the chosen layer against random directions;
and where a head looks."""

from __future__ import annotations

from pathlib import Path

from demo.heads import Head
from vllm.pilot.picture import curve, subplots
from vllm.pilot.training import Trained
from vllm.v1.capture.figures import save_figure


def draw_head(target: Path, name: str, found: Head) -> None:
    """Writes a PNG of the head's weights to `target`."""
    figure, [axes] = subplots(1, width=8.5, height=7.5)
    image = axes.imshow(found.weights, cmap="Purples", vmin=0, vmax=1)
    ticks = range(len(found.tokens))
    axes.set_xticks(ticks, found.tokens, rotation=90, fontsize=9)
    axes.set_yticks(ticks, found.tokens, fontsize=9)
    axes.set_xlabel("key: the token that is looked at")
    axes.set_ylabel("query: the token that looks")
    figure.colorbar(image, ax=axes, label="attention weight")
    figure.suptitle(f"Head {found.head} of layer {found.layer} of {name}")
    save_figure(figure, target)


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
