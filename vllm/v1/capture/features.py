# SPDX-License-Identifier: Apache-2.0
"""Activations of a sparse autoencoder's features as a user gets them back."""

from typing import Any

import torch

from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.interventions.makings import Features


class FeatureRows(MadeRows[Features]):
    """Activations of features at one site, row by row.

    Args:
        values: [n, width], as `Features` says, or what returns them.
    """

    @property
    def features(self) -> str:
        """The name of the autoencoder."""
        return self._making.name

    @property
    def asked(self) -> tuple[int, ...]:
        """The features that were asked for by `ids`, in the order of the columns."""
        return self._making.ids

    @property
    def header(self) -> dict[str, Any]:
        """The autoencoder, and the features that were asked for."""
        return {"features": self.features, "asked": list(self.asked)}

    @property
    def top_ids(self) -> torch.Tensor:
        """The most active features, the most active first, -1 where no more are active: int32
        [n, top]."""
        return self._field("top_ids")

    @property
    def top_values(self) -> torch.Tensor:
        """Their activations, [n, top], 0 where no more are active."""
        return self._field("top_values")

    @property
    def values(self) -> torch.Tensor:
        """The activations of the features that were asked for, [n, ids]."""
        return self._field("values")

    @property
    def active(self) -> torch.Tensor:
        """Number of features whose activation is greater than `above`, of all: int32 [n]."""
        return self._field("active")[:, 0]

    @property
    def error(self) -> torch.Tensor:
        """L2 norm of the row less what the decoder makes of its activations, [n]."""
        return self._field("error")[:, 0]
