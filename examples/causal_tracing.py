# SPDX-License-Identifier: Apache-2.0
"""Causal tracing: at which token and layer does a model keep what its answer depends on?

    python -m examples.causal_tracing [--model DIR --prompt ... --subject ... --answer ... ...]

After Meng et al. 2022 (arXiv 2202.05262), with names swapped in place of noise as Zhang and Nanda
2023 (arXiv 2309.16042) advise: another subject costs the answer. Then, one at a time, the row of
each token at each layer is restored to what it was in the clean run. Where that brings the answer
back, the model kept it. All of it is `vllm.pilot.patch_sweep`, once for each of the others.

Without `--model` SmolLM2-135M-Instruct (93 MB, once) is asked for a capital.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from demo.environment import prepare_environment

if TYPE_CHECKING:
    from vllm import LLM

BUILD = Path(__file__).parents[1] / "build"


@dataclass(frozen=True)
class Question:
    """A prompt, a part of it, and two continuations whose odds depend on that part."""

    prompt: str = "The capital of France is"
    subject: str = "France"
    swapped: tuple[str, ...] = ("Italy",)
    """Others in its place, of as many tokens."""
    answer: str = " Paris"
    other: str = " Rome"


@dataclass(frozen=True)
class Traced:
    """Log-odds of the answer against the other one, in nats."""

    tokens: list[str]
    subject: list[int]
    """Positions of the tokens that were swapped."""
    clean: float
    corrupted: np.ndarray
    """[swapped]."""
    restored: np.ndarray
    """[swapped, layers, positions]."""
    noise_floor: float
    """The largest change where a row is replaced by itself."""

    @property
    def recovered(self) -> np.ndarray:
        """[layers, positions]: 0 is the corrupted answer, 1 the clean one."""
        corrupted = self.corrupted.mean()
        share: np.ndarray = (self.restored.mean(0) - corrupted) / (self.clean - corrupted)
        return share


def start(model: Path, dtype: Literal["auto", "float32"]) -> LLM:
    """An engine that may put rows in the place of others."""
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype=dtype,
        enable_steering=True,
        steering_families=["add", "replace"],
        capture_consumers=["inline"],
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 28,
        seed=0,
    )


def trace(llm: LLM, question: Question) -> Traced:
    """Every token at every layer, for each of the swapped subjects.

    Raises:
        ValueError: one of them has not as many tokens.
    """
    from vllm.pilot import patch_sweep

    tokenizer = llm.get_tokenizer()
    answer, other = (
        tokenizer.encode(text, add_special_tokens=False)[0]
        for text in (question.answer, question.other)
    )
    clean = tokenizer.encode(question.prompt)
    subject: set[int] = set()
    found = []
    for name in question.swapped:
        prompt = tokenizer.encode(question.prompt.replace(question.subject, name, 1))
        found.append(patch_sweep(llm, prompt, clean, answer=answer, other=other))
        subject |= {i for i, (a, b) in enumerate(zip(clean, prompt, strict=True)) if a != b}
    floors = [one.noise_floor for one in found if one.noise_floor is not None]
    assert found[0].clean is not None
    return Traced(
        tokens=[tokenizer.decode([token]) for token in clean],
        subject=sorted(subject),
        clean=found[0].clean,
        corrupted=np.array([one.corrupt for one in found]),
        restored=np.stack([one.values[0] for one in found]),
        noise_floor=max(floors),
    )


def draw(target: Path, traced: Traced, question: Question) -> None:
    """The heat map, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    recovered = traced.recovered.T
    positions, layers = recovered.shape
    figure, axes = plt.subplots(figsize=(2.5 + 0.6 * layers, 1.6 + 0.3 * positions))
    image = axes.imshow(recovered, cmap="Purples", vmin=0, vmax=1, aspect="auto")
    names = [
        f"{token!r}*" if position in traced.subject else repr(token)
        for position, token in enumerate(traced.tokens)
    ]
    axes.set_yticks(range(positions), names, fontsize=8, family="monospace")
    axes.set_xticks(range(layers), [str(layer) for layer in range(layers)])
    axes.set_xlabel("layer whose output is restored (* corrupted)")
    axes.set_title(f"{question.answer!r} or {question.other!r}?", fontsize=10)
    figure.colorbar(image, ax=axes, label="share of the log-odds recovered")
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    plt.close(figure)


def save(out: Path, traced: Traced, question: Question) -> None:
    """`heatmap.png` and `numbers.json` in the folder `out`."""
    draw(out / "heatmap.png", traced, question)
    numbers = {
        "prompt": question.prompt,
        "tokens": traced.tokens,
        "subject": traced.subject,
        "clean": traced.clean,
        "corrupted": traced.corrupted.tolist(),
        "noise_floor": traced.noise_floor,
        "recovered": traced.recovered.tolist(),
    }
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.causal_tracing", description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format")
    parser.add_argument("--out", type=Path, default=BUILD / "causal-tracing")
    parser.add_argument("--swapped", nargs="+", default=Question.swapped, help="other subjects")
    for field in ("prompt", "subject", "answer", "other"):
        parser.add_argument(f"--{field}", default=getattr(Question, field))
    given = parser.parse_args()
    question = Question(
        given.prompt, given.subject, tuple(given.swapped), given.answer, given.other
    )
    prepare_environment(small_model=False)
    from vllm.pilot.checkpoints import checkpoint

    llm = start(given.model or checkpoint(), "float32" if given.model is None else "auto")
    traced = trace(llm, question)
    save(given.out, traced, question)
    print(
        f"log-odds of {question.answer!r}: clean {traced.clean:+.2f}, "
        f"corrupted {traced.corrupted.mean():+.2f}"
    )
    print(f"a row replaced by itself changes {traced.noise_floor:.2g}")
    print(f"picture: {given.out / 'heatmap.png'}")


if __name__ == "__main__":
    main()
