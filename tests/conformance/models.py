# SPDX-License-Identifier: Apache-2.0
"""Builds, saves and loads the tiny random models of `zoo`; both sides read the same directory.

There is no tokenizer: engines start with `skip_tokenizer_init=True` and prompts are token ids,
`{"prompt_token_ids": [...]}`. To add an architecture, add a row to a file of `zoo`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from . import pictures, tiny
from .tiny import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MAX_LENGTH,
    VOCAB,
    WINDOW,
    TinyModel,
)
from .zoo import MODELS

__all__ = [
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "KV_HEADS",
    "LAYERS",
    "MAX_LENGTH",
    "MODELS",
    "VOCAB",
    "WINDOW",
    "TinyModel",
    "build",
    "every_expert",
    "load",
    "save",
]


@torch.no_grad()
def _randomise(model: PreTrainedModel, embedding_std: float, seed: int) -> None:
    """Give every parameter random values that keep activations and logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()

    def noise(value: torch.Tensor, std: float) -> torch.Tensor:
        return std * torch.randn(value.shape, generator=generator)

    for _, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:  # tied: the first owner, the embedding, decides
                continue
            done.add(id(parameter))
            if isinstance(module, nn.Embedding):
                parameter.copy_(noise(parameter, embedding_std))
            elif kind.endswith("bias") and "Norm" not in type(module).__name__:
                parameter.copy_(noise(parameter, 0.3))
            elif parameter.dim() < 2 or "log" in kind:
                # A norm's weight, a decay, a gate: around what it starts from, which is ones for
                # most norms, zeros where a norm adds one, and a stable recurrence.
                parameter.add_(noise(parameter, 0.3))
            else:
                parameter.copy_(noise(parameter, 1.5 * _fan_in(module, parameter) ** -0.5))
        for kind, buffer in module.named_buffers(recurse=False):
            if kind.endswith("bias") and buffer.is_floating_point():  # a router's correction
                buffer.add_(noise(buffer, 0.1))


def _fan_in(module: nn.Module, weight: nn.Parameter) -> int:
    if isinstance(module, Conv1D):
        return weight.shape[0]
    if isinstance(module, nn.Conv1d):
        return weight.shape[1] * weight.shape[2]
    # All experts of a layer in one tensor, [experts, ., .], in either order: the wider is as good.
    return max(weight.shape[1:]) if weight.dim() > 2 else weight.shape[1]


def build(row: TinyModel, seed: int = 0) -> PreTrainedModel:
    """A new random model of this architecture: float32, eager attention, eval mode."""
    model: PreTrainedModel = row.reference_class._from_config(
        row.config(), attn_implementation="eager", dtype=torch.float32
    )
    _randomise(model, row.embedding_std, seed)
    if row.adjust is not None:
        row.adjust(model)
    model.train(False)
    return model


def every_expert(row: TinyModel) -> TinyModel:
    """`row` with each token routed to all experts, if it has any.

    In bfloat16 two implementations may choose otherwise where two experts are nearly even, which
    says nothing about either; here no rounding decides.
    """

    def config() -> PretrainedConfig:
        config = row.config()
        fields = config.to_dict()
        counts = [fields[name] for name in ("n_routed_experts", "num_experts") if name in fields]
        if counts:
            config.update({"num_experts_per_tok": counts[0], "n_group": 1, "topk_group": 1})
        return config

    return replace(row, config=config)


def _key(row: TinyModel) -> str:
    """Changes when the saved model would."""
    parts = [
        Path(__file__).read_text(),
        inspect.getsource(tiny),
        repr(row.config().to_dict()),
        repr((row.architecture, row.reference_class.__name__, row.embedding_std, row.config_json)),
        _how_it_sees(row),
        *(inspect.getsource(change) for change in (row.checkpoint, row.adjust) if change),
        transformers.__version__,
        torch.__version__,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _how_it_sees(row: TinyModel) -> str:
    """The code that makes its processor, if it reads images."""
    if row.pictures is None:
        return ""
    return inspect.getsource(pictures) + inspect.getsource(row.pictures.processor)


def save(row: TinyModel, cache: Path) -> Path:
    """The directory of the saved model under `cache`, made when it is not there yet.

    The name says what it was made from, so an edit makes a new model; the directory appears under
    its name only when complete. Where the reference is another class than the architecture, its
    own copy is in the subdirectory `reference`.
    """
    path = cache / f"{row.name}-{_key(row)}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=cache, prefix=f".{row.name}-"))
        model = build(row)
        model.save_pretrained(partial)
        if row.checkpoint is not None:
            model.save_pretrained(partial / "reference")
            tensors = row.checkpoint(_tensors(partial), model.config)
            safetensors.torch.save_file(
                {k: v.contiguous() for k, v in tensors.items()}, partial / "model.safetensors"
            )
        if row.pictures is not None:
            row.pictures.make_processor().save_pretrained(partial)
        config = partial / "config.json"
        fields = {**json.loads(config.read_text()), **row.config_json}
        config.write_text(json.dumps({**fields, "architectures": [row.architecture]}, indent=1))
        try:
            partial.rename(path)
        except OSError:  # another process was first
            shutil.rmtree(partial)
            if not path.exists():
                raise
    return path


def _tensors(folder: Path) -> tiny.Tensors:
    return safetensors.torch.load_file(folder / "model.safetensors")


def load(row: TinyModel, path: Path) -> PreTrainedModel:
    """The saved model as the reference runs it: float32, eager attention, eval mode."""
    folder = path / "reference" if row.checkpoint is not None else path
    model: PreTrainedModel = row.reference_class.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **row.reference_config
    )
    if row.adjust is not None:
        row.adjust(model)
    model.train(False)
    return model
