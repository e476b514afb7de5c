# SPDX-License-Identifier: Apache-2.0
"""Muse Glimmer without its images, which transformers has as a part of the whole model only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MuseGlimmerTextConfig, MuseGlimmerTextModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class MuseGlimmerText(PreTrainedModel):
    """The decoder of transformers and the head of the whole model."""

    config_class = MuseGlimmerTextConfig

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """The logits of one sequence."""
        config = self.config
        logits = self.lm_head(self.model(input_ids, use_cache=False).last_hidden_state)
        cap = config.final_logit_softcapping
        return CausalLMOutput(logits=cap * (logits * config.output_multiplier / cap).tanh())
