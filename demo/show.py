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
from demo.engine import POINT, trace
from demo.subject import Subject
from vllm.pilot.bench import EngineBench, Steering
from vllm.pilot.training import Trained


def directions(console: Console, trained: Trained) -> None:
    """Separation by each layer of contrasting prompts that made no direction."""
    table = Table(title=f"Direction per layer ({POINT}, last prompt token, difference of means)")
    for heading in ("layer", "length of v", "length of the stream", "separation"):
        table.add_column(heading, justify="right")
    found, separation = trained.directions, trained.separation
    for i, layer in enumerate(found.layers):
        table.add_row(
            str(layer),
            f"{float(found.vectors[i].norm()):.2f}",
            f"{separation.stream[i]:.2f}",
            f"{separation.d_prime[i]:.1f} standard deviations",
        )
    console.print(table)


def sweep(console: Console, trained: Trained) -> None:
    """The effect of every layer and scale on the sweep prompts."""
    found, choice = trained.sweep, trained.choice
    assert found is not None
    table = Table(
        title=f"Sweep: change of the measure ({found.unit}), mean over {len(found.plain)} prompts"
    )
    table.add_column("layer", justify="right")
    for scale in found.scales:
        table.add_column(f"{scale:+g}" if scale else "0", justify="right")
    most = float(abs(found.effect).max()) or 1.0
    for layer, effects in zip(found.layers, found.effect.tolist(), strict=True):
        cells = [Text(f"{effect:+.2f}", style=_tint(effect / most)) for effect in effects]
        name = f"[bold]{layer}[/]" if layer == choice.layer else str(layer)
        table.add_row(name, *cells)
    table.add_section()
    cost = (f"{choice.nats[scale]:+.2f}" if scale else "" for scale in found.scales)
    table.add_row(f"cost, {choice.layer}", *cost)
    console.print(table)
    console.print(
        f"Chosen on these prompts: layer [bold]{choice.layer}[/], scale "
        f"[bold]{choice.scale:g}[/]. Cost: nats a token that text becomes more surprising, "
        f"{trained.settings.max_nats:.2f} are allowed."
    )


def side_by_side(console: Console, trained: Trained, shown: int = 2) -> None:
    """The first held-out prompts at all scales that were written."""
    choice, answers = trained.choice, trained.evidence.answers
    first = {answer.prompt: i for i, answer in reversed(list(enumerate(answers[0.0])))}
    for i in sorted(first.values())[:shown]:
        table = Table(
            title=f"Held-out prompt, layer {choice.layer}, all scales in one generate call",
            caption=escape(str(answers[0.0][i].prompt)) + " ...",
        )
        table.add_column("scale", justify="right")
        table.add_column("the model writes")
        for scale in sorted(answers):
            name = f"{scale:+g}" if scale else "0"
            mark = "bold" if abs(scale) == choice.scale else ""
            answer = escape(answers[scale][i].text.strip().replace("\n", " "))
            table.add_row(name, answer, style=mark)
        console.print(table)


def coloured(console: Console, bench: EngineBench, subject: Subject, trained: Trained) -> None:
    """Generated tokens, each on the colour of its own row's projection on the direction."""
    choice, found = trained.choice, trained.directions
    layer = next((n for n in found.layers if n > choice.layer), choice.layer)
    # At the steered layer itself a row has `scale` more: that is no news.
    share, without = (1.0, ", without what is added") if layer == choice.layer else (0.0, "")
    console.print(
        f"\n[bold]Every generated token by the projection of its row[/] on layer {layer}'s "
        f"direction, while layer {choice.layer} is steered{without}; 0 is the mean token of "
        "unsteered text.",
        Text(" gloomy ", style=_background(-1.0)),
        Text(" neither ", style=_background(0.0)),
        Text(" cheerful ", style=_background(1.0)),
        "(the last token is never fed back and has no row)",
    )
    how = (layer, subject.answer_tokens, subject.temperature)
    plain = trace(bench, subject.sweep, [None], *how)
    usual = float(found.projection(torch.cat([rows for *_, rows in plain]), layer).mean())
    prompts = subject.held_out[:2]
    scales = (-choice.scale, 0.0, choice.scale)
    steerings = [Steering(choice.layer, found.at(choice.layer), s) for s in scales]
    for i, (prompt, tokens, rows) in enumerate(trace(bench, prompts, steerings, *how)):
        scale = scales[i % len(scales)]
        if i % len(scales) == 0:
            console.print(f"[dim]{escape(prompt)} ...[/]")
        values = found.projection(rows, layer) - usual - share * scale
        line = Text(f"{scale:+5.1f} " if scale else "    0 ")
        for token, value in zip(tokens, values.tolist(), strict=False):
            # A token may be a part of a character.
            word = bench.tokenizer.decode([token]).replace("\n", " ").replace("\ufffd", "")
            line.append(word, style=_background(value))
        line.append(f"   mean {float(values.mean()):+.2f}", style="dim")
        console.print(line)


def checks(console: Console, trained: Trained, made: Sequence[Check]) -> None:
    """The claims and whether they held."""
    evidence = trained.evidence
    table = Table(
        title=f"On {evidence.cases} held-out prompts (unsteered {evidence.plain:+.2f} "
        f"{evidence.unit})"
    )
    table.add_column("claim")
    table.add_column("measured")
    table.add_column("holds")
    for check in made:
        verdict = "[green]yes[/]" if check.held else "[bold red]NO[/]"
        table.add_row(check.claim, check.measured, verdict)
    console.print(table)


def effects(console: Console, trained: Trained) -> None:
    """The held-out effect per scale."""
    evidence = trained.evidence
    table = Table(title="Effect on the held-out prompts, per scale")
    for scale in evidence.scales:
        table.add_column(f"{scale:+g}" if scale else "0", justify="right")
    largest = max(map(abs, evidence.effect)) or 1.0
    table.add_row(*(Text(f"{e:+.2f}", style=_tint(e / largest)) for e in evidence.effect))
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
