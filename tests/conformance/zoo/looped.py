# SPDX-License-Identifier: Apache-2.0
"""Models that run their layers several times for a token: a layer's number counts executions."""

from __future__ import annotations

from transformers import HrmTextConfig, LlamaConfig

from ..loopcoder import LoopCoder
from ..reference import Adapter
from ..tiny import HEAD_DIM, HIDDEN, NO_HEAD_DIM, WINDOW, TinyModel, sizes

DEPTH = 2
"""Layers of each stack; all run several times."""

LOOPED: tuple[TinyModel, ...] = (
    TinyModel(
        "hrm_text",
        "HrmTextForCausalLM",
        lambda: HrmTextConfig(
            **sizes(
                num_hidden_layers=DEPTH,
                num_attention_heads=HIDDEN // HEAD_DIM,
                num_key_value_heads=None,
            ),
            H_cycles=2,
            L_cycles=3,
            embedding_scale=1.5,
        ),
        Adapter(
            blocks="model.L_module.layers",
            more_blocks=("model.H_module.layers",),
            branch=("self_attn",),
            loops=True,
        ),
        two_way=True,
        note=f"two stacks of {DEPTH} layers in turn, 16 executions; a prompt's tokens see each "
        "other both ways",
    ),
    TinyModel(
        "loopcoder",
        "IQuestLoopCoderForCausalLM",
        lambda: LlamaConfig(**{**NO_HEAD_DIM, "num_hidden_layers": DEPTH}),
        Adapter(blocks="model.layers", branch=("self_attn",), loops=True),
        model=LoopCoder,
        config_json={"loop_num": 3, "loop_window_size": WINDOW},
        note="transformers lacks it: the reference is plain PyTorch, conformance/loopcoder.py",
    ),
)
