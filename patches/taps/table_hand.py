# SPDX-License-Identifier: Apache-2.0
"""The classes wired by hand (`hand.py`), and why the proof cannot read them."""

from patches.taps.rows import FAMILIES as V
from patches.taps.rows import Idiom, Row

PAIR = "hidden_states, residual"


def _pair(point: str, method: str, partial: str) -> str:
    """Return the line of a tap that steers a pair."""
    flag = f", partial={partial}" if partial else ""
    return f"{PAIR} = self.taps.{point}.{method}({PAIR}{flag})"


def _fused_pair(
    entry: str, second: str, partial: tuple[str, str, str]
) -> tuple[tuple[str, str, str], ...]:
    """Return the lines for a pair whose `hidden` a later norm reduces over tensor-parallel ranks.

    Args:
        entry, second: the anchors, calls of the two norms.
        partial: for each point the expression that says whether `hidden` is a partial sum there;
            "" for never.
    """
    return (
        ("before", entry, _pair("pre_attn", "steer_pair", partial[0])),
        ("after", entry, "self.taps.pre_attn.read(residual)"),
        ("before", second, _pair("post_attn", "steer_pair", partial[1])),
        ("after", second, "self.taps.post_attn.read(residual)"),
        (
            "before",
            "return hidden_states, residual",
            _pair("post_block", "steer_and_capture_pair", partial[2]),
        ),
    )


_ALWAYS = ("True", "True", "True")


def _renorm(point: str, normed: str, norm: str) -> tuple[str, str, str]:
    """Return the row's line of a tap that norms again what it changed."""
    pair = f"{normed}, hidden_states"
    return "after", norm, f"{pair} = self.taps.{point}.renorm({pair}, {norm})"


_INKLING = (
    # `pending` is the last block's branch before its convolution, which must run once; so the
    # first place where the stream is whole is after the fused norm, which is then done again.
    _renorm("pre_attn", "attn_in", "self.attn_norm"),
    _renorm("post_attn", "mlp_in", "self.mlp_norm"),
)


def _lanes_second(point: str) -> str:
    """Return the line of a tap of a stream [tokens, lanes, hidden]: taps take lanes first."""
    swap = "transpose(0, 1)"
    return f"hidden_states = self.taps.{point}(hidden_states.{swap}).{swap}"


def _hyper(point: str, names: str = "residual = x") -> str:
    """Return the line of a tap of DeepSeek-V4's lanes, before what mixes them, when the skip has
    them already. Upstream's kernels refuse what an operation leaves, with lanes first in memory."""
    swap = "transpose(0, 1)"
    return f"{names} = self.taps.{point}(x.{swap}).{swap}.contiguous()"


def _remixed(point: str, anchor: str, factors: str, mix: str) -> tuple[str, str, str]:
    """Return the row's line of a tap after a kernel that wrote the lanes back and mixed them: what
    was changed is mixed again.

    Args:
        factors: the names of what the kernel mixed and of its factors, as `mix` returns them.
        mix: a call with `lanes`.
    """
    call = f"self.taps.{point}.renorm(({factors}), residual, lambda lanes: {mix})"
    return "after", anchor, f"({factors}), residual = {call}"


def _settled(
    point: str, anchor: str, parts: str, write: str, parts_of: str
) -> tuple[str, str, str]:
    """Return the row's line of a tap before a kernel that would write the lanes back: they are
    written back here, and the kernel gets parts that leave them as they are.

    Args:
        parts: names of what the kernel takes.
        write: a function of them.
        parts_of: parts with nothing to add to `lanes`.
    """
    call = f"self.taps.{point}.settle(({parts}), {write}, lambda lanes: ({parts_of}))"
    return "before", anchor, f"{parts} = {call}"


def _nothing(branch: str) -> str:
    return f"{branch}.new_zeros({branch}.shape)"


def _unmixed(branch: str, post: str, comb: str) -> str:
    """Return parts of a manifold-constrained hyper-connection that are written back to `lanes`:
    each lane gets itself, and nothing of the branch."""
    one = f"torch.eye(lanes.shape[1], dtype={comb}.dtype, device={comb}.device)"
    return f"{_nothing(branch)}, lanes, {post}, {one}.expand_as({comb}).contiguous()"


def _glm_mix(half: str, norm: str) -> str:
    weights = ", ".join(f"self.hc_{half}_{name}" for name in ("fn", "scale", "base"))
    eps = f"norm_eps=self.{norm}.variance_epsilon"
    return f"self.hc_pre(lanes, {weights}, norm_weight=self.{norm}.weight.data, {eps})"


def _v4_mix(half: str) -> str:
    weights = ", ".join(f"self.hc_{half}_{name}" for name in ("fn", "scale", "base"))
    sizes = "self.rms_norm_eps, self.hc_eps, self.hc_eps, self.hc_post_alpha"
    norm = f"norm_weight={half}_norm_weight, norm_eps={half}_norm_eps"
    return f"mhc_pre_tilelang(lanes, {weights}, {sizes}, self.hc_sinkhorn_iters, {norm})"


def _grouped(names: str) -> str:
    """Return how Qwen4-Exp's taps write back: its lanes lie in one dimension."""
    return f"lambda *parts: {names}.combine(*parts).unflatten(1, ({names}.hc_count, -1))"


HAND: tuple[Row, ...] = (
    Row(
        V + "deepseek_v32/amd/model.py",
        "DeepseekV32DecoderLayer",
        Idiom.HAND,
        lines=_fused_pair("self.input_layernorm", "self.post_attention_layernorm", _ALWAYS),
        digest="4593d140afb2bbc2",
    ),
    Row(
        # The model norms the first block's input with the embedding: `attn_in` is stale there.
        V + "deepseek_v32/nvidia/model.py",
        "DeepseekV32DecoderLayer",
        Idiom.HAND,
        assume=("self.use_sequence_parallel",),
        lines=(
            (
                "before",
                "self.input_layernorm",
                "attn_in = self.taps.pre_attn.norm_if_unsteered(attn_in)",
            ),
            *_fused_pair("self.input_layernorm", "self.post_attention_layernorm", _ALWAYS),
        ),
        digest="9b62811bf4402747",
    ),
    Row(
        V + "minimax_m3/amd/model.py",
        "MiniMaxM3DecoderLayer",
        Idiom.HAND,
        mlps=("block_sparse_moe", "mlp"),
        lines=_fused_pair(
            "self.input_layernorm", "self.post_attention_layernorm", ("", "True", "")
        ),
        digest="388c1698b77c4552",
    ),
    Row(
        V + "minimax_m3/nvidia/model.py",
        "MiniMaxM3DecoderLayer",
        Idiom.HAND,
        mlps=("block_sparse_moe", "mlp"),
        lines=_fused_pair(
            "self.input_layernorm",
            "self.post_attention_layernorm",
            ("self.fuse_input_allreduce", "True", "self.ffn_all_reduce_deferred"),
        ),
        digest="390b7b2a8932b5e1",
    ),
    *(
        Row(
            V + f"inkling/{vendor}/model.py",
            "InklingDecoderLayer",
            Idiom.HAND,
            norms=("attn_norm", "mlp_norm"),
            mixers=("attn",),
            residual="pending",
            lines=_INKLING,
            digest=digest,
        )
        for vendor, digest in (("amd", "3295b0b186ad9c55"), ("nvidia", "4ff021c2661c542a"))
    ),
    *(
        # `prepare_input` makes the first block's lanes of its one input. The proof knows no block
        # that adds a branch to each lane by another factor.
        Row(
            V + f"hy_v4/{vendor}/model.py",
            "HYV4DecoderLayer",
            Idiom.HAND,
            assume=("not self.enable_ihc",),
            method="_forward_ihc",
            lanes="config.hc_mult",
            lines=(
                ("after", "self.hc_attn_layer.prepare_input", _lanes_second("pre_attn")),
                ("after", "self.hc_mlp_layer.prepare_input", _lanes_second("post_attn")),
                ("before", "return hidden_states, None", _lanes_second("post_block")),
            ),
            digest="18ed7ea9a0b3f401",
        )
        for vendor in ("amd", "nvidia")
    ),
    Row(
        # Without TileLang a block writes back at its end; with it the next block does, in the
        # kernel that mixes the lanes for its attention.
        V + "deepseek_v4/cpu/model.py",
        "DeepseekV4DecoderLayer",
        Idiom.HAND,
        norms=("attn_norm", "ffn_norm"),
        mixers=("attn",),
        mlps=("ffn",),
        stream="x",
        assume=("self.use_fused_mhc",),
        method="_forward_unfused_post_pre",
        lanes="hc_mult",
        lines=(
            ("before", "self.hc_attn_fn", _hyper("pre_attn")),
            ("before", "self.hc_ffn_fn", _hyper("post_attn")),
            ("before", "return x, None", _hyper("post_block", "x")),
        ),
        digest="26f4d4ce86e7a3a7",
    ),
    Row(
        # A block leaves writing back to the next one, or to the model after the last. The first
        # one makes the lanes of the embedding, in a kernel that mixes them, too.
        V + "deepseek_v4/nvidia/model.py",
        "DeepseekV4DecoderLayer",
        Idiom.HAND,
        norms=("attn_norm", "ffn_norm"),
        mixers=("attn",),
        mlps=("ffn",),
        stream="x",
        assume=("self.use_sequence_parallel",),
        lanes="hc_mult",
        lines=(
            _remixed("pre_attn", "if residual is None", "post_mix, res_mix, x", _v4_mix("attn")),
            _remixed("post_attn", "self.hc_ffn_fn", "post_mix, res_mix, x", _v4_mix("ffn")),
            _settled(
                "post_block",
                "return x, residual, post_mix, res_mix",
                "x, residual, post_mix, res_mix",
                "mhc_post_tilelang",
                _unmixed("x", "post_mix", "res_mix"),
            ),
        ),
        digest="8c871d07d93a5a9e",
    ),
    Row(
        # A block leaves writing back to the next one, in the kernel that mixes for its attention.
        # Multi-token prediction has a forward of its own, past the target's layers.
        V + "glm5next/common/model.py",
        "Glm5NextDecoderLayer",
        Idiom.HAND,
        stream="hidden_states",
        assume=("not self.mhc", "self.is_mtp_layer", "self.is_sequence_parallel"),
        lanes="mhc_num_residual_streams",
        lines=(
            _remixed(
                "pre_attn", "if post is None", "post, comb, x", _glm_mix("attn", "input_layernorm")
            ),
            _remixed(
                "post_attn",
                "self.hc_ffn_fn",
                "post, comb, x",
                _glm_mix("ffn", "post_attention_layernorm"),
            ),
            _settled(
                "post_block",
                "if self.layer_idx == self.num_hidden_layers - 1",
                "x, residual, post, comb",
                "self.hc_post",
                _unmixed("x", "post", "comb"),
            ),
        ),
        digest="d6f5fe166b2e4251",
    ),
    Row(
        # The same; embeddings of n-grams (`ple`) are added within the block, after `pre_attn`.
        V + "qwen4_exp/nvidia/model.py",
        "Qwen4ExpDecoderLayer",
        Idiom.HAND,
        norms=(),
        mixers=("linear_attn", "self_attn"),
        assume=("self.use_hc_sequence_parallel",),
        lanes="config.hc_count",
        lines=(
            (
                "after",
                "attn_hc = self.attn_hyper_connection",
                "hidden_states, prev_block_output, prev_injection = self.taps.pre_attn.settle("
                "(hidden_states, prev_block_output, prev_injection), lambda x, branch, factors: "
                "(x if branch is None else attn_hc.combine(x, branch, factors))"
                ".unflatten(1, (attn_hc.hc_count, -1)), "
                "lambda lanes: (lanes.flatten(1), None, None))",
            ),
            _settled(
                "post_attn",
                "mlp_hc.combine_and_mix",
                "hidden_states, attn_out, injection",
                _grouped("mlp_hc"),
                f"lanes.flatten(1), {_nothing('attn_out')}, injection",
            ),
            _settled(
                "post_block",
                "return hidden_states, mlp_out, injection",
                "hidden_states, mlp_out, injection",
                _grouped("mlp_hc"),
                f"lanes.flatten(1), {_nothing('mlp_out')}, injection",
            ),
        ),
        digest="4fd80f33360d98cc",
    ),
)
