# SPDX-License-Identifier: Apache-2.0
"""The rows of vLLM 0.33.0 that differ from those of the pinned version."""

from dataclasses import replace

from patches.taps.rows import FAMILIES as F
from patches.taps.rows import MODELS as M
from patches.taps.rows import Idiom, Row

# Read: their constructors changed; the first has a sum over ranks on one of them now.
_DIGESTS = {
    F + "deepseek_v32/amd/model.py:DeepseekV32DecoderLayer": "ec8e892040279374",
    F + "minimax_m3/amd/model.py:MiniMaxM3DecoderLayer": "940bc358c74d5b9e",
    F + "deepseek_v4/nvidia/model.py:DeepseekV4DecoderLayer": "6d71a3d9511ebfa9",
}
_GONE = (M + "clef_omni.py:EvidenceRoutingLayer", M + "medusa.py:ResidualBlock")
_REFUSED = {
    M + "cohere2_moe.py:Cohere2MoeDecoderLayer": "its norm says which of two idioms it has",
    F + "hy_v4/amd/model.py:HYV4DecoderLayer": "one kernel writes the lanes back and mixes them",
}
_NEW = {
    M + "alice_ai.py": "AliceAIDecoderBlock AliceAISparseMoeBlock",
    M + "clef_joint_schema.py": "EvidenceRoutingLayer",
    M + "colultravbert.py": "UltraBertLayer",
    M + "domyn_edge.py": "DomynEdgeDecoderLayer",
    M + "dory.py": "DoryDecoderLayer",
    M + "nemotron_parse3_5.py": "MBartDecoderLayer",
    F + "beam/nvidia/dflash2.py": "DFlash2BeamDecoderLayer",
    F + "beam/nvidia/model.py": "BeamDecoderLayer",
    F + "beam/nvidia/moe.py": "BeamSparseMoeBlock",
    F + "deepseek_v4/amd/mono_decode.py": "MonoDecodeLayer",
    F + "flint/model.py": "FlintDecoderLayer FlintSparseMoeBlock",
    F + "hy_v4/amd/hc.py": "HYV4HCHeadLayer HYV4HCLayer HYV4HCPostLayer HYV4HCPreLayer",
    F + "kimi_k3/amd/specialized_decode/runtime/layers.py": "FfnLayer WholeLayer _Layer",
    F + "muse_spark/amd/model.py": "MuseSpark1xDecoderLayer",
    F + "muse_spark/common/audio.py": "Block",
    F + "muse_spark/common/dspark.py": "MuseSparkDSparkDecoderLayer",
    F + "muse_spark/common/vision.py": "NaViTBlock",
    F + "muse_spark/nvidia/model.py": "MuseSpark1xDecoderLayer",
    F + "step5/nvidia/model.py": "Step5DecoderLayer",
    F + "step5/nvidia/mtp.py": "Step5MultiTokenPredictorLayer",
    F + "step5/nvidia/sparse_summary_cache.py": "Step5SparseSummaryCacheLayer",
}


def _row(row: Row) -> Row:
    if row.key in _REFUSED:
        return Row(row.file, row.cls, Idiom.REFUSED, reason=f"in 0.33.0: {_REFUSED[row.key]}")
    return replace(row, digest=_DIGESTS.get(row.key, row.digest))


def rows(pinned: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows of this version, given those of the pinned one."""
    new = ((file, cls) for file, names in _NEW.items() for cls in names.split())
    unread = (Row(file, cls, Idiom.EXCLUDED, reason="new in 0.33.0, not read") for file, cls in new)
    return (*(_row(row) for row in pinned if row.key not in _GONE), *unread)
