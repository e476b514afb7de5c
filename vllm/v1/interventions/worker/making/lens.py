# SPDX-License-Identifier: Apache-2.0
"""Rows under a lens: what the model's own final norm and head say of them, after the forward.

In plain PyTorch, a bounded number of logits at a time: on the stream of the forward, outside all
graphs.

A lens from a file has matrices that rows are multiplied with before the final norm. The file is
safetensors with `{layer}.weight` [hidden, hidden], and `kind` in its metadata: `tuned`, x + W x + b
with `{layer}.bias` [hidden] (Belrose et al. 2023), or `jacobian`, J x. x is post_block of the
layer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.errors import describe, show
from vllm.v1.interventions.makings import Lens
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.step_rows import Block
from vllm.v1.interventions.worker.making.maker import Captured, Maker, Material

_KEY = re.compile(r"(\d{1,9})\.(weight|bias)")
_KINDS = {"tuned": ("weight", "bias"), "jacobian": ("weight",)}


class FileLens:
    """The matrices of one lens, on the device in the model's dtype.

    Raises:
        ValueError: the file cannot be read, or is not of this model.
    """

    def __init__(self, name: str, path: str, shape: TapShape, device: torch.device) -> None:
        self._lens = f"capture_lens: {name} ({path})"
        try:
            with safe_open(path, framework="pt") as file:
                self._kind = (file.metadata() or {}).get("kind", "")
                given = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            self._refuse(f"cannot be read: {describe(error)}")
        if self._kind not in _KINDS:
            self._refuse(f"has kind {show(self._kind)} in its metadata, allowed are {[*_KINDS]}")
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        for key, tensor in given.items():
            match = _KEY.fullmatch(key)
            layer, part = (int(match[1]), match[2]) if match else (-1, "")
            if part not in _KINDS[self._kind] or "post_block" not in shape.layer(layer).points:
                self._refuse(f"{show(key)} is not of this model's layers and the lens's kind")
            wanted = [shape.hidden_size] * (1 + (part == "weight"))
            if list(tensor.shape) != wanted or not tensor.is_floating_point():
                self._refuse(f"{key} is {tensor.dtype} {list(tensor.shape)}, needed are {wanted}")
            self._tensors[layer, part] = tensor.to(device, shape.torch_dtype)
            if not self._tensors[layer, part].isfinite().all():
                self._refuse(f"{key} has numbers that are not finite in {shape.dtype}")
        self.layers = sorted({layer for layer, _ in self._tensors})
        for layer in self.layers:
            if lacks := [part for part in _KINDS[self._kind] if (layer, part) not in self._tensors]:
                self._refuse(f"{layer}.{lacks[0]} is missing")
        if not self.layers:
            self._refuse("has no layer")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self._lens}: {why}")

    def apply(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """Rows [n, hidden] after the layer's matrix, in their dtype, as the model's own layers
        multiply."""
        weight, bias = self._tensors[layer, "weight"], self._tensors.get((layer, "bias"))
        made = torch.nn.functional.linear(rows, weight, bias)
        return rows + made if self._kind == "tuned" else made


class LensMaker(Maker):
    """Makes `Lens`."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.reader: LensReader | None = None
        """Reader of lenses; None until the norm before the head is known."""

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Read the rows of all sites under a lens."""
        assert self.reader is not None and isinstance(stream.making, Lens)
        rows = torch.cat([rows for _, rows in self.material.by_run(block, stream)], dim=1)
        return self.reader.read(stream.making, [layer for layer, _ in stream.heads], rows)


Norm = Callable[[torch.Tensor], torch.Tensor]
"""Function that rows [n, hidden] pass before the head."""

LOGIT_BYTES = 64 << 20
"""Device memory that logits may take as float32, at a time."""
TOKEN_LISTS = 256
"""Number of lists of tokens that stay on the device: steps ask for the same ones again and
again."""


class LensReader:
    """Reads what steps want under lenses.

    Args:
        model: its head makes the logits: with the caps, scales and vocabulary that it samples with.
        norm: the one before the head.
        vocab_size: how many logits that gives.
        lenses: those of files, by name.
        device: where rows are.
    """

    def __init__(
        self,
        model: VllmModelForTextGeneration,
        norm: Norm,
        vocab_size: int,
        lenses: Mapping[str, FileLens],
        device: torch.device,
    ) -> None:
        self._model, self._norm, self._lenses = model, norm, lenses
        self._at_once = max(LOGIT_BYTES // (4 * vocab_size), 1)

        @lru_cache(TOKEN_LISTS)
        def tokens_on_device(tokens: tuple[int, ...]) -> torch.Tensor:
            return async_tensor_h2d(np.array(tokens, dtype=np.int64), device)

        self._tokens = tokens_on_device

    def read(self, read: Lens, layers: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Return what a lens says of rows.

        Args:
            layers: of each site.
            rows: [n, sites, hidden] in the model's dtype, on the device.

        Returns:
            float32 [n, sites, width], as `Lens` says.
        """
        if (lens := self._lenses.get(read.name)) is not None:
            parts = zip(rows.unbind(1), layers, strict=True)
            rows = torch.stack([lens.apply(part, layer) for part, layer in parts], dim=1)
        flat = rows.flatten(0, 1)
        made = torch.empty(len(flat), read.width(1, rows.shape[-1]), device=rows.device)
        tokens, widths = self._tokens(read.tokens), [field.width for field in read.fields]
        # All sites at once: the head is read from memory once for many rows.
        for some, into in zip(flat.split(self._at_once), made.split(self._at_once), strict=True):
            logits = self._model.compute_logits(self._norm(some))
            assert logits is not None  # as all ranks get the whole of them
            _reduce(read, logits.float(), tokens, into.split(widths, dim=1))
        return made.unflatten(0, rows.shape[:2])


def _reduce(
    read: Lens, logits: torch.Tensor, tokens: torch.Tensor, into: Sequence[torch.Tensor]
) -> None:
    """Write what is given of float32 logits [n, vocabulary] to the fields of rows, each [n,
    width]."""
    ids, of_ids, of_tokens, ranks, entropy = into
    total = logits.logsumexp(1, keepdim=True)
    if read.top_k:
        found = logits.topk(read.top_k)
        ids.view(torch.int32).copy_(found.indices)
        of_ids.copy_(found.values - total)
    own = logits[:, tokens]
    of_tokens.copy_(own - total)
    for i in range(len(read.tokens)):  # of all at once the comparison would be as large as logits
        ranks.view(torch.int32)[:, i] = (logits >= own[:, i : i + 1]).sum(1)
    if read.entropy:
        entropy[:, 0] = torch.special.entr((logits - total).exp_()).sum(1)
