# SPDX-License-Identifier: Apache-2.0
"""The op that captures, and its switch."""

from __future__ import annotations

import pytest
import torch

from vllm.model_executor.layers.row_capture import capture_rows

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("compiled", [False, True])
def test_the_switch_is_read_at_each_call(compiled: bool) -> None:
    """Also in compiled code: it is no constant of it."""

    def layer(
        h: torch.Tensor, arena: torch.Tensor, dest: torch.Tensor, switch: torch.Tensor
    ) -> torch.Tensor:
        h = h + 1
        capture_rows(h, arena, dest, switch)
        return h * 2

    run = torch.compile(layer, fullgraph=True) if compiled else layer
    h = torch.arange(12.0).view(3, 4)
    dest = torch.tensor([1, -1, 0], dtype=torch.int32)
    switch = torch.tensor(True)
    for on in (True, False, True):
        switch.fill_(on)
        arena = torch.zeros(3, 4)
        assert torch.equal(run(h, arena, dest, switch), 2 * h + 2)
        want = torch.stack([h[2] + 1, h[0] + 1, torch.zeros(4)])
        assert torch.equal(arena, want if on else torch.zeros(3, 4))
