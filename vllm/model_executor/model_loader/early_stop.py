# SPDX-License-Identifier: Apache-2.0
"""Models without a head, of engines that generate nothing (`capture_stop_after`)."""

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class NoLogits(LogitsProcessor):
    """Stands in for the logits processor of a model without a head."""

    def forward(
        self,
        lm_head: nn.Module,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor:
        """Return zeros, [n, vocab_size], for rows [n, hidden]: what is sampled of them is dropped
        in the frontend."""
        return hidden_states.new_zeros(len(hidden_states), self.vocab_size)


def drop_head(model: nn.Module, config: VllmConfig) -> None:
    """Remove the head of a model that was just made, if it ends early, before weights are loaded.

    A head that is the embedding, too, stays.
    """
    if config.capture_config.capture_stop_after is None:
        return
    # Late: that file imports the loaders, one of which imports this one.
    from vllm.model_executor.models.utils import PPMissingLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, ParallelLMHead):
            model.set_submodule(name, PPMissingLayer())
        elif isinstance(module, LogitsProcessor):
            model.set_submodule(name, NoLogits(module.vocab_size))
