# SPDX-License-Identifier: Apache-2.0
"""Every decoder-like class of the two model trees, and what becomes of it."""

from patches.taps.rows import MODELS as M
from patches.taps.rows import Idiom, NormCall, Row, Second

GEMMA_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
GEMMA_BRANCH_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

ROWS: tuple[Row, ...] = (
    Row(M + "llama.py", "LlamaDecoderLayer", Idiom.FUSED),
    Row(M + "qwen2.py", "Qwen2DecoderLayer", Idiom.FUSED),
    Row(M + "qwen3.py", "Qwen3DecoderLayer", Idiom.FUSED),
    Row(
        M + "gemma2.py",
        "Gemma2DecoderLayer",
        Idiom.SANDWICH_FUSED,
        norms=GEMMA_NORMS,
        branch_norms=GEMMA_BRANCH_NORMS,
    ),
    Row(M + "gpt2.py", "GPT2Block", Idiom.UNFUSED, norms=("ln_1", "ln_2"), mixers=("attn",)),
    Row(M + "gpt_j.py", "GPTJBlock", Idiom.PARALLEL, norms=("ln_1",), mixers=("attn",)),
    Row(
        M + "commandr.py",
        "CohereDecoderLayer",
        Idiom.PARALLEL,
        norms=("input_layernorm",),
        norm_call=NormCall.PASSES,
        second=Second.STALE,
    ),
)
