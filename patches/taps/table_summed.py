# SPDX-License-Identifier: Apache-2.0
"""The classes with written-out sums: unfused, sandwich-unfused, normed, parallel."""

from patches.taps.rows import MODELS as M
from patches.taps.rows import Allow, Idiom, NormCall, Row, Second

U = Idiom.UNFUSED
NORMED_SKIP = frozenset({Allow.NORMED_SKIP, Allow.NO_MLP_IN})
NO_MLP_IN = frozenset({Allow.NO_MLP_IN})
HYBRID = M + "granitemoehybrid.py"

UNFUSED: tuple[Row, ...] = (
    Row(M + "bloom.py", "BloomBlock", U, mixers=("self_attention",), allow=NORMED_SKIP),
    Row(M + "chatglm.py", "GLMBlock", U, mixers=("self_attention",), allow=NORMED_SKIP),
    Row(
        M + "falcon_h1.py",
        "FalconH1ParallelHybrid",
        U,
        norms=("input_layernorm", "pre_ff_layernorm"),
        mixers=("self_attn", "mamba"),
        mlps=("feed_forward",),
    ),
    Row(M + "gpt2.py", "GPT2Block", U, norms=("ln_1", "ln_2"), mixers=("attn",)),
    Row(M + "granite.py", "GraniteDecoderLayer", U),
    Row(M + "granitemoe.py", "GraniteMoeDecoderLayer", U, mlps=("block_sparse_moe",)),
    *(
        Row(
            HYBRID,
            cls,
            U,
            mixers=(mixer,),
            mlps=("block_sparse_moe", "shared_mlp"),
            second=Second.STALE,
            allow=frozenset({Allow.NO_MLP, Allow.NO_MLP_IN}),
        )
        for cls, mixer in (
            ("GraniteMoeHybridMambaDecoderLayer", "mamba"),
            ("GraniteMoeHybridAttentionDecoderLayer", "self_attn"),
        )
    ),
    Row(
        M + "gemma3n.py",
        "Gemma3nDecoderLayer",
        Idiom.LANES,
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        branch_norms=(
            "post_attention_layernorm",
            "post_feedforward_layernorm",
            "post_per_layer_input_norm",
        ),
        functions=(
            "altup.predict",
            "altup.correct",
            "altup.scale_corrected_output",
            "laurel",
            "per_layer_input_gate",
            "act_fn",
            "torch.mul",
            "per_layer_projection",
        ),
        lanes="altup.altup_num_inputs",
        allow=frozenset({Allow.TAIL}),
    ),
    Row(
        M + "granitemoeshared.py",
        "GraniteMoeSharedDecoderLayer",
        U,
        mlps=("block_sparse_moe", "shared_mlp"),
        allow=NO_MLP_IN,
    ),
    Row(
        M + "hrm_text.py",
        "HrmTextDecoderLayer",
        U,
        loops=("current_step", "self_attn.attn_per_step"),
    ),
    Row(
        M + "iquest_loopcoder.py",
        "LoopCoderDecoderLayer",
        U,
        loops=("loop_idx", "self_attn.attn"),
    ),
    Row(M + "minicpm.py", "MiniCPMDecoderLayer", U, second=Second.NONE),
    Row(
        M + "olmo_hybrid.py",
        "OlmoHybridDecoderLayer",
        U,
        branch_norms=("post_feedforward_layernorm",),
        mixers=("self_attn", "linear_attn"),
        allow=NO_MLP_IN,
    ),
    Row(
        M + "opt.py",
        "OPTDecoderLayer",
        U,
        norms=("self_attn_layer_norm", "final_layer_norm"),
        mlps=("fc1", "activation_fn", "fc2"),
        allow=frozenset({Allow.POST_NORM, Allow.NO_MLP_IN}),
    ),
    Row(M + "orion.py", "OrionDecoderLayer", U),
    Row(
        M + "phimoe.py",
        "PhiMoEDecoderLayer",
        U,
        mlps=("block_sparse_moe",),
        second=Second.STALE,
    ),
    Row(M + "stablelm.py", "StablelmDecoderLayer", U, second=Second.STALE),
    Row(M + "step3p5.py", "Step3p5DecoderLayer", U, mlps=("mlp", "moe")),
)

SANDWICH_UNFUSED: tuple[Row, ...] = (
    Row(
        M + "exaone4.py",
        "Exaone4DecoderLayer",
        Idiom.SANDWICH_UNFUSED,
        norms=(),
        branch_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        second=Second.STALE,
        allow=NO_MLP_IN,
    ),
    Row(
        M + "gemma4.py",
        "Gemma4DecoderLayer",
        Idiom.SANDWICH_UNFUSED,
        norms=("input_layernorm", "pre_feedforward_layernorm", "pre_feedforward_layernorm_2"),
        branch_norms=(
            "post_attention_layernorm",
            "post_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
            "post_per_layer_input_norm",
        ),
        mlps=("mlp", "router", "experts", "per_layer_input_gate", "per_layer_projection"),
        functions=("torch.nn.functional.gelu",),
        second=Second.NONE,
        allow=frozenset({Allow.TAIL, Allow.NO_MLP_IN}),
    ),
    Row(
        M + "hyperclovax.py",
        "HyperCLOVAXDecoderLayer",
        Idiom.SANDWICH_UNFUSED,
        branch_norms=("post_norm1", "post_norm2"),
        second=Second.STALE,
    ),
    *(
        Row(
            M + file,
            cls,
            Idiom.SANDWICH_UNFUSED,
            norms=(),
            branch_norms=("input_layernorm", "post_attention_layernorm"),
            second=Second.STALE,
            allow=NO_MLP_IN,
        )
        for file, cls in (
            ("molmo.py", "MolmoDecoderNormAfterLayer"),
            ("molmo2.py", "Molmo2DecoderNormAfterLayer"),
        )
    ),
    Row(
        M + "muse_glimmer.py",
        "MuseGlimmerDecoderLayer",
        Idiom.SANDWICH_UNFUSED,
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        branch_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        second=Second.STALE,
    ),
)

NORMED: tuple[Row, ...] = (
    Row(
        M + "dbrx.py",
        "DbrxBlock",
        Idiom.NORMED,
        norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"),
        mixers=("norm_attn_norm.attn",),
        mlps=("ffn",),
        inline=("norm_attn_norm",),
        renorm=("norm_attn_norm", "norm_attn_norm.norm_2"),
    ),
)

PARALLEL: tuple[Row, ...] = (
    Row(
        M + "zamba2.py",
        "Zamba2MambaDecoderLayer",
        Idiom.PARALLEL,
        norms=("input_layernorm",),
        mixers=("mamba",),
        mlps=(),
    ),
    Row(
        # The shared attention and MLP change only what Mamba reads, not the stream.
        M + "zamba2.py",
        "Zamba2HybridLayer",
        Idiom.PARALLEL,
        norms=("mamba_decoder.input_layernorm",),
        mixers=("mamba_decoder.mamba",),
        mlps=(),
        functions=("shared_transformer", "linear"),
        inline=("mamba_decoder",),
        allow=frozenset({Allow.UNTAPPED_SUM}),
    ),
    Row(
        M + "commandr.py",
        "CohereDecoderLayer",
        Idiom.PARALLEL,
        norms=("input_layernorm",),
        functions=("tensor_model_parallel_all_reduce",),
        norm_call=NormCall.PASSES,
        second=Second.STALE,
    ),
    *(
        # Cohere's norm hands its second argument back, so what it returns there is the skip.
        Row(
            M + file,
            cls,
            Idiom.PARALLEL,
            norms=("input_layernorm",),
            norm_call=NormCall.PASSES,
            second=Second.STALE,
        )
        for file, cls in (
            ("cohere2_moe.py", "Cohere2MoeDecoderLayer"),
            ("cohere_compass.py", "CohereCompassDecoderLayer"),
        )
    ),
    Row(
        # Models with a sequential block use this class too; they lack its post_attn.
        M + "falcon.py",
        "FalconDecoderLayer",
        Idiom.PARALLEL,
        norms=("ln_attn", "ln_mlp", "input_layernorm", "post_attention_layernorm"),
        mixers=("self_attention",),
        functions=("tensor_model_parallel_all_reduce",),
        given=(
            (
                "self.reduce_row_parallel_results",
                "not (self.config.new_decoder_architecture or self.config.parallel_attn)",
            ),
        ),
        allow=frozenset({Allow.NO_MLP_IN, Allow.UNTAPPED_SUM}),
    ),
    Row(M + "gpt_j.py", "GPTJBlock", Idiom.PARALLEL, norms=("ln_1",), mixers=("attn",)),
    Row(
        M + "moondream3.py",
        "Moondream3DecoderLayer",
        Idiom.PARALLEL,
        norms=("ln",),
        mixers=("attn",),
        skip="hidden_states",
    ),
)
