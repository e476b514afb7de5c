# SPDX-License-Identifier: Apache-2.0
"""Models without their images, which transformers has as parts of the whole ones only: its decoder,
and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
    PreTrainedModel,
    Step3p7TextConfig,
    Step3p7TextModel,
)
from transformers.modeling_outputs import CausalLMOutput


class MuseGlimmerText(PreTrainedModel):
    """The head of the whole model caps its logits."""

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


class Step3p5(PreTrainedModel):
    """The decoder of Step-3.7 is that of Step-3.5."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """The logits of one sequence."""
        made = self.model(input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(made))
