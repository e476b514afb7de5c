# SPDX-License-Identifier: Apache-2.0
"""Rows under a lens as a user gets them back."""

from typing import Any

import torch

from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.interventions.makings import Lens


class LensRows(MadeRows[Lens]):
    """The next token's distribution under a lens, at one site, row by row.

    Logarithms are natural, and of probabilities over the whole vocabulary.

    Args:
        values: [n, width], as `Lens` says, or what returns them.
    """

    @property
    def lens(self) -> str:
        """The name of the lens."""
        return self._making.name

    @property
    def asked(self) -> tuple[int, ...]:
        """The ids of the tokens that were asked for, in the order of the columns."""
        return self._making.tokens

    @property
    def header(self) -> dict[str, Any]:
        """The lens, and the tokens that were asked for."""
        return {"lens": self.lens, "asked": list(self.asked)}

    @property
    def top_ids(self) -> torch.Tensor:
        """The likeliest tokens, the likeliest first: int32 [n, top_k]."""
        return self._field("top_ids")

    @property
    def top_logprobs(self) -> torch.Tensor:
        """Their log-probabilities, [n, top_k]."""
        return self._field("top_logprobs")

    @property
    def token_logprobs(self) -> torch.Tensor:
        """The log-probabilities of the tokens that were asked for, [n, tokens]."""
        return self._field("token_logprobs")

    @property
    def token_ranks(self) -> torch.Tensor:
        """Number of tokens that are as likely as each of them or likelier, itself included, so that
        the likeliest has 1: int32 [n, tokens]."""
        return self._field("token_ranks")

    @property
    def entropy(self) -> torch.Tensor:
        """The entropy in nats, [n]."""
        return self._field("entropy")[:, 0]
