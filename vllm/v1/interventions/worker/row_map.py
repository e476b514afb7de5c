# SPDX-License-Identifier: Apache-2.0
"""Map from captured tokens to the arena rows where they begin, at each site, on the device."""

from weakref import WeakKeyDictionary

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.capture_groups import CaptureGroup
from vllm.v1.interventions.step_rows import Block


class RowMap:
    """First arena row of each token at each site, which taps read before they write rows.

    Args:
        num_sites: of this worker.
        max_tokens: of a step.
    """

    def __init__(self, num_sites: int, max_tokens: int, device: torch.device) -> None:
        self.dest = torch.full((num_sites, max_tokens), -1, dtype=torch.int32, device=device)
        """[sites, tokens], -1 for none."""
        self._of_group: WeakKeyDictionary[CaptureGroup, list[torch.Tensor]] = WeakKeyDictionary()
        """Int64 [n, 1] a group's sites, the raw ones and the others, and int32 [n, 1] which of a
        token's rows is the first of each, of both."""

    def write(self, block: Block, tokens: torch.Tensor) -> None:
        """Set `dest` for the tokens of a block.

        Args:
            tokens: int64 [count] on the device, their places in the batch.
        """
        group, device = block.group, self.dest.device
        if group not in self._of_group:
            arrays = np.split(group.sites, [group.num_raw])
            arrays += [np.arange(group.num_raw, dtype=np.int32), group.rest_at.astype(np.int32)]
            self._of_group[group] = [async_tensor_h2d(each[:, None], device) for each in arrays]
        raw_sites, rest_sites, raw_rows, rest_rows = self._of_group[group]
        nth = torch.arange(len(tokens), dtype=torch.int32, device=device)
        if group.num_raw:
            self.dest[raw_sites, tokens] = raw_rows + (nth * group.num_raw + block.raw)
        if group.rest_rows:
            self.dest[rest_sites, tokens] = rest_rows + (nth * group.rest_rows + block.rest)
