# SPDX-License-Identifier: Apache-2.0
"""The classes whose stream is a (hidden, residual) pair: fused, paired, single-mixer, sandwich."""

from patches.taps.rows import FAMILIES as V
from patches.taps.rows import FLOAT16, Allow, Idiom, Row
from patches.taps.rows import MODELS as M

F = Idiom.FUSED
NEMOTRON_H = M + "nemotron_h.py"
# The engine refuses sequence-parallel MoE rows at start-up, and these attributes need them on.
NO_SP_MOE = ("self.use_attn_reduce_scatter_for_moe",)

FUSED: tuple[Row, ...] = (
    Row(
        M + "AXK1.py",
        "AXK1DecoderLayer",
        F,
        branch_norms=("post_mlp_layernorm",),
        assume=(FLOAT16,),
    ),
    Row(
        M + "apertus.py",
        "ApertusDecoderLayer",
        F,
        norms=("attention_layernorm", "feedforward_layernorm"),
    ),
    Row(M + "bailing_moe.py", "BailingMoeBlock", F, mixers=("attention",)),
    Row(M + "bailing_moe_linear.py", "BailingMoeV25DecoderLayer", F),
    Row(M + "bailing_moe_v3.py", "BailingMoeV3DecoderLayer", F),
    Row(
        M + "deepseek_v2.py",
        "DeepseekV2DecoderLayer",
        F,
        assume=("self.use_sequence_parallel_moe", FLOAT16),
    ),
    Row(M + "ernie45_moe.py", "Ernie4_5_MoeDecoderLayer", F),
    Row(M + "ernie45_vl_moe.py", "Ernie4_5_VLMoeDecoderLayer", F),
    Row(M + "exaone.py", "ExaoneDecoderLayer", F, norms=("ln_1", "ln_2"), mixers=("attn",)),
    Row(M + "exaone_moe.py", "ExaoneMoeDecoderLayer", F),
    Row(M + "gemma.py", "GemmaDecoderLayer", F),
    Row(M + "glm4_moe.py", "Glm4MoeDecoderLayer", F),
    Row(M + "glm4_moe_lite.py", "Glm4MoeLiteDecoderLayer", F),
    Row(M + "gpt_oss.py", "TransformerBlock", F, mixers=("attn",)),
    Row(M + "hy_v3.py", "HYV3DecoderLayer", F),
    Row(
        M + "internlm2.py",
        "InternLMDecoderLayer",
        F,
        norms=("attention_norm", "ffn_norm"),
        mixers=("attention",),
        mlps=("feed_forward",),
    ),
    Row(M + "interns1_pro.py", "InternS1ProMoeDecoderLayer", F),
    Row(
        M + "interns2_mobius.py",
        "InternS2MobiusDecoderLayer",
        F,
        mixers=("self_attn", "linear_attn"),
        mlps=("mlp", "meta_mlp[block_idx]"),
        assume=NO_SP_MOE,
    ),
    Row(
        M + "jamba.py",
        "JambaMambaDecoderLayer",
        F,
        norms=("input_layernorm", "pre_ff_layernorm"),
        mixers=("mamba",),
        mlps=("feed_forward",),
    ),
    Row(
        M + "jamba.py",
        "JambaAttentionDecoderLayer",
        F,
        norms=("input_layernorm", "pre_ff_layernorm"),
        mixers=("self_attention",),
        mlps=("feed_forward",),
    ),
    Row(M + "k2_horizon.py", "K2HorizonDecoderLayer", F),
    Row(M + "laguna.py", "LagunaDecoderLayer", F),
    *(
        Row(
            M + file,
            cls,
            F,
            norms=("operator_norm", "ffn_norm"),
            mixers=(mixer,),
            mlps=("feed_forward",),
        )
        for file, cls, mixer in (
            ("lfm2.py", "Lfm2AttentionDecoderLayer", "self_attn"),
            ("lfm2.py", "Lfm2ShortConvDecoderLayer", "short_conv"),
            ("lfm2_moe.py", "Lfm2MoeAttentionDecoderLayer", "self_attn"),
            ("lfm2_moe.py", "Lfm2MoeShortConvDecoderLayer", "short_conv"),
        )
    ),
    Row(M + "llama.py", "LlamaDecoderLayer", F),
    Row(M + "llama4.py", "Llama4DecoderLayer", F, mlps=("feed_forward",)),
    Row(
        # Two attentions and two MLPs, and a MoE around the second pair: no one place is post_attn.
        M + "longcat_flash.py",
        "FlashDecoderLayer",
        F,
        norms=(
            "input_layernorm[0]",
            "post_attention_layernorm[0]",
            "input_layernorm[1]",
            "post_attention_layernorm[1]",
        ),
        mixers=("self_attn[0]", "self_attn[1]"),
        mlps=("mlps[0]", "mlps[1]", "mlp"),
        allow=frozenset({Allow.NO_MLP_IN, Allow.UNTAPPED_SUM}),
    ),
    Row(M + "mimo_v2.py", "MiMoV2FlashDecoderLayer", F),
    Row(M + "minimax_m2.py", "MiniMaxM2DecoderLayer", F, mlps=("block_sparse_moe",)),
    Row(M + "mistral.py", "MistralDecoderLayer", F),
    Row(M + "mixtral.py", "MixtralDecoderLayer", F, mlps=("block_sparse_moe",)),
    Row(M + "molmo.py", "MolmoDecoderLayer", F),
    Row(M + "molmo2.py", "Molmo2DecoderLayer", F),
    Row(M + "nemotron.py", "NemotronDecoderLayer", F),
    Row(M + "olmoe.py", "OlmoeDecoderLayer", F),
    Row(M + "param2moe.py", "Param2MoEDecoderLayer", F),
    Row(M + "qwen2.py", "Qwen2DecoderLayer", F),
    Row(M + "qwen2_moe.py", "Qwen2MoeDecoderLayer", F),
    Row(M + "qwen3.py", "Qwen3DecoderLayer", F),
    Row(M + "qwen3_moe.py", "Qwen3MoeDecoderLayer", F),
    Row(
        M + "qwen3_next.py",
        "Qwen3NextDecoderLayer",
        F,
        mixers=("self_attn", "linear_attn"),
        assume=NO_SP_MOE,
    ),
    Row(M + "sarvam.py", "SarvamMLABlock", F),
    Row(M + "solar.py", "SolarDecoderLayer", F),
    Row(M + "step1.py", "StepDecoderLayer", F),
    Row(
        M + "step3_text.py",
        "Step3TextDecoderLayer",
        F,
        mlps=("mlp", "moe", "share_expert"),
    ),
    Row(
        # With `use_attn_residuals` (Kimi-K3) attention reads a mixture of earlier blocks.
        V + "kimi_k3/amd/linear.py",
        "KimiDecoderLayer",
        F,
        mixers=("_run_self_attn",),
        assume=("self.use_attn_residuals",),
    ),
)

PAIRED: tuple[Row, ...] = (
    Row(
        # Pruned layers lack attention or MLP, which then adds nothing.
        M + "nemotron_nas.py",
        "DeciLMDecoderLayer",
        Idiom.PAIRED,
        anchor="if not self._is_no_op_ffn:",
        allow=frozenset({Allow.NO_MIXER, Allow.NO_MLP, Allow.NO_MLP_IN}),
    ),
    Row(
        V + "kimi_k3/nvidia/model.py",
        "KimiDecoderLayer",
        Idiom.PAIRED,
        mixers=("_run_self_attn",),
        assume=("self.use_attn_res", "self.use_sequence_parallel"),
        inline=("_pre_attn_norm", "_post_attn_norm"),
        anchor="hidden_states, prefix_sum, residual = self._post_attn_norm(",
    ),
)

SINGLE_MIXER: tuple[Row, ...] = tuple(
    Row(file, cls, Idiom.FUSED_SINGLE, norms=("norm",), mixers=("mixer",), mlps=())
    for file, cls in (
        (M + "mamba.py", "MambaDecoderLayer"),
        (M + "mamba2.py", "Mamba2DecoderLayer"),
        (NEMOTRON_H, "NemotronHMLPDecoderLayer"),
        (NEMOTRON_H, "NemotronHMoEDecoderLayer"),
        (NEMOTRON_H, "NemotronHMambaDecoderLayer"),
        (NEMOTRON_H, "NemotronHAttentionDecoderLayer"),
    )
)
SINGLE_MIXER += (
    Row(
        M + "cosmos3_edge.py",
        "Cosmos3EdgeAttentionDecoderLayer",
        Idiom.FUSED_SINGLE,
        norms=("norm",),
        mixers=("mixer.forward_with_positions",),
        mlps=(),
    ),
)

_GEMMA_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
_GEMMA_BRANCH_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

SANDWICH_FUSED: tuple[Row, ...] = (
    *(
        Row(
            M + file,
            cls,
            Idiom.SANDWICH_FUSED,
            norms=_GEMMA_NORMS,
            branch_norms=_GEMMA_BRANCH_NORMS,
        )
        for file, cls in (
            ("gemma2.py", "Gemma2DecoderLayer"),
            ("gemma3.py", "Gemma3DecoderLayer"),
            ("rnj1.py", "Rnj1DecoderLayer"),
        )
    ),
    Row(
        M + "afmoe.py",
        "AfmoeDecoderLayer",
        Idiom.SANDWICH_FUSED,
        norms=("input_layernorm", "pre_mlp_layernorm"),
        branch_norms=("post_attention_layernorm", "post_mlp_layernorm"),
    ),
    Row(
        M + "glm4.py",
        "Glm4DecoderLayer",
        Idiom.SANDWICH_FUSED,
        norms=("input_layernorm", "post_attention_layernorm"),
        branch_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    Row(
        # Without `sandwich_norm` the post-attention norm takes the sum; with it, the branch.
        M + "openpangu.py",
        "OpenPanguDecoderLayer",
        Idiom.SANDWICH_FUSED,
        norms=("input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm"),
        branch_norms=("post_mlp_layernorm",),
        assume=(FLOAT16,),
    ),
    Row(
        M + "plamo3.py",
        "Plamo3DecoderLayer",
        Idiom.SANDWICH_FUSED,
        norms=("pre_mixer_norm", "pre_mlp_norm"),
        branch_norms=("post_mixer_norm", "post_mlp_norm"),
        mixers=("mixer",),
    ),
)
