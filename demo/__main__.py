# SPDX-License-Identifier: Apache-2.0
"""`python -m demo`: get a small model (once), find a direction in it, steer along it, and check
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
from demo.model import BUILD, Found, find


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


def run(console: Console, given: Path | None, out: Path, quick: bool) -> bool:
    """The whole demo; True when every check held."""
    from transformers.utils.logging import disable_progress_bar

    from demo import checks, heads, picture, probe, prompts, proof, show, subject
    from demo.engine import close, start
    from vllm.pilot import train
    from vllm.pilot.choice import written_surprise

    disable_progress_bar()
    if given is not None:
        model, chosen = Found(given, given.name, real=False), subject.own_subject(quick)
    else:
        console.print(Rule("A small language model"))
        with _timed(console):
            model = find(console)
        chosen = (subject.real_subject if model.real else subject.grammar_subject)(quick)
    console.print(Rule("A direction: found by capture, tried at layers and scales, tested"))
    with _timed(console):
        bench = start(model.path, "auto" if given or model.real else "float32", heads=model.real)
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
        neutral = checks.neutral_perplexity(bench, trained, chosen.neutral)
        made = checks.examine(choice.scale, evidence, perplexity, neutral)
        show.checks(console, trained, made)
    held = all(check.held for check in made)
    probed = head = None
    if chosen.probed is not None:
        console.print(Rule("The same rows, read"))
        with _timed(console):
            fitted = prompts.CHEERFUL, prompts.GLOOMY
            probed = probe.probe(bench, choice.layer, fitted, chosen.probed)
            probe.show(console, probed)
            if model.real:
                head = heads.find_head(bench, prompts.LISTED, prompts.SENTENCE)
                heads.show(console, head)
                picture.draw_head(out / "head.png", model.name, head)
    proofs = []
    if given is None and not proof.IN_CLONE:
        console.print(
            "`vllm steering check MODEL` compares a model with Hugging Face transformers."
        )
    elif given is None:
        console.print(Rule("Proof on your machine"))
        with _timed(console):
            proofs = proof.prove(BUILD / "tiny-models")
            proof.show(console, proofs)
        held = held and all(p.held for p in proofs)
    close(bench)
    picture.draw(out / "steering.png", model.name, trained)
    assert trained.sweep is not None
    numbers = {
        "model": model.name,
        "layer": choice.layer,
        "scale": choice.scale,
        "unit": evidence.unit,
        "layers": trained.sweep.layers,
        "scales": evidence.scales,
        "sweep_effect": trained.sweep.effect.tolist(),
        "held_out_effect": evidence.effect,
        "random_effect": [effect for _, effect in evidence.random_effects],
        "perplexity": asdict(perplexity),
        "neutral_perplexity": neutral and asdict(neutral),
        "probe": probed and asdict(probed),
        "head": head and [head.layer, head.head, head.score, head.share, head.others],
        "checks": {check.claim: check.held for check in made},
        "proof": {f"{p.architecture} {p.point}": [p.read, p.write, p.moved] for p in proofs},
    }
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1))
    pictures = out / "steering.png", *((out / "head.png",) if head is not None else ())
    console.print(
        f"\nPictures: [bold]{', '.join(map(str, pictures))}[/]  numbers: {out / 'numbers.json'}"
    )
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
