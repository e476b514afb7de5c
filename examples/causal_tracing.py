# SPDX-License-Identifier: Apache-2.0
"""Causal tracing: at which token and layer does a model keep what its answer depends on?

    python -m examples.causal_tracing [--model DIR --prompt ... --subject ... --answer ... ...]

After Meng et al. 2022 (arXiv 2202.05262), with names swapped in place of noise as Zhang and Nanda
2023 (arXiv 2309.16042) advise. Where the subject enters the first block, the rows of another are
put in, which costs the answer. Then, one at a time, the row of each token at each layer is restored
to what it was in the clean run. Where that brings the answer back, the model kept it. All of it is
`replace`: rows captured in one run put into others, in one `generate` call.

Without `--model` the demo's small model is asked for a pronoun: who is "Lady Finch"?
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from demo.environment import prepare_environment

if TYPE_CHECKING:
    from vllm import LLM

BUILD = Path(__file__).parents[1] / "build"
Ops = list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """A prompt, a part of it, and two continuations whose odds depend on that part."""

    prompt: str = "After supper, Lady Finch returned to the sunny garden."
    subject: str = "Lady Finch"
    swapped: tuple[str, ...] = ("Judge Barrow",)
    """Others in its place, of as many tokens."""
    answer: str = " She"
    other: str = " He"


@dataclass(frozen=True)
class Traced:
    """Log-odds of the answer against the other one, in nats."""

    tokens: list[str]
    subject: list[int]
    """Positions of the subject."""
    clean: float
    corrupted: torch.Tensor
    """[swapped]."""
    restored: torch.Tensor
    """[swapped, layers, positions]."""

    @property
    def recovered(self) -> torch.Tensor:
        """[layers, positions]: 0 is the corrupted answer, 1 the clean one."""
        lost = self.clean - self.corrupted.mean()
        return (self.restored.mean(0) - self.corrupted.mean()) / lost


def start(model: Path, dtype: Literal["auto", "float32"]) -> LLM:
    """An engine that may put rows in the place of others."""
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype=dtype,
        enable_steering=True,
        steering_families=["add", "replace"],
        capture_consumers=["inline"],
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 28,
        seed=0,
    )


class Tracer:
    """One question and one engine: the clean run, and anything changed in it."""

    def __init__(self, llm: LLM, question: Question) -> None:
        self.llm = llm
        self.question = question
        tokenizer = llm.get_tokenizer()
        self.prompt: list[int] = tokenizer.encode(question.prompt)
        self.tokens = [tokenizer.decode([token]) for token in self.prompt]
        self.choice = [
            tokenizer.encode(text, add_special_tokens=False)[0]
            for text in (question.answer, question.other)
        ]
        whole = self._capture(self.prompt, {"hooks": {"post_block": "all"}})
        self.clean_rows = torch.stack([whole[site].values for site in sorted(whole)])
        """[layers, positions, hidden]: `post_block`."""
        self.subject, self.subject_rows = self._entering(self.prompt, question.subject)
        """The subject's positions, and [subject, hidden]: what the first block is given."""

    def _capture(self, prompt: list[int], what: dict[str, Any]) -> Any:
        request = {"inline": {"positions": "all_prompt", **what}}
        (output,) = self._generate([prompt], [{"capture": request}])
        return output.capture_results["inline"].payload

    def _entering(self, prompt: list[int], text: str) -> tuple[list[int], torch.Tensor]:
        where = {"hooks": {"pre_attn": [0]}, "positions": {"text": text}}
        rows = self._capture(prompt, where)["pre_attn", 0]
        return rows.positions.tolist(), rows.values

    def odds(self, changes: Sequence[Ops]) -> torch.Tensor:
        """[len(changes)]: log-odds under each list of operations, all in one call."""
        fields = [{"steering": ops} if ops else {} for ops in changes]
        outputs = self._generate([self.prompt] * len(fields), fields)
        found = []
        for output in outputs:
            logprobs = output.outputs[0].logprobs[0]
            answer, other = (logprobs[token].logprob for token in self.choice)
            found.append(answer - other)
        return torch.tensor(found)

    def _generate(
        self, prompts: Sequence[list[int]], fields: Sequence[dict[str, Any]]
    ) -> list[Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        # With two tokens allowed, their processed log-probabilities are all there is.
        common: dict[str, Any] = {"max_tokens": 1, "logprobs": 2, "allowed_token_ids": self.choice}
        return self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            [SamplingParams(**common, **more) for more in fields],
            use_tqdm=False,
        )

    def corrupt(self, other: str) -> dict[str, Any]:
        """Another subject's rows where this one's enter the first block.

        Raises:
            ValueError: it has not as many tokens.
        """
        text = self.question.prompt.replace(self.question.subject, other, 1)
        positions, rows = self._entering(self.llm.get_tokenizer().encode(text), other)
        if positions != self.subject:
            raise ValueError(f"{other!r} has {len(positions)} tokens, not {len(self.subject)}")
        return replace("pre_attn", 0, self.subject, rows)

    def restore(self, layer: int, positions: list[int]) -> dict[str, Any]:
        """The clean rows of these tokens behind block `layer`."""
        return replace("post_block", layer, positions, self.clean_rows[layer, positions])

    def trace(self) -> Traced:
        """Every token at every layer, for each of the swapped subjects."""
        layers, positions = self.clean_rows.shape[:2]
        places = [(layer, [p]) for layer in range(layers) for p in range(positions)]
        changes: list[Ops] = [[]]
        swapped = self.question.swapped
        for other in swapped:
            wrong = self.corrupt(other)
            changes += [[wrong], *([wrong, self.restore(*place)] for place in places)]
        clean, *rest = self.odds(changes)
        table = torch.stack(rest).view(len(swapped), 1 + len(places))
        return Traced(
            tokens=self.tokens,
            subject=self.subject,
            clean=float(clean),
            corrupted=table[:, 0],
            restored=table[:, 1:].view(len(swapped), layers, positions),
        )


def replace(point: str, layer: int, positions: list[int], values: torch.Tensor) -> dict[str, Any]:
    """`values` [len(positions), hidden] in the place of the rows there."""
    return {
        "op": "replace",
        "point": point,
        "layers": layer,
        "positions": positions,
        "values": values,
    }


def draw(target: Path, traced: Traced, question: Question) -> None:
    """The heat map, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    recovered = traced.recovered.T.numpy()
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
    prepare_environment(small_model=given.model is None)
    model = given.model
    if model is None:
        from rich.console import Console

        from demo.train import Recipe, cached_model

        model = cached_model(BUILD / "demo-model", Recipe(), Console())
    llm = start(model, "float32" if given.model is None else "auto")
    traced = Tracer(llm, question).trace()
    save(given.out, traced, question)
    print(
        f"log-odds of {question.answer!r}: clean {traced.clean:+.2f}, "
        f"corrupted {traced.corrupted.mean():+.2f}"
    )
    print(f"picture: {given.out / 'heatmap.png'}")


if __name__ == "__main__":
    main()
