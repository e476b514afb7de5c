# SPDX-License-Identifier: Apache-2.0
"""What one row of the zoo may say, and the sizes its rows share.

A tiny model must not hide a mistake: norms and biases are random (a vector added before or after a
norm of ones with zero bias looks alike), every multiplier in the config differs from 1, every layer
type of an architecture's pattern is present with a window shorter than the prompts, the width of
the heads differs from that of the stream, and the vocabulary is no multiple of vLLM's padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .pictures import VOCAB, Pictures
from .reference import Adapter

HIDDEN = 96
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes
LAYERS = 4
WINDOW = 12
MAX_LENGTH = 128
INNER = 160

# No token ends a sequence: generation length is decided by the test.
NO_SPECIAL_TOKENS: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

COMMON: dict[str, Any] = {
    **NO_SPECIAL_TOKENS,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_LENGTH,
}

NO_HEAD_DIM: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    "num_attention_heads": HIDDEN // HEAD_DIM,
    "num_key_value_heads": 1,
}
"""Sizes for configs that derive the width of a head from that of the stream."""

TIED_STD = 0.25
"""Tied embeddings are also the output matrix: a smaller spread keeps logits of order one."""

HALF_STD = 2.0
"""Of embeddings, for models that GPUs run in 16 bits only: the wider the stream, the less is what
the branches round off."""

LLAMA_LIKE = Adapter(blocks="model.layers", branch=("self_attn",))
SANDWICH = Adapter(blocks="model.layers", branch=("post_attention_layernorm",))
PARALLEL = Adapter(blocks="model.layers", branch=())

Tensors = dict[str, torch.Tensor]
"""A checkpoint: name -> tensor."""


@dataclass(frozen=True)
class TinyModel:
    """One architecture of the conformance table."""

    name: str
    architecture: str
    """vLLM's name, e.g. `LlamaForCausalLM`."""
    config: Callable[[], PretrainedConfig]
    adapter: Adapter = LLAMA_LIKE
    embedding_std: float = 0.7
    model: str | type[PreTrainedModel] = ""
    """The class in transformers, when its name is not `architecture`; or the reference itself."""
    checkpoint: Callable[[Tensors, PretrainedConfig], Tensors] | None = None
    """For an architecture that transformers lacks and another computes: the weights of that other
    one by this one's names."""
    adjust: Callable[[nn.Module], None] | None = None
    """Changes a transformers model, before it is saved and after it is loaded, so that it computes
    what plain vLLM computes, which `note` says, or so that rounding stays small in it. To do it
    twice is to do it once."""
    config_json: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the saved config.json has and transformers' config class has not."""
    reference_config: Mapping[str, Any] = field(default_factory=dict)
    """Config fields the reference must change to compute what plain vLLM computes, and why is said
    where it is set. Not used for the model that is saved."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Engine options it needs beside those of `engine.make_llm`."""
    upstream: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around its engine: mends what upstream cannot run without; `note` says what that is."""
    heads: Callable[[str, torch.Tensor], torch.Tensor] = lambda point, rows: rows
    """What vLLM has at q, k, v or z for rows of the reference, [n, heads, width], where it has them
    in another order, scale or width; attention comes to the same."""
    pictures: Pictures | None = None
    """How it takes images; None for an architecture that reads text only."""
    two_way: bool = False
    """Whether a prompt's tokens see each other both ways, which the reference is told."""
    note: str = ""
    """For the table: what a reader must know about this row."""

    @property
    def reference_class(self) -> type[PreTrainedModel]:
        """The class of the reference."""
        name = self.model or self.architecture
        found = getattr(transformers, name) if isinstance(name, str) else name
        assert issubclass(found, PreTrainedModel)
        return found

    @property
    def points(self) -> tuple[str, ...]:
        """The points the architecture has, in the order of the stream."""
        return self.adapter.points


def sizes(**changes: Any) -> dict[str, Any]:
    """`COMMON` with some fields changed; None removes one that is not a token id."""
    merged = {**COMMON, **changes}
    return {k: v for k, v in merged.items() if v is not None or k in NO_SPECIAL_TOKENS}
