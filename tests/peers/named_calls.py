# SPDX-License-Identifier: Apache-2.0
"""As `tests/peers/calls.py`, of tools that read and change a model's modules: by the values that
Hugging Face transformers has there."""

from __future__ import annotations

from tests.peers.call import LAYER, LAYERS, ROW, Call, Rows, V, add, at, only, op, without_v

SECTION = "TransformerLens, nnsight and transformers"
HEAD = 2
"""Of the four of the tiny Llama."""
KEPT = {"positions": [4], "values": ROW[None]}


def without_head(rows: Rows) -> Rows:
    changed = rows.clone()
    width = rows.shape[-1] // 4
    changed[:, HEAD * width : (HEAD + 1) * width] = 0
    return changed


_LINES: dict[str, list[Call]] = {
    "`blocks.N.hook_resid_pre`; `layers[N].input`; `hidden_states[N]`": [Call(point="pre_attn")],
    "`blocks.N.hook_resid_mid`": [Call(point="post_attn")],
    "`blocks.N.hook_resid_post`; `layers[N].output`; `hidden_states[N + 1]`": [Call()],
    "`ln_final.hook_out`; `norm.output`; `hidden_states[-1]`": [
        Call(point="final", layers=[LAYERS - 1]),
        Call(point="final", layers=-1),
    ],
    "`blocks.N.hook_attn_out`; `self_attn.output[0]`": [Call(point="attn_out")],
    "`blocks.N.hook_mlp_out`; `mlp.output`": [Call(point="mlp_out")],
    "`blocks.N.ln2.hook_out`; `mlp.input`": [
        Call(point="mlp_in"),
        Call(
            {"steering_vectors": {"mlp_in": {LAYER: V}}},
            inside={("mlp_in", LAYER): add(1.0)},
        ),
    ],
    "`blocks.N.mlp.hook_post`; `mlp.down_proj.input`": [Call(point="mlp_act")],
    "`blocks.N.attn.hook_rot_q`, `hook_rot_k`": [Call(point="q"), Call(point="k")],
    "`blocks.N.attn.hook_v`": [Call(point="v")],
    "`blocks.N.attn.hook_z`; `o_proj.input`": [Call(point="z")],
    "`blocks.N.attn.hook_pattern`; `attentions[N]`": [Call(point="attn")],
    "a hook at `hook_resid_post` that adds; `layers[N].output[:] += s * v`": [
        Call({"steering_vectors": at(LAYER, scale=0.7)}, {LAYER: add(0.7)})
    ],
    "a hook that projects a direction out": [
        Call({"steering": [op("ablate", direction=V)]}, {LAYER: without_v})
    ],
    "a hook that puts in a cached row: `x[:, 4] = row`": [
        Call(
            {"steering": [op("replace", **KEPT)]},
            {LAYER: lambda rows: only(rows, [4], lambda r: ROW.double().expand_as(r))},
        )
    ],
    "a hook at `hook_z` that zeroes a head: `z[:, :, 2] = 0`": [
        Call(
            {"steering": [{"op": "scale", "point": "z", "heads": {LAYER: [HEAD]}, "factor": 0.0}]},
            inside={("z", LAYER): without_head},
        )
    ],
    "a hook at `hook_attn_out` or `hook_mlp_out` that adds": [
        Call(
            {"steering_vectors": {"post_attn": {LAYER: V}}},
            inside={("attn_out", LAYER): add(1.0)},
        ),
        Call(
            {"steering_vectors": {"post_block": {LAYER: V}}},
            inside={("mlp_out", LAYER): add(1.0)},
        ),
    ],
}
NAMED: dict[tuple[str, str], list[Call]] = {
    (SECTION, line): calls for line, calls in _LINES.items()
}
"""(section, first cell of the line) -> calls of that kind."""
