# SPDX-License-Identifier: Apache-2.0
"""Bodies of transformers that have no causal LM there: a head on top."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
)
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextConfig, Step3p7TextModel


class _Headed(PreTrainedModel):
    body: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = self.body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """The logits of one sequence."""
        states = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        logits: Any = self.capped(self.lm_head(states))
        return CausalLMOutput(logits=logits)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """What is done to logits behind the head."""
        return logits


class Step3p5(_Headed):
    """transformers has this as the text part of Step 3.7."""

    config_class = Step3p7TextConfig
    body = Step3p7TextModel


class MuseGlimmer(_Headed):
    """transformers has this within a model that reads images."""

    config_class = MuseGlimmerTextConfig
    body = MuseGlimmerTextModel

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """As in that model."""
        cap = self.config.final_logit_softcapping
        return cap * (logits * self.config.output_multiplier / cap).tanh()
