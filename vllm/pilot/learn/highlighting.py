# SPDX-License-Identifier: Apache-2.0
"""Token Highlighter (Hu et al. 2024, arXiv 2412.18171): which tokens of a prompt make a model say
yes, and the same prompt with those tokens softly removed.

The affirmation loss is -log P of an affirmative beginning of the answer. A token's influence is the
length of this loss's gradient at its embedding. The embeddings of the most influential tokens are
multiplied by a factor below 1 (soft removal), and the model answers.

The embedding is the stream as layer 0 reads it: `pre_attn` of layer 0. Models that add positions
there (GPT-2) have those scaled, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.pilot.learn.losses import completion_nats
from vllm.pilot.learn.model import Site, TorchModel
from vllm.pilot.pairs import Text, last_words
from vllm.pilot.picture import named_bars, subplots
from vllm.pilot.rows import Encoded
from vllm.v1.capture.figures import save_figure

AFFIRMATION = "Sure, I'd like to help you with this."
"""The answer of the paper's loss."""

EMBEDDING: Site = ("pre_attn", 0)


@dataclass(frozen=True)
class Highlights:
    """The tokens of a prompt, how much each makes the model say yes, and which are removed."""

    ids: list[int]
    tokens: list[str]
    counted: list[int]
    """Positions of the user's tokens."""
    influence: np.ndarray
    """float64 [counted]: length of the gradient, nats for a unit of the embedding."""
    chosen: list[int]
    """Positions that are softly removed, the most influential first."""
    factor: float
    affirmation: tuple[float, float]
    """log P of the affirmative answer in nats: plain, and with soft removal."""
    hidden: int

    def __repr__(self) -> str:
        """Show the chosen tokens."""
        shown = ", ".join(f"{self.tokens[at]!r}" for at in self.chosen)
        plain, removed = self.affirmation
        return f"Highlights({shown}; affirmation {plain:.2f} -> {removed:.2f} nats)"

    def operations(self) -> list[dict[str, Any]]:
        """Return the soft removal as `SamplingParams.steering` for this prompt's tokens.

        `(1 - alpha) h + alpha 0` is the factor times the embedding. The engine needs the family
        `replace`.
        """
        return [
            {
                "op": "replace",
                "point": EMBEDDING[0],
                "layers": [EMBEDDING[1]],
                "positions": sorted(self.chosen),
                "values": torch.zeros(self.hidden),
                "alpha": 1.0 - self.factor,
            }
        ]

    def draw(self, target: str | Path) -> None:
        """Write the influence of each token as a picture, chosen ones darker; PNG or SVG.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = subplots(1, height=1.5 + 0.2 * len(self.counted))
        names = [repr(self.tokens[at]) for at in self.counted]
        chosen = [self.counted.index(at) for at in self.chosen]
        named_bars(axes[0], names, self.influence, "influence on saying yes", chosen)
        save_figure(figure, target)


def highlight(
    model: TorchModel,
    prompt: Text,
    *,
    affirmation: str = AFFIRMATION,
    share: float = 0.25,
    factor: float = 0.5,
) -> Highlights:
    """Find which of the user's tokens make the model say yes, and what it says without them.

    Args:
        model: a checkpoint in transformers.
        prompt: a text, whose tokens all count, but for special ones; or a chat, of whose last
            message the tokens count.
        affirmation: the answer that says yes.
        share: the share of the counted tokens that is removed; one at least.
        factor: what an embedding is multiplied by; 0 removes it.

    Raises:
        ValueError: a setting is none, the tokenizer does not say where tokens are, or the prompt
            or the affirmation has no tokens.
    """
    if not 0 < share <= 1 or not 0 <= factor < 1:
        raise ValueError(f"share, factor: {share}, {factor}; above 0 to 1, and from 0 to below 1")
    ids, counted = _counted(model, prompt)
    answer = model.encode(affirmation, special=False)
    if not answer or not counted:
        empty = "prompt" if answer else "affirmation"
        raise ValueError(f"{empty}: has no tokens; give a text that has")
    whole = Encoded([*ids, *answer], len(ids))
    leaf: list[torch.Tensor] = []

    def keep(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        leaf.append(stream.detach().requires_grad_())
        return leaf[0]

    nats = completion_nats(model, [whole], {EMBEDDING: keep})
    [gradient] = torch.autograd.grad(-nats.sum(), leaf)
    influence = gradient[0, counted].double().norm(dim=-1).cpu().numpy()
    count = max(1, round(share * len(counted)))
    chosen = [counted[at] for at in np.argsort(-influence, kind="stable")[:count]]
    with torch.no_grad():
        removed = completion_nats(model, [whole], {EMBEDDING: scaled(chosen, factor)})
    return Highlights(
        ids=ids,
        tokens=[model.tokenizer.decode([token]) for token in ids],
        counted=counted,
        influence=influence,
        chosen=chosen,
        factor=factor,
        affirmation=(float(nats.detach()), float(removed)),
        hidden=model.hidden,
    )


def scaled(positions: Sequence[int], factor: float) -> Any:
    """Return a function that multiplies rows of the stream, as `TorchModel.log_probs` takes it."""

    def change(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        by = torch.ones(stream.shape[1], 1, dtype=stream.dtype, device=stream.device)
        by[list(positions)] = factor
        return stream * by

    return change


def _counted(model: TorchModel, prompt: Text) -> tuple[list[int], list[int]]:
    """The prompt's tokens, and the positions of the user's."""
    text = prompt
    if not isinstance(prompt, str):
        messages = list(map(dict, prompt))
        text = model.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    if not model.tokenizer.is_fast:
        raise ValueError("prompt: the tokenizer does not say where tokens are; take a fast one")
    encoded = model.tokenizer(text, add_special_tokens=text is prompt, return_offsets_mapping=True)
    said = last_words(prompt)
    start = str(text).rindex(said) if said in str(text) else 0
    stop = start + len(said) if said in str(text) else len(str(text))
    spans = encoded["offset_mapping"]
    counted = [i for i, (a, b) in enumerate(spans) if a < b and b > start and a < stop]
    return list(encoded["input_ids"]), counted
