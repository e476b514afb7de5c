# SPDX-License-Identifier: Apache-2.0
"""Streams as trainers of sparse autoencoders take them.

SAETrainer(cfg=..., sae=..., data_provider=for_sae_lens(rows, "cuda"))          # SAELens
trainSAE(data=for_dictionary_learning(rows, "cuda"), trainer_configs=...)       # by that name
"""

from collections.abc import Iterator
from typing import Any

import torch

from .streaming import Stream


def for_sae_lens(rows: Stream, device: str | torch.device = "cpu") -> Iterator[torch.Tensor]:
    """Yield float32 [batch, width] on a device, as the `data_provider` of SAELens's trainer."""
    for batch in rows:
        yield batch.values.to(device).float()


class DictionaryBuffer(Iterator[torch.Tensor]):
    """Float32 [batch, width] on a device, in place of dictionary_learning's `ActivationBuffer`."""

    def __init__(self, rows: Stream, device: str | torch.device) -> None:
        self._batches = for_sae_lens(rows, device)
        self._rows = rows

    def __next__(self) -> torch.Tensor:
        """Return the next batch."""
        return next(self._batches)

    @property
    def config(self) -> dict[str, Any]:
        """Source of the rows, which dictionary_learning saves beside an autoencoder."""
        return {"stream": self._rows.state}


def for_dictionary_learning(rows: Stream, device: str | torch.device = "cpu") -> DictionaryBuffer:
    """Return the stream as the `data` of dictionary_learning's `trainSAE`."""
    return DictionaryBuffer(rows, device)
