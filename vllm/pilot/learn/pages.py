# SPDX-License-Identifier: Apache-2.0
"""The folder of an edit that was learned: a module, its card, and the numbers."""

import json
import math
from pathlib import Path
from typing import Any

from vllm.pilot.learn.training import Learned
from vllm.pilot.report import write_text
from vllm.v1.steering.files import save


def save_learned(learned: Learned, folder: str | Path, command: str = "") -> Path:
    """Write a result: `report.json`, `README.md`, and `NAME.safetensors` where it held.

    NAME is the folder's; the file is a module that the engine registers.

    Raises:
        OSError: a file cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    name = path.resolve().name
    if learned.evidence.held:
        save(path / f"{name}.safetensors", learned.module(), learned.model)
    numbers = json.dumps(as_numbers(learned, command), indent=1, allow_nan=False)
    write_text(path / "report.json", numbers)
    write_text(path / "README.md", card(learned, name, command))
    return path


def as_numbers(learned: Learned, command: str = "") -> dict[str, Any]:
    """The numbers of a result, as JSON has them."""
    said = dict(learned.evidence.__dict__)
    return {
        "held": learned.evidence.held,
        "model": learned.model,
        "command": command,
        "data": {"source": learned.data.source, "sha256": learned.data.digest},
        "settings": {
            **learned.settings.__dict__,
            "layers": [layer for _, layer in learned.edits],
        },
        "strength": next(iter(learned.edits.values())).strength,
        "losses": {
            "train": [train for train, _ in learned.losses],
            "choose": [choose for _, choose in learned.losses],
        },
        "evidence": {**said, "error": said["error"] if math.isfinite(said["error"]) else None},
    }


def verdict(learned: Learned) -> str:
    """Return the result in a sentence."""
    said = learned.evidence
    numbers = (
        f"{said.margin:+.3g} nats, wanted against other, standard error {said.error:.2g}, random "
        f"vectors at most {max(said.randoms):.3g}; wanted alone {said.wanted:+.3g} nats; "
        f"{said.cases} held-out pairs"
    )
    if said.kl is not None:
        numbers += f"; {said.kl:.2g} nats a token elsewhere"
    return (
        numbers if said.held else f"no result: no better than random vectors or chance: {numbers}"
    )


def card(learned: Learned, name: str, command: str) -> str:
    """The model card."""
    settings, families = learned.settings, []
    said = verdict(learned)
    if learned.module().get("ops"):
        families = [" --steering-families add low_rank"]
        if (settings.rank or 4) > 4:
            families.append(f" --max-steering-ops {settings.rank}")
    lines = [
        "---",
        f"base_model: {json.dumps(learned.model)}",
        "library_name: vllm",
        "tags: [steering-vector, activation-steering, representation-finetuning]",
        "---",
        f"# {name}",
        "",
        f"{said[0].upper()}{said[1:]}.",
        "",
    ]
    if learned.evidence.held:
        lines += [
            f"    vllm serve {learned.model} --enable-steering{''.join(families)} "
            f"--steering-modules {name}={name}.safetensors",
            "",
            f'Requests name it: `"steering_modules": [["{name}", 1.0]]`. It acts at every token of '
            "prompt and answer; scale 1 is what was learned.",
            "",
        ]
    sites = ", ".join(f"{point} of layer {layer}" for point, layer in learned.edits)
    lines += [
        "| | |",
        "|---|---|",
        f"| method | {settings.method}, seed {settings.seed} |",
        f"| sites | {sites} |",
        f"| passes | {len(learned.losses)} |",
        f"| data | {learned.data.source}, SHA-256 {learned.data.digest or 'of no file'} |",
        *([f"| command | `{command}` |"] if command else []),
        "",
        "## Limits",
        "",
        f"* Measured on {learned.evidence.cases} held-out pairs of the same data, in transformers; "
        "other prompts were not tried.",
        "* What else of the model it changes is measured on the neutral texts alone.",
        "",
    ]
    return "\n".join(lines)
