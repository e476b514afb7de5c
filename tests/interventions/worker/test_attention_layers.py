# SPDX-License-Identifier: Apache-2.0
"""Where the pages of a layer are, with upstream's own objects and no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.interventions.worker.attention.layers import key_tables
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

pytestmark = [pytest.mark.quick, pytest.mark.v2]

BLOCK, PAGE = 128, 16


def attending(layers: list[str], number: int, splits: bool) -> AttentionGroup:
    """What upstream makes of layers whose backend takes smaller pages than the cache's blocks."""
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = AttentionGroup(None, layers, spec, number)  # type: ignore[arg-type]
    if splits:
        group.kernel_block_size = PAGE
        group.kernel_block_table = torch.zeros(1, 4, 64, dtype=torch.int32)
        group.kernel_block_offsets = torch.arange(BLOCK // PAGE, dtype=torch.int32)
    return group


def layer(name: str, shared: str | None = None) -> Any:
    module = Attention.__new__(Attention)
    torch.nn.Module.__init__(module)
    module.layer_name, module.kv_sharing_target_layer_name = name, shared
    return module


@pytest.mark.parametrize("stride", [0, 40])
def test_pages_that_are_smaller_than_blocks(stride: int) -> None:
    tables = [torch.arange(4 * n, 4 * n + 8, dtype=torch.int32).view(4, 2) for n in (1, 2)]
    groups = [attending(["a"], 0, False), attending(["b"], 1, True)]
    groups[1].kernel_block_stride = stride
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(use_v2_model_runner=True),
        block_tables=SimpleNamespace(input_block_tables=tables),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=[name]) for name in "ab"]
        ),
        attn_groups=[[groups[0]], [groups[1]]],
    )
    found = key_tables(runner, {0: layer("a"), 1: layer("b"), 2: layer("c", shared="b")})
    assert [table.group for table in found.values()] == [0, 1, 1]
    blocks = torch.tensor([3, 5], dtype=torch.int32)
    assert found[0].pages is tables[0] and torch.equal(found[0].pages_of(blocks), blocks)
    assert found[0].apart == found[0].pages_a_block == 1
    apart = stride or BLOCK // PAGE
    wanted = torch.cat([torch.arange(8) + 3 * apart, torch.arange(8) + 5 * apart])
    for table in (found[1], found[2]):
        # The layer's backend reads what upstream writes here in each step.
        written = groups[1].map_to_kernel_block_table(tables[1])
        assert torch.equal(table.pages[:, :16], written) and int(written[0, 8]) == 9 * apart
        assert not torch.equal(written[:, :2], tables[1])
        assert torch.equal(table.pages_of(blocks), wanted.int())
        assert (table.apart, table.pages_a_block) == (apart, 8)
