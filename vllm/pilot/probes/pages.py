# SPDX-License-Identifier: Apache-2.0
"""The folder of a probe's result: its file, a card, the numbers, and a page with pictures."""

import html
import io
import json
from pathlib import Path
from typing import Any

import msgspec

from vllm.pilot.picture import histogram, roc_curve, subplots
from vllm.pilot.probes.judging import Evaluation, verdict
from vllm.pilot.probes.statistics import roc_points
from vllm.pilot.report import write_text
from vllm.v1.capture.figures import save_figure
from vllm.v1.probes.files import save_probe
from vllm.v1.probes.probe import ServedProbe

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "svg{max-width:100%;height:auto}pre{overflow:auto;background:#8881;padding:.6rem}"
    ".good,.bad{border-left:6px solid #2a7;padding-left:.7rem}.bad{border-color:#c43}"
)


def save_judged(
    probe: ServedProbe, found: Evaluation, folder: str | Path, command: str = "", keep: bool = False
) -> Path:
    """Write a result: `report.json`, `report.html` and `README.md`.

    Args:
        folder: where to; its name is the probe's.
        command: that made it, for the page.
        keep: whether `NAME.safetensors`, the probe itself, is written too.

    Raises:
        OSError: a file cannot be written; those that are there are whole.
        ImportError: matplotlib is not installed.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    name = path.resolve().name
    if keep:
        save_probe(probe, path / f"{name}.safetensors")
    numbers = as_numbers(probe, found, command)
    write_text(path / "report.json", json.dumps(numbers, indent=1, allow_nan=False))
    write_text(path / "report.html", page(probe, found, name, command))
    write_text(path / "README.md", card(probe, found, name, command, keep))
    return path


def as_numbers(probe: ServedProbe, found: Evaluation, command: str = "") -> dict[str, Any]:
    """Return the numbers of a result, as JSON has them; scores by class, in the data's order."""
    return {
        "held": found.held,
        "model": found.model,
        "command": command,
        "sites": [[*site] for site in probe.sites],
        "head": probe.head.kind,
        "pool": msgspec.to_builtins(probe.pool),
        "threshold": probe.threshold,
        "evaluation": found.numbers(),
        "scores": {
            "positive": found.scores[found.labels].tolist(),
            "negative": found.scores[~found.labels].tolist(),
        },
        "about": probe.about,
    }


def limits(probe: ServedProbe, found: Evaluation) -> list[str]:
    """Return what a reader should know before relying on the probe, a sentence each."""
    made = [
        f"Judged on {len(found.labels)} texts of {found.source}; other data, languages and lengths "
        "were not tried.",
        f"It was judged on the model {found.model} unsteered; other weights, quantizations and "
        "steered rows were not tried.",
        "Nobody tried to write texts that evade it.",
    ]
    if found.over != "generated":
        made.append("The texts were prompts; answers that the model writes itself were not judged.")
    if "calibration" not in probe.about:
        made.append("Its threshold is set at no rate of false positives: `probe calibrate` does.")
    return made


def card(probe: ServedProbe, found: Evaluation, name: str, command: str, keep: bool = True) -> str:
    """Return the probe's card, Markdown."""
    said, training = verdict(found), probe.about.get("training", {})
    at = ", ".join(f"{point}.{layer}" for point, layer in probe.sites)
    rule = json.dumps({"name": name, "probe": "...", "over": found.over})
    lines = [
        "---",
        f"base_model: {json.dumps(found.model)}",
        "library_name: vllm",
        "tags: [probe, activation-probe]",
        "---",
        f"# {name}",
        "",
        f"{said[0].upper()}{said[1:]}.",
        "",
    ]
    if keep:
        lines += [
            f'    probe = load_probe("{name}.safetensors")  # vllm.v1.probes.files',
            f"    rules = [{rule}]  # with the probe in place of ...",
            "",
        ]
    texts = training.get("texts", {})
    rows = {
        "sites": at,
        "head": f"{probe.head.kind}, {probe.head.units} units",
        "pool": json.dumps(msgspec.to_builtins(probe.pool)),
        "rows that count": found.over,
        "score of a text": f"the {found.score} of its rows",
        "AUROC": str(found.area),
        "true positives": str(found.true_rate or "no threshold"),
        "false positives": str(found.false_rate or "no threshold"),
        "judged on": f"{found.source}, SHA-256 {found.digest or 'of no file'}",
        "trained by": str(training.get("method", "others")),
        "trained on": ", ".join(f"{split} {p} + {n}" for split, (p, n) in texts.items()) or "-",
        "command": f"`{command}`" if command else "-",
    }
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    lines += ["", "Intervals are of 95 %: DeLong's of the AUROC, Clopper and Pearson's of rates."]
    lines += ["", "## Limits", "", *(f"* {limit}" for limit in limits(probe, found)), ""]
    return "\n".join(lines)


def page(probe: ServedProbe, found: Evaluation, name: str, command: str) -> str:
    """Return the report as one HTML file, with its pictures."""
    escape = html.escape
    numbers = json.dumps(as_numbers(probe, found, command), indent=1)
    parts = [
        f"<h1>{escape(name)}</h1>",
        f"<p class={'good' if found.held else 'bad'}>{escape(verdict(found))}</p>",
        f"<pre>{escape(command)}</pre>" if command else "",
        f"<figure>{pictures(found)}</figure>",
        "<h2>Limits</h2><ul>",
        *(f"<li>{escape(limit)}" for limit in limits(probe, found)),
        f"</ul><h2>Numbers</h2><pre id=numbers>{escape(numbers)}</pre>",
    ]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def pictures(found: Evaluation) -> str:
    """Return histograms of the scores and the ROC curve, as SVG to stand in a page."""
    figure, axes = subplots(2, 5.2, 4.2)
    sides = {"positive": found.scores[found.labels], "negative": found.scores[~found.labels]}
    histogram(axes[0], sides, f"{found.score} score of a text", found.threshold)
    false, true = roc_points(found.scores, found.labels)
    chosen = None
    if found.true_rate is not None and found.false_rate is not None:
        chosen = found.false_rate.value, found.true_rate.value
    roc_curve(axes[1], false, true, f"AUROC {found.area}", chosen)
    written = io.StringIO()
    save_figure(figure, written)
    text = written.getvalue()
    return text[text.index("<svg") :]  # without what begins a file
