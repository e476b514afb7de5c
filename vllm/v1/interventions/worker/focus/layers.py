# SPDX-License-Identifier: Apache-2.0
"""The layers of a worker that requests may focus, and what they need on the device."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_taps import FOCUS_OP, HeadTaps
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.interventions.focus import MAX_RUNS, FocusOp
from vllm.v1.interventions.worker.attention.layers import key_tables
from vllm.v1.interventions.worker.focus.kernel import Workspace
from vllm.v1.interventions.worker.focus.table import FocusedAttention, FocusTable
from vllm.v1.interventions.worker.token_map import TokenMap


class FocusLayers:
    """Made before code is traced, and bound once there is a KV cache.

    Args:
        config: its piecewise graphs are cut at the op, as they are at attention.
        attention: of each layer that has one; those over a latent cache are not focused.
    """

    def __init__(
        self,
        config: VllmConfig,
        attention: Mapping[int, Attention | MLAAttention],
        device: torch.device,
    ) -> None:
        self._modules = {n: m for n, m in attention.items() if isinstance(m, Attention)}
        self.names = {n: m.layer_name for n, m in self._modules.items()}
        """Layer -> its name in the forward context."""
        self.taps: dict[int, HeadTaps] = {}
        """The taps of each of these layers, once they are made."""
        heads = {n: m.num_heads for n, m in self._modules.items()}
        size, parallel = config.steering_config.max_steering_configs, config.parallel_config
        rank = parallel.rank % parallel.tensor_parallel_size
        self.table = FocusTable(heads, size, device, rank)
        self._focused: dict[int, FocusedAttention] = {}
        self._workspace: Workspace | None = None
        if device.type == "cuda" and heads:
            width = max(m.head_size_v for m in self._modules.values())
            self._workspace = Workspace.of(max(heads.values()), width, device)
        cuts = config.compilation_config.splitting_ops
        if cuts and FOCUS_OP not in cuts:
            cuts.append(FOCUS_OP)

    def probe(self, rule: int, number: float, keys: int) -> int:
        """Place a program for the start-up proof: every second one of the last keys is its span.

        Args:
            keys: how many there are.

        Returns:
            Its row; `table.forget` is to follow.
        """
        first = keys % 2 + max(0, keys - 2 * MAX_RUNS) // 2 * 2
        runs = [edge for key in range(first, keys, 2) for edge in (key, key + 1)]
        op = FocusOp(rule, number, dict.fromkeys(self.names, ()), runs)
        self.table.write([(1, [op])])
        return 1

    def bind(self, runner: Any, tokens: TokenMap) -> None:
        """Tell the taps where the pages of a runner's KV cache are.

        Args:
            runner: a model runner of upstream's.
            tokens: of each step.
        """
        tables = key_tables(runner, self._modules)
        for layer, taps in self.taps.items():
            module = self._modules[layer]
            taps.focused = self._focused[layer] = FocusedAttention(
                module, tables[layer].pages, tokens, self.table.at[layer], self._workspace
            )
            taps.wants_lse = self._workspace is not None and _gives_lse(module.impl)

    def warm(self) -> None:
        """Compile what serving needs beside what recorded graphs and the proof ran."""
        for layer, focused in self._focused.items():
            focused.warm(self.taps[layer].wants_lse)


def _gives_lse(impl: Any) -> bool:
    """Tell whether a backend returns the log of each row's sum as `focus_rows` takes it: with
    slopes FlashAttention's is of other logits, and of sinks nobody says."""
    return (
        isinstance(impl, FlashAttentionImpl)
        and impl.vllm_flash_attn_version in (2, 3)
        and impl.alibi_slopes is None
        and impl.sinks is None
    )
