# SPDX-License-Identifier: Apache-2.0
"""Rows under a lens as a user gets them back."""

from collections.abc import Callable

import numpy as np
import torch

from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.interventions.makings import LensRead

_PARTS = ("top_ids", "top_logprobs", "token_logprobs", "token_ranks", "entropy")


class LensRows(MadeRows):
    """The next token's distribution under a lens, at one site, row by row.

    Logarithms are natural, and of probabilities over the whole vocabulary.

    Args:
        values: [n, width], as `LensRead` says, or what returns them.
    """

    def __init__(
        self,
        positions: np.ndarray,
        token_ids: np.ndarray,
        values: torch.Tensor | Callable[[], torch.Tensor],
        versions: np.ndarray,
        read: LensRead,
        texts: Callable[[], list[str]] | None = None,
    ) -> None:
        super().__init__(positions, token_ids, values, versions, texts)
        self._read = read

    @property
    def lens(self) -> str:
        """The name of the lens."""
        return self._read.name

    @property
    def asked(self) -> tuple[int, ...]:
        """The ids of the tokens that were asked for, in the order of the columns."""
        return self._read.tokens

    @property
    def give(self) -> tuple[str, ...]:
        """Names of the properties below that can be read."""
        return tuple(n for n, width in zip(_PARTS, self._read.widths, strict=True) if width)

    @property
    def top_ids(self) -> torch.Tensor:
        """The likeliest tokens, the likeliest first: int32 [n, top_k]."""
        return self._part("top_ids").view(torch.int32)

    @property
    def top_logprobs(self) -> torch.Tensor:
        """Their log-probabilities, [n, top_k]."""
        return self._part("top_logprobs")

    @property
    def token_logprobs(self) -> torch.Tensor:
        """The log-probabilities of the tokens that were asked for, [n, tokens]."""
        return self._part("token_logprobs")

    @property
    def token_ranks(self) -> torch.Tensor:
        """Number of tokens that are as likely as each of them or likelier, itself included, so that
        the likeliest has 1: int32 [n, tokens]."""
        return self._part("token_ranks").view(torch.int32)

    @property
    def entropy(self) -> torch.Tensor:
        """The entropy in nats, [n]."""
        return self._part("entropy")[:, 0]

    def parts(self) -> dict[str, torch.Tensor]:
        """All that there is, by the names of the properties."""
        return {name: getattr(self, name) for name in self.give}

    def _part(self, name: str) -> torch.Tensor:
        if name not in self.give:
            raise ValueError(
                f"{name!r} was not asked for: the capture gives {', '.join(self.give)}"
            )
        return self._rows().split(self._read.widths, dim=1)[_PARTS.index(name)]

    def __repr__(self) -> str:
        """Say how many rows these are and what there is of them."""
        return f"LensRows({len(self)} rows, positions={self.positions}, give={self.give})"
