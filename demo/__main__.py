# SPDX-License-Identifier: Apache-2.0
"""`python -m demo`: train a small model (once), find a direction in it, steer along it, and check
every claim. `--model PATH` examines a model of your own instead."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from demo.environment import prepare_environment

BUILD = Path(__file__).parents[1] / "build"


def main() -> int:
    """0 when everything claimed was measured to hold, else 1."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format")
    parser.add_argument(
        "--out", type=Path, default=BUILD / "demo", help="where the picture and the numbers go"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer prompts and random directions: rougher numbers"
    )
    arguments = parser.parse_args()
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        parser.error(
            f"--model {arguments.model}: no config.json there; give a directory in Hugging Face "
            "format, for instance one that `save_pretrained` wrote"
        )
    prepare_environment(small_model=arguments.model is None)
    console = Console(width=None if sys.stdout.isatty() else 120)
    start = time.monotonic()
    with _quiet():
        held = run(console, arguments.model, arguments.out, arguments.quick)
    seconds = time.monotonic() - start
    verdict = "[green]Everything above holds.[/]" if held else "[bold red]Some checks failed.[/]"
    console.print(f"{verdict} {seconds:.0f} s in all.")
    return 0 if held else 1


def run(console: Console, model: Path | None, out: Path, quick: bool) -> bool:
    """The whole demo; True when every check held."""
    from transformers.utils.logging import disable_progress_bar

    from demo import checks, picture, proof, show, subject
    from demo.engine import close, start
    from vllm.pilot import train
    from vllm.pilot.choice import written_surprise

    disable_progress_bar()
    own = model is not None
    chosen = subject.own_subject(quick) if own else subject.grammar_subject(quick)
    if model is None:
        from demo.train import Recipe, cached_model

        console.print(Rule("A small language model"))
        with _timed(console):
            model = cached_model(BUILD / "demo-model", Recipe(), console)
    console.print(Rule("A direction: found by capture, tried at layers and scales, tested"))
    with _timed(console):
        bench = start(model, "auto" if own else "float32")
        trained = train(
            bench,
            chosen.pairs,
            metrics=chosen.metrics,
            say=lambda text: console.print(f"[dim]{text}[/]"),
            **chosen.settings,
        )
        show.directions(console, trained)
        show.sweep(console, trained)
    choice, evidence = trained.choice, trained.evidence
    console.print(Rule("Held-out prompts"))
    with _timed(console):
        show.side_by_side(console, trained)
        show.coloured(console, bench, chosen, trained)
        show.effects(console, trained)
        answers = [evidence.answers[scale] for scale in (-choice.scale, choice.scale, 0.0)]
        perplexity = checks.Perplexity(*(math.exp(written_surprise(bench, a)) for a in answers))
        made = checks.examine(choice.scale, evidence, perplexity)
        show.checks(console, trained, made)
    held = all(check.held for check in made)
    proofs = []
    if not own:
        console.print(Rule("Proof on your machine"))
        with _timed(console):
            proofs = proof.prove(BUILD / "tiny-models")
            proof.show(console, proofs)
        held = held and all(p.held for p in proofs)
    close(bench)
    name = model.name if own else "the demo's model"
    picture.draw(out / "steering.png", name, trained)
    assert trained.sweep is not None
    numbers = {
        "layer": choice.layer,
        "scale": choice.scale,
        "unit": evidence.unit,
        "layers": trained.sweep.layers,
        "scales": evidence.scales,
        "sweep_effect": trained.sweep.effect.tolist(),
        "held_out_effect": evidence.effect,
        "random_effect": [effect for _, effect in evidence.random_effects],
        "perplexity": asdict(perplexity),
        "checks": {check.claim: check.held for check in made},
        "proof": {f"{p.architecture} {p.point}": [p.read, p.write, p.moved] for p in proofs},
    }
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1))
    console.print(f"\nPicture: [bold]{out / 'steering.png'}[/]  numbers: {out / 'numbers.json'}")
    return held


@contextmanager
def _timed(console: Console) -> Iterator[None]:
    start = time.monotonic()
    yield
    console.print(f"[dim]{time.monotonic() - start:.0f} s[/]")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of libraries: they say nothing about this run."""
    # vLLM configures its logger after its first message.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    sys.exit(main())
