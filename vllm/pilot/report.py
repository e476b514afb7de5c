# SPDX-License-Identifier: Apache-2.0
"""The folder of a result: vectors, a model card, the numbers, and a page with pictures."""

import html
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from vllm.pilot.pairs import last_words
from vllm.pilot.picture import curve, subplots
from vllm.pilot.training import Trained
from vllm.v1.capture.figures import need_matplotlib, save_figure
from vllm.v1.steering.files import export_gguf
from vllm.v1.steering.files import save as save_module

_PLAYGROUND = Path(__file__).parents[1] / "entrypoints" / "serve" / "steering" / "playground"
_DRAWING = ("numbers.js", "elements.js", "drawing.js")


def need_folder(folder: str | Path) -> Path:
    """Make the folder of a result, and see that it can be written to, before the work is done.

    Raises:
        ValueError: there is something in it already.
        OSError: it cannot be made.
        ImportError: matplotlib, which draws the pictures, is not installed.
    """
    need_matplotlib()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ValueError(f"--out {path}: there is something in it; name a new folder")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"--out {path}: cannot be written to")
    return path


def save_trained(trained: Trained, folder: str | Path, command: str = "") -> Path:
    """Write a result.

    Always `report.json`, `report.html` and `README.md`; and where the effect is above that of
    random directions `NAME.safetensors` (the chosen layer, scale 1 is the chosen), `NAME.gguf` of
    the same and `all_layers.safetensors` (scale 1 is the class's distance). NAME is the folder's.

    Raises:
        OSError: a file cannot be written; those that are there are whole.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    name = path.resolve().name
    numbers = as_numbers(trained, command)
    write_text(path / "report.json", json.dumps(numbers, indent=1, allow_nan=False))
    if trained.held:
        point, model = trained.settings.point, trained.model
        save_module(path / f"{name}.safetensors", trained.module(), model)
        if point == "post_block":  # a control vector has no other
            export_gguf(path / f"{name}.gguf", trained.module(), model)
        every = zip(trained.directions.layers, trained.directions.vectors, strict=True)
        save_module(path / "all_layers.safetensors", {point: dict(every)}, model)
    write_text(path / "report.html", page(trained, name, command))
    write_text(path / "README.md", card(trained, name, command))
    return path


def as_numbers(trained: Trained, command: str = "") -> dict[str, Any]:
    """The numbers of a result, as JSON has them."""
    evidence, choice, separation = trained.evidence, trained.choice, trained.separation
    settings = {**trained.settings.__dict__, "layers": trained.directions.layers}
    return {
        "held": trained.held,
        "model": trained.model,
        "command": command,
        "data": {"source": trained.data.source, "sha256": trained.data.digest},
        "examples": trained.counts,
        "settings": settings,
        "warnings": trained.directions.warnings,
        "separation": {
            str(layer): {
                "auroc": _number(separation.auroc[i]),
                "d_prime": _number(separation.d_prime[i]),
                "share": _number(separation.share[i]),
                "vector_norm": float(trained.directions.vectors[i].double().norm()),
                "stream_norm": _number(separation.stream[i]),
            }
            for i, layer in enumerate(trained.directions.layers)
        },
        "sweep": None
        if trained.sweep is None
        else {
            "layers": trained.sweep.layers,
            "scales": trained.sweep.scales,
            "effect": trained.sweep.effect.tolist(),
            "plain": float(trained.sweep.plain.mean()),
            "unit": trained.sweep.unit,
        },
        "choice": {
            "layer": choice.layer,
            "scale": choice.scale,
            "within_guard": choice.within,
            "plain_nats": _number(choice.plain_nats),
            "guard_nats": {f"{scale:g}": _number(n) for scale, n in sorted(choice.nats.items())},
        },
        "evidence": {
            "measured": evidence.measured,
            "unit": evidence.unit,
            "strength": _number(evidence.strength),
            "standard_error": _number(evidence.error),
            "randoms": list(map(_number, evidence.randoms)),
            "scales": evidence.scales,
            "effect": list(map(_number, evidence.effect)),
            "plain": _number(evidence.plain),
            "cases": evidence.cases,
            "changed_by_zero": evidence.changed_by_zero,
            "auroc": _number(evidence.auroc),
            "d_prime": _number(evidence.d_prime),
        },
    }


def verdict(trained: Trained) -> str:
    """Return the result of the training, in a sentence."""
    evidence, choice = trained.evidence, trained.choice
    most = max(evidence.randoms, default=0.0)
    what = "effect" if evidence.measured else "separation (the effect was not measured)"
    numbers = (
        f"{what} {evidence.strength:+.3g} {evidence.unit}, random directions at most {most:.3g}, "
        f"standard error {evidence.error:.2g}, {evidence.cases} cases"
    )
    if trained.broken:
        return f"BROKEN: v plus -v changed {evidence.changed_by_zero} answers; {numbers}"
    if not choice.within:
        worst = max(choice.nats[choice.scale], choice.nats[-choice.scale])
        return (
            f"no result: the smallest scale already costs {worst:.2g} nats a token, "
            f"{trained.settings.max_nats:g} are allowed; {numbers}"
        )
    if not evidence.above_random:
        return f"no result: no better than random directions or chance: {numbers}"
    return f"layer {choice.layer}, scale {choice.scale:g}: {numbers}"


def limits(trained: Trained) -> list[str]:
    """Return what a reader should know before relying on the result, a sentence each."""
    evidence, settings = trained.evidence, trained.settings
    found = [
        f"Measured on {evidence.cases} held-out cases of the same data; other prompts were not "
        "tried.",
        f"The guard ({settings.guard}) looks at text alone, not at what else a model can do.",
        *trained.directions.warnings,
    ]
    if not evidence.measured:
        found.append("It separates held-out examples; what steering with it does is not measured.")
    return found


def card(trained: Trained, name: str, command: str) -> str:
    """The model card."""
    choice, settings = trained.choice, trained.settings
    front = [
        "---",
        f"base_model: {json.dumps(trained.model)}",
        "library_name: vllm",
        "tags: [steering-vector, activation-steering, control-vector]",
        "---",
    ]
    said = verdict(trained)
    lines = [*front, f"# {name}", "", f"{said[0].upper()}{said[1:]}.", ""]
    if trained.held:
        lines += [
            f"    vllm serve {trained.model} --enable-steering "
            f"--steering-modules {name}={name}.safetensors",
            "",
            f'Requests name it: `"steering_modules": [["{name}", 1.0]]`. Scale 1 is the chosen '
            f"one, {choice.scale:g} times half the distance of the classes; -1 is its opposite.",
            "",
        ]
    examples = ", ".join(f"{name} {p} + {n}" for name, (p, n) in trained.counts.items())
    lines += [
        "| | |",
        "|---|---|",
        f"| method | {settings.method}, rows at {json.dumps(settings.read)} |",
        f"| site | {settings.point} of layer {choice.layer} |",
        f"| held-out AUROC, d' | {trained.evidence.auroc:.3f}, {trained.evidence.d_prime:.2f} |",
        f"| nats a token at +1, -1 | {choice.nats[choice.scale]:.4f}, "
        f"{choice.nats[-choice.scale]:.4f} |",
        f"| examples | {examples} |",
        f"| data | {trained.data.source}, SHA-256 {trained.data.digest or 'of no file'} |",
        f"| command | `{command}` |" if command else "",
        "",
        "## Limits",
        "",
        *(f"* {limit}" for limit in limits(trained)),
        "",
    ]
    return "\n".join(line for line in lines if line is not None)


def page(trained: Trained, name: str, command: str) -> str:
    """The report as one HTML file, with its pictures: those that the playground has, too, are drawn
    by the same scripts, of the numbers on the page."""
    escape, numbers = html.escape, as_numbers(trained, command)
    parts = [
        f"<h1>{escape(name)}</h1>",
        f"<p class={'good' if trained.held else 'bad'}>{escape(verdict(trained))}</p>",
        f"<pre>{escape(command)}</pre>" if command else "",
        "<figure id=separation></figure>",
        "" if trained.sweep is None else "<figure id=sweep></figure>" + _curve(trained),
        "<h2>Limits</h2><ul>" + "".join(f"<li>{escape(s)}" for s in limits(trained)) + "</ul>",
        _answers(trained),
        "<h2>Numbers</h2>",
        f"<pre id=numbers>{escape(json.dumps(numbers, indent=1))}</pre>",
    ]
    style = (_PLAYGROUND / "style.css").read_text() + (
        "body{display:block;max-width:60rem;margin:2rem auto;padding:0 1rem}svg{max-width:100%}"
        ".good,.bad{border-left:6px solid var(--good);padding-left:.7rem}"
        ".bad{border-color:var(--high)}td:not([colspan]):first-child{white-space:nowrap}"
    )
    script = "".join((_PLAYGROUND / part).read_text() for part in _DRAWING)
    script += Path(__file__).with_name("report.js").read_text()
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(name)}</title><style>{style}</style>"
    )
    return (
        f"<!doctype html><html lang=en><head>{head}</head><body><main>{''.join(parts)}</main>"
        f"<script>'use strict';\n{script}</script></body></html>\n"
    )


def _curve(trained: Trained) -> str:
    """The effect of each scale beside random directions, as SVG to stand in a page."""
    evidence = trained.evidence
    figure, axes = subplots(1)
    curve(
        axes[0],
        evidence.scales,
        evidence.effect,
        evidence.random_effects,
        evidence.unit,
        f"layer {trained.choice.layer}",
    )
    axes[0].set_title(f"Effect on {evidence.cases} held-out cases", fontsize=11)
    written = io.StringIO()
    save_figure(figure, written)
    text = written.getvalue()
    return text[text.index("<svg") :]  # without what begins a file


def _answers(trained: Trained) -> str:
    """Return the written answers side by side, as HTML; "" if there are none."""
    evidence, scale = trained.evidence, trained.choice.scale
    if not evidence.answers:
        return ""
    rows = []
    for i, plain in enumerate(evidence.answers[0.0][:4]):
        rows.append(f"<tr><td colspan=2><b>{html.escape(last_words(plain.prompt))}</b>")
        rows += [
            f"<tr><td>{s:+g}<td>{html.escape(evidence.answers[s][i].text)}"
            for s in (-scale, 0.0, scale)
        ]
    return f"<h2>What it writes</h2><table>{''.join(rows)}</table>"


def _number(value: float) -> float | None:
    """JSON has no number that is not finite."""
    return float(value) if math.isfinite(value) else None


def write_text(path: Path, text: str) -> None:
    """Write a file under another name first, so that it is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
