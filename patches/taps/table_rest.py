# SPDX-License-Identifier: Apache-2.0
"""The classes that need no edit, as they inherit a wired forward(), and those that are refused."""

from patches.taps.rows import FAMILIES as F
from patches.taps.rows import MODELS as M
from patches.taps.rows import Idiom, Row

INHERITED: tuple[Row, ...] = tuple(
    Row(M + file, cls, Idiom.INHERITED, parent=M + parent)
    for file, cls, parent in (
        ("aria.py", "AriaTextDecoderLayer", "llama.py:LlamaDecoderLayer"),
        ("minicpm3.py", "MiniCPM3DecoderLayer", "minicpm.py:MiniCPMDecoderLayer"),
        (
            "openai_privacy_filter.py",
            "OpenAIPrivacyFilterDecoderLayer",
            "gpt_oss.py:TransformerBlock",
        ),
        ("qwen3_5.py", "Qwen3_5DecoderLayer", "qwen3_next.py:Qwen3NextDecoderLayer"),
        ("qwen3_vl.py", "Qwen3VLDecoderLayer", "qwen3.py:Qwen3DecoderLayer"),
        ("qwen3_vl_moe.py", "Qwen3VLMoeDecoderLayer", "qwen3_moe.py:Qwen3MoeDecoderLayer"),
    )
)
INHERITED += (
    Row(
        F + "dots3_note/nvidia/model.py",
        "Dots3NoteDecoderLayer",
        Idiom.INHERITED,
        parent=F + "deepseek_v32/nvidia/model.py:DeepseekV32DecoderLayer",
    ),
)

_HC = "several streams (hyper-connections): "
_V41 = (
    _HC + "not wired, as a row of lanes is not the whole stream: a sub-layer reads them in the "
    "proportions (pre_mix) of the one before, and Engram layers add to them within the block"
)
_OTHER = _HC + "not wired, as nobody could run it on this hardware"

REFUSED: tuple[Row, ...] = tuple(
    Row(file, cls, Idiom.REFUSED, reason=reason)
    for file, cls, reason in (
        (
            M + "embedding_gemma2.py",
            "EmbeddingGemma2DecoderLayer",
            "pooling model, nested sums in one expression",
        ),
        (F + "deepseek_v4/amd/model.py", "DeepseekV4DecoderLayer", _OTHER),
        (F + "deepseek_v4/xpu/model.py", "DeepseekV4DecoderLayer", _OTHER),
        (F + "deepseek_v41/amd/model.py", "DeepseekV4DecoderLayer", _OTHER),
        (F + "deepseek_v41/nvidia/model.py", "DeepseekV4DecoderLayer", _V41),
        (F + "qwen4_exp/amd/model.py", "Qwen4ExpDecoderLayer", _OTHER),
    )
)
