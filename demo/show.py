# SPDX-License-Identifier: Apache-2.0
"""What the demo prints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from demo.checks import Check
from demo.engine import POINT, Bench, Steering
from demo.experiment import Choice, Directions, Result, Sweep
from demo.subject import Subject


def directions(console: Console, found: Directions) -> None:
    """How well each layer tells the contrasting prompts apart."""
    table = Table(title=f"Direction per layer ({POINT}, last prompt token, difference of means)")
    for heading in ("layer", "length of v", "length of the stream", "separation"):
        table.add_column(heading, justify="right")
    for layer, separation in enumerate(found.separation.tolist()):
        table.add_row(
            str(layer),
            f"{float(found.vectors[layer].norm()):.2f}",
            f"{float(found.stream[layer]):.2f}",
            f"{separation:.1f} standard deviations",
        )
    console.print(table)


def sweep(
    console: Console, subject: Subject, layers: Sequence[int], found: Sweep, choice: Choice
) -> None:
    """The effect of every layer and scale on the sweep prompts."""
    table = Table(
        title=f"Sweep: change of the measure ({subject.measure.unit}), "
        f"mean over {len(subject.sweep)} prompts"
    )
    table.add_column("layer", justify="right")
    for scale in subject.scales:
        table.add_column(f"{scale:+g}" if scale else "0", justify="right")
    for layer, effects in zip(layers, found.effect.tolist(), strict=True):
        cells = [
            Text(f"{effect:+.2f}", style=_tint(effect / float(found.effect.abs().max())))
            for effect in effects
        ]
        name = f"[bold]{layer}[/]" if layer == choice.layer else str(layer)
        table.add_row(name, *cells)
    table.add_section()
    table.add_row(f"ppl, {choice.layer}", *(f"{p:.2f}" for p in choice.perplexity))
    console.print(table)
    console.print(
        f"Chosen on these prompts: layer [bold]{choice.layer}[/], scale "
        f"[bold]{choice.scale:g}[/]. ppl: perplexity of the steered text under the unsteered "
        f"model, whose own text has {choice.unsteered_perplexity:.2f}."
    )


def side_by_side(
    console: Console, subject: Subject, result: Result, choice: Choice, shown: int = 2
) -> None:
    """The first held-out prompts at all nine scales."""
    for i in range(shown):
        table = Table(
            title=f"Held-out prompt, layer {choice.layer}, nine scales in one generate call",
            caption=escape(result.answers[0.0][i].prompt) + " ...",
        )
        table.add_column("scale", justify="right")
        table.add_column("the model writes")
        for scale in subject.scales:
            name = f"{scale:+g}" if scale else "0"
            mark = "bold" if abs(scale) == choice.scale else ""
            answer = escape(result.answers[scale][i].whole_words().strip().replace("\n", " "))
            table.add_row(name, answer, style=mark)
        console.print(table)


def coloured(
    console: Console, bench: Bench, subject: Subject, found: Directions, choice: Choice
) -> None:
    """Generated tokens, each on the colour of its own row's projection on the direction."""
    layer = min(choice.layer + 1, bench.layers - 1)
    console.print(
        f"\n[bold]Every generated token by the projection of its row[/] on layer {layer}'s "
        f"direction, while layer {choice.layer} is steered; 0 is the mean token of unsteered text.",
        Text(" gloomy ", style=_background(-1.0)),
        Text(" neither ", style=_background(0.0)),
        Text(" cheerful ", style=_background(1.0)),
        "(the last token is never fed back and has no row)",
    )
    plain = bench.trace(subject.sweep, [None], layer)
    usual = float(found.projection(torch.cat([rows for _, rows in plain]), layer).mean())
    prompts = subject.held_out[:2]
    scales = (-choice.scale, 0.0, choice.scale)
    steerings = [Steering(choice.layer, found.vectors[choice.layer], s) for s in scales]
    traces = bench.trace(prompts, steerings, layer)
    for i, (answer, rows) in enumerate(traces):
        scale = scales[i % len(scales)]
        if i % len(scales) == 0:
            console.print(f"[dim]{escape(answer.prompt)} ...[/]")
        values = found.projection(rows, layer) - usual
        line = Text(f"{scale:+5.1f} " if scale else "    0 ")
        for token, value in zip(answer.token_ids, values.tolist(), strict=False):
            word = bench.tokenizer.decode([token]).replace("\n", " ")
            line.append(word, style=_background(value))
        line.append(f"   mean {float(values.mean()):+.2f}", style="dim")
        console.print(line)


def checks(console: Console, subject: Subject, result: Result, made: Sequence[Check]) -> None:
    """The claims and whether they held."""
    table = Table(
        title=f"On {len(subject.held_out)} held-out prompts "
        f"(unsteered {result.unsteered:+.2f} {subject.measure.unit})"
    )
    table.add_column("claim")
    table.add_column("measured")
    table.add_column("holds")
    for check in made:
        verdict = "[green]yes[/]" if check.held else "[bold red]NO[/]"
        table.add_row(check.claim, check.measured, verdict)
    console.print(table)


def effects(console: Console, subject: Subject, result: Result) -> None:
    """The held-out effect per scale."""
    table = Table(title="Effect on the held-out prompts, per scale")
    for scale in subject.scales:
        table.add_column(f"{scale:+g}" if scale else "0", justify="right")
    largest = float(torch.tensor(result.effect).abs().max()) or 1.0
    table.add_row(*(Text(f"{e:+.2f}", style=_tint(e / largest)) for e in result.effect))
    console.print(table)


def _tint(value: float) -> str:
    """Text colour, legible on dark and on light: blue for -1, grey for 0, red for +1."""
    strength = min(abs(value), 1.0)
    fade = int(150 - 70 * strength)
    bright = int(150 + 90 * strength)
    return f"rgb({bright},{fade},{fade})" if value > 0 else f"rgb({fade},{fade + 10},{bright})"


def _background(value: float) -> str:
    """Black text on blue for -1, white for 0, orange for +1."""
    strength = min(abs(value), 1.0)
    fade = int(255 - 150 * strength)
    colour = f"rgb(255,{fade},{fade - 60 if fade > 60 else 0})"
    if value <= 0:
        colour = f"rgb({fade},{int(255 - 70 * strength)},255)"
    return f"black on {colour}"
