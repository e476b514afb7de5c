# SPDX-License-Identifier: Apache-2.0
"""Rows under a lens: what the model's own final norm and head say of them, after the forward.

In plain PyTorch, a bounded number of logits at a time: on the stream of the forward, outside all
graphs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.reads import LensRead
from vllm.v1.interventions.worker.lens_files import FileLens

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

    def read(self, read: LensRead, layers: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Return what leaves the device in place of rows.

        Args:
            layers: of each site.
            rows: [n, sites, hidden] in the model's dtype, on the device.

        Returns:
            float32 [n, sites, width], as `LensRead` says.
        """
        if (lens := self._lenses.get(read.name)) is not None:
            parts = zip(rows.unbind(1), layers, strict=True)
            rows = torch.stack([lens.apply(part, layer) for part, layer in parts], dim=1)
        flat = rows.flatten(0, 1)
        made = torch.empty(len(flat), sum(read.widths), device=rows.device)
        tokens = self._tokens(read.tokens)
        # All sites at once: the head is read from memory once for many rows.
        for some, into in zip(flat.split(self._at_once), made.split(self._at_once), strict=True):
            logits = self._model.compute_logits(self._norm(some))
            assert logits is not None  # as all ranks get the whole of them
            _reduce(read, logits.float(), tokens, into)
        return made.unflatten(0, rows.shape[:2])


def _reduce(read: LensRead, logits: torch.Tensor, tokens: torch.Tensor, into: torch.Tensor) -> None:
    """Write what is given of float32 logits [n, vocabulary] to [n, width]."""
    ids, of_ids, of_tokens, ranks, entropy = into.split(read.widths, dim=1)
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
