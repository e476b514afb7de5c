# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's language model: a small Llama on the grammar's text, in a minute or two.

The result is a directory in Hugging Face format, cached under a key made of everything it depends
on, and complete as soon as it has its final name.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import openings, training_text

END = "<|endoftext|>"
_SOURCES = ("corpus.py", "train.py")


@dataclass(frozen=True)
class Recipe:
    """Everything the trained model depends on beside the grammar. Rates are per step."""

    hidden: int = 128
    layers: int = 5
    heads: int = 4
    intermediate: int = 320
    vocabulary: int = 512
    passages: int = 20_000
    batch: int = 16
    steps: int = 650
    matrix_rate: float = 0.03
    other_rate: float = 0.008
    seed: int = 0

    def key(self) -> str:
        """16 hex digits that change with the recipe, the grammar, this file and torch."""
        digest = hashlib.sha256(repr((asdict(self), torch.__version__)).encode())
        for name in _SOURCES:
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()[:16]


def cached_model(root: Path, recipe: Recipe, console: Console) -> Path:
    """The directory of the trained model below `root`; trains it if it is not there yet."""
    final = root / recipe.key()
    if final.is_dir():
        console.print(f"Trained model found in [bold]{final}[/] (delete it to train again).")
        return final
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="unfinished-") as scratch:
        unfinished = Path(scratch) / "model"
        train(unfinished, recipe, console)
        for old in root.iterdir():  # earlier recipes; another run's unfinished one is its own
            if old.is_dir() and not old.name.startswith("unfinished-"):
                shutil.rmtree(old)
        os.rename(unfinished, final)
    console.print(f"Saved in Hugging Face format in [bold]{final}[/].")
    return final


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`, with one special token, the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> LlamaForCausalLM:
    """A float32 Llama with random weights."""
    end = int(tokenizer.vocab[END])
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
            dtype="float32",
        )
    )


def train(target: Path, recipe: Recipe, console: Console) -> None:
    """Trains a model and its tokenizer and saves both in the directory `target`."""
    texts = list(training_text(recipe.passages, recipe.seed))
    tokenizer = make_tokenizer(texts[:4000], recipe.vocabulary)
    model = make_model(tokenizer, recipe)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    console.print(
        f"Training a Llama of {recipe.layers} layers, {millions:.1f} M parameters, on CPU; "
        "once, a minute or two."
    )
    tokens = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    batches = _batches(tokens, recipe)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = (
        Muon(matrices, lr=recipe.matrix_rate),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, _rate(recipe.steps)) for o in optimizers]
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=console,
    )
    sample_steps = {recipe.steps * i // 4 for i in range(1, 5)}
    with bar:
        task = bar.add_task("", total=recipe.steps, loss=float("nan"))
        mean = 0.0
        for step in range(1, recipe.steps + 1):
            loss = _loss(model, next(batches), tokenizer.eos_token_id)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            model.zero_grad()
            mean = loss.item() if step == 1 else 0.95 * mean + 0.05 * loss.item()
            bar.update(task, advance=1, loss=mean)
            if step in sample_steps:
                bar.console.print(f"[dim]step {step:>4}[/]  {escape(_sample(model, tokenizer))}")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) with Newton-Schulz steps in float32.

    `torch.optim.Muon` takes them in bfloat16. A processor without bfloat16 products needs twenty
    times as long for that as for float32.
    """

    momentum, decay, iterations = 0.95, 0.3, 5
    quintic = (3.4445, -4.7750, 2.0315)

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move each matrix by its orthogonalised gradient with Nesterov momentum."""
        for group in self.param_groups:
            for matrix in group["params"]:
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - self.momentum)
                rows, columns = matrix.shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                matrix.mul_(1 - group["lr"] * self.decay)
                matrix.sub_(self._orthogonal(matrix.grad.lerp(mean, self.momentum)), alpha=rate)

    def _orthogonal(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return `gradient` with singular values near 1."""
        tall = gradient.shape[0] > gradient.shape[1]
        wide = gradient.T if tall else gradient
        wide = wide / wide.norm().clamp(min=1e-7)
        a, b, c = self.quintic
        for _ in range(self.iterations):
            gram = wide @ wide.T
            wide = a * wide + (b * gram + c * gram @ gram) @ wide
        return wide.T if tall else wide


def _rate(steps: int) -> Callable[[int], float]:
    """Rate multiplier by step: up over the first twentieth, down over the second half."""

    def multiplier(step: int) -> float:
        return min((step + 1) / (0.05 * steps), 1.0, max((steps - step) / (0.5 * steps), 0.02))

    return multiplier


def _batches(tokens: list[list[int]], recipe: Recipe) -> Iterator[list[list[int]]]:
    """Endless batches of passages of similar length, which leaves little padding to compute."""
    rng = random.Random(recipe.seed)
    while True:
        pool = sorted(rng.sample(tokens, min(len(tokens), 16 * recipe.batch)), key=len)
        cut = [pool[i : i + recipe.batch] for i in range(0, len(pool), recipe.batch)]
        rng.shuffle(cut)
        yield from cut


def _loss(model: LlamaForCausalLM, batch: list[list[int]], end: int) -> torch.Tensor:
    """Mean next-token cross entropy in nats over a batch, padding left out."""
    longest = max(map(len, batch))
    inputs = torch.tensor([ids + [end] * (longest - len(ids)) for ids in batch])[:, :-1]
    targets = torch.tensor([ids[1:] + [-100] * (longest - len(ids)) for ids in batch])
    logits = model(inputs).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100
    )


@torch.no_grad()
def _sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """A passage the model writes now, greedily, after an opening it is not trained on."""
    ids: list[int] = tokenizer(openings("sweep")[0].text())["input_ids"]
    for _ in range(32):
        following = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if following == tokenizer.eos_token_id:
            break
        ids.append(following)
    return str(tokenizer.decode(ids))
