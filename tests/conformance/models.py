# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, one row per architecture, saved by transformers and loaded by both sides.

A model here must not hide a mistake: norms and biases are random (a vector added before or after a
norm of ones with zero bias looks alike), every multiplier in the config differs from 1, every layer
type of an architecture's pattern is present with a window shorter than the prompts, the width of
the heads differs from that of the stream, and the vocabulary is no multiple of vLLM's padding.

There is no tokenizer: engines start with `skip_tokenizer_init=True` and prompts are token ids,
`{"prompt_token_ids": [...]}`. To add an architecture, add a row to `_ROWS`.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .reference import Adapter

HIDDEN = 96
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes
LAYERS = 4
VOCAB = 251
WINDOW = 12
MAX_LENGTH = 128

# No token ends a sequence: generation length is decided by the test.
_NO_SPECIAL_TOKENS: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_COMMON: dict[str, Any] = {
    **_NO_SPECIAL_TOKENS,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_LENGTH,
}


@dataclass(frozen=True)
class TinyModel:
    """One architecture of the conformance table."""

    name: str
    architecture: str
    """The class in transformers and vLLM, e.g. `LlamaForCausalLM`."""
    config: Callable[[], PretrainedConfig]
    adapter: Adapter
    embedding_std: float = 0.7
    reference_config: Mapping[str, Any] = field(default_factory=dict)
    """Config fields the reference must change to compute what plain vLLM computes, and why is said
    where it is set. Not used for the model that is saved."""

    @property
    def points(self) -> tuple[str, ...]:
        """The points the architecture has, in the order of the stream."""
        return self.adapter.points


_LLAMA_LIKE = Adapter(blocks="model.layers", branch="self_attn")
_SANDWICH = Adapter(blocks="model.layers", branch="post_attention_layernorm")
_PARALLEL = Adapter(blocks="model.layers", branch=None)

# Tied embeddings are also the output matrix: a smaller spread keeps logits of order one.
_TIED_STD = 0.25

_ROWS = (
    TinyModel(
        "llama",
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(
            **_COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
        ),
        _LLAMA_LIKE,
    ),
    TinyModel(
        "qwen3",
        "Qwen3ForCausalLM",
        # vLLM gives Qwen3 a bias on q, k, v only, transformers on the output too; real checkpoints
        # have none. The norms on q and k are what this architecture adds.
        lambda: transformers.Qwen3Config(**_COMMON, tie_word_embeddings=False),
        _LLAMA_LIKE,
    ),
    TinyModel(
        "qwen2",
        "Qwen2ForCausalLM",
        lambda: transformers.Qwen2Config(**_no_head_dim(), tie_word_embeddings=True),
        _LLAMA_LIKE,
        embedding_std=_TIED_STD,
    ),
    TinyModel(
        "mistral",
        "MistralForCausalLM",
        lambda: transformers.MistralConfig(**_COMMON, sliding_window=WINDOW),
        _LLAMA_LIKE,
    ),
    TinyModel(
        "gemma",
        "GemmaForCausalLM",
        lambda: transformers.GemmaConfig(**_COMMON),
        _LLAMA_LIKE,
        embedding_std=_TIED_STD,
    ),
    TinyModel(
        "gemma2",
        "Gemma2ForCausalLM",
        lambda: transformers.Gemma2Config(
            **_COMMON,
            attention_bias=True,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        ),
        _SANDWICH,
        embedding_std=_TIED_STD,
    ),
    TinyModel(
        "gpt2",
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(
            **_NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_inner=160,
            n_layer=LAYERS,
            n_head=HIDDEN // HEAD_DIM,
            n_positions=MAX_LENGTH,
        ),
        Adapter(blocks="transformer.h", branch="attn"),
        embedding_std=_TIED_STD,
    ),
    TinyModel(
        "gptj",
        "GPTJForCausalLM",
        lambda: transformers.GPTJConfig(
            **_NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_inner=160,
            n_layer=LAYERS,
            n_head=HIDDEN // HEAD_DIM,
            n_positions=MAX_LENGTH,
            rotary_dim=16,
            tie_word_embeddings=False,
        ),
        Adapter(blocks="transformer.h", branch=None),
    ),
    TinyModel(
        "cohere",
        "CohereForCausalLM",
        lambda: transformers.CohereConfig(**_no_head_dim(), logit_scale=0.4, use_qk_norm=True),
        _PARALLEL,
        embedding_std=_TIED_STD,
    ),
    TinyModel(
        "cohere2",
        "Cohere2ForCausalLM",
        lambda: transformers.Cohere2Config(
            **_COMMON,
            logit_scale=0.4,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        ),
        _PARALLEL,
        embedding_std=_TIED_STD,
        # vLLM 0.32.0 lets a Cohere2 window see one token more than transformers 5.19 does
        # (commandr.py says it follows the training convention).
        reference_config={"sliding_window": WINDOW + 1},
    ),
)

MODELS: dict[str, TinyModel] = {row.name: row for row in _ROWS}


def _no_head_dim() -> dict[str, Any]:
    """Sizes for configs that derive the width of a head from that of the stream."""
    sizes = {**_COMMON, "num_attention_heads": HIDDEN // HEAD_DIM, "num_key_value_heads": 1}
    del sizes["head_dim"]
    return sizes


@torch.no_grad()
def _randomise(model: PreTrainedModel, embedding_std: float, seed: int) -> None:
    """Give every parameter random values that keep activations and logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()

    def noise(parameter: nn.Parameter, std: float) -> torch.Tensor:
        return std * torch.randn(parameter.shape, generator=generator)

    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:  # tied: the first owner, the embedding, decides
                continue
            done.add(id(parameter))
            if "Norm" in type(module).__name__:
                # Around what "identity" is for this norm: ones, or zeros where it adds one.
                parameter.add_(noise(parameter, 0.3))
            elif isinstance(module, nn.Embedding):
                parameter.copy_(noise(parameter, embedding_std))
            elif kind == "bias":
                parameter.copy_(noise(parameter, 0.3))
            elif isinstance(module, nn.Linear | Conv1D):
                fan_in = parameter.shape[0 if isinstance(module, Conv1D) else 1]
                parameter.copy_(noise(parameter, 1.5 * fan_in**-0.5))
            else:
                raise TypeError(
                    f"no rule to randomise {name}.{kind} of a {type(module).__name__}; "
                    "add one to tests/conformance/models.py"
                )


def build(row: TinyModel, seed: int = 0) -> PreTrainedModel:
    """A new random model of this architecture: float32, eager attention, eval mode."""
    model: PreTrainedModel = getattr(transformers, row.architecture)._from_config(
        row.config(), attn_implementation="eager", dtype=torch.float32
    )
    _randomise(model, row.embedding_std, seed)
    model.train(False)
    return model


def save(row: TinyModel, cache: Path) -> Path:
    """The directory of the saved model under `cache`, made when it is not there yet.

    The name carries a hash of this file and the versions that write the weights, so an edit makes
    a new model; the directory appears under its name only when complete.
    """
    source = Path(__file__).read_bytes()
    key = hashlib.sha256(source)
    key.update(f"{transformers.__version__} {torch.__version__}".encode())
    path = cache / f"{row.name}-{key.hexdigest()[:12]}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=cache, prefix=f".{row.name}-"))
        build(row).save_pretrained(partial)
        try:
            partial.rename(path)
        except OSError:  # another process was first
            shutil.rmtree(partial)
            if not path.exists():
                raise
    return path


def load(row: TinyModel, path: Path) -> PreTrainedModel:
    """The saved model as the reference runs it: float32, eager attention, eval mode."""
    model: PreTrainedModel = getattr(transformers, row.architecture).from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, **row.reference_config
    )
    model.train(False)
    return model
