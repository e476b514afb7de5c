# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: how an architecture writes them, and what its processor makes of them.

The processor is that of transformers, with a tokenizer of `VOCAB` words. The engine gets a prompt
as text and images, and expands it itself; the reference gets what the processor made. So that both
did the same is compared with the rest: a prompt here holds the expanded token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, ProcessorMixin

VOCAB = 251
_NEWLINES = tuple("\n" * n for n in range(1, 5))
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""What processors return beside the ids, with a number for each."""


@dataclass(frozen=True)
class Pictures:
    """How an architecture takes images."""

    processor: Callable[[PreTrainedTokenizerFast], ProcessorMixin]
    written: str
    """What stands for an image in a text."""
    specials: tuple[str, ...]
    """The special tokens that the processor needs: the last ids, in this order."""
    named: Mapping[str, str] = field(default_factory=dict)
    """The attributes by which the processor asks the tokenizer for some of them."""
    sizes: tuple[tuple[int, int], ...] = ((64, 64), (96, 64))
    """Width and height of its two images, in pixels."""
    causal: bool = False
    """Whether the reference is not told where images are: an architecture whose image tokens see
    each other both ways, which upstream does on GPUs only."""

    def __post_init__(self) -> None:
        assert set(self.named.values()) <= set(self.specials)

    def id_of(self, special: str) -> int:
        """The token id of a special token."""
        return VOCAB - len(self.specials) + self.specials.index(special)

    @property
    def images(self) -> list[Image.Image]:
        """Random pixels, no image those of another."""
        return [noise(*size, seed) for seed, size in enumerate(self.sizes, 1)]

    @property
    def num_words(self) -> int:
        """Ids from 0 below this are words of text."""
        return VOCAB - len(self.specials) - len(_NEWLINES)

    def make_processor(self) -> ProcessorMixin:
        """The processor, with a tokenizer whose words are w0, w1, ..."""
        words = [f"w{i}" for i in range(self.num_words)]
        vocabulary = {w: i for i, w in enumerate((*words, *_NEWLINES, *self.specials))}
        backend = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(" ", "removed"),
                pre_tokenizers.Split(Regex("\n+"), "isolated"),
            ]
        )
        backend.add_special_tokens(list(self.specials))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, extra_special_tokens=dict(self.named)
        )
        return self.processor(tokenizer)


class Shown(list[int]):
    """A prompt: the token ids, images expanded, and what they were made of."""

    def __init__(self, pictures: Pictures, text: str, images: Sequence[Image.Image]) -> None:
        self.text, self.images = text, list(images)
        self.num_words = pictures.num_words
        made = pictures.make_processor()(text=text, images=self.images or None, return_tensors="pt")
        super().__init__(made.pop("input_ids")[0].tolist())
        made.pop("attention_mask", None)
        if pictures.causal:
            for name in _PER_TOKEN:
                made.pop(name, None)
        self._made = {
            name: value.float() if value.is_floating_point() else value
            for name, value in made.items()
        }

    def inputs(self, length: int) -> dict[str, Any]:
        """What the reference gets beside `length` token ids that begin with these."""
        more = torch.zeros(1, length - len(self), dtype=torch.int64)
        return {
            name: torch.cat([value, more], dim=1) if name in _PER_TOKEN else value
            for name, value in self._made.items()
        }


def noise(width: int, height: int, seed: int) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompts(pictures: Pictures, seed: int = 1) -> list[Shown]:
    """Random words around two images, around one that comes first, and without any."""
    generator = torch.Generator().manual_seed(seed)

    def words(n: int) -> str:
        ids = torch.randint(0, pictures.num_words, (n,), generator=generator)
        return " ".join(f"w{i}" for i in ids.tolist())

    image, images = pictures.written, pictures.images
    return [
        Shown(pictures, f"{words(6)} {image} {words(3)} {image} {words(5)}", images),
        Shown(pictures, f"{image} {words(9)}", images[1:]),
        Shown(pictures, words(5), ()),
    ]
