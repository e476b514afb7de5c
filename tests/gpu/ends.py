# SPDX-License-Identifier: Apache-2.0
"""Checks on a GPU of what is read beside taps, for `tests.gpu.mode`: embed, final and branches, and
what vLLM-Lens's requests get of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.conformance import reference as ref
from vllm.config.points import POINTS, STREAM_POINTS, Rows

if TYPE_CHECKING:
    from tests.gpu.mode import Mode

BRANCHES = {p.name: p.made_of for p in POINTS.values() if p.rows is Rows.BRANCH}
READ = ("embed", "final", *BRANCHES)


def ends(mode: Mode, tokens: list[list[int]], layers: int) -> dict[str, Any]:
    """embed is pre_attn of layer 0 and branches are float32 differences of their points, bit for
    bit; all are transformers', branches as precise as the stream. Other rows would not pass."""
    last, worst, least_other, same = layers - 1, 0.0, 9e9, True
    hooks = dict.fromkeys((*READ, *STREAM_POINTS), "all")
    places = ("embed", 0), ("final", last)
    for ids, rows in mode.run(tokens, [{}] * len(tokens), hooks):
        want = ref.run(mode.hf, mode.adapter, ids)
        same &= torch.equal(rows["embed", 0], rows["pre_attn", 0])
        worst = max(worst, *(mode.worst_row(rows[s], want.others[s]) for s in places))
        others = [
            mode.worst_row(rows["embed", 0], want.rows["pre_attn", 1]),
            mode.worst_row(rows["final", last], want.rows["post_block", last]),
        ]
        for branch, (after, before) in BRANCHES.items():
            for layer in range(layers):
                made, stream = rows[branch, layer], want.rows[after, layer]
                exact, other = (want.others[branch, n] for n in (layer, (layer + 1) % layers))
                same &= made.dtype == torch.float32
                same &= torch.equal(made, rows[after, layer].float() - rows[before, layer].float())
                worst = max(worst, float(((made - exact).norm(dim=-1) / stream.norm(dim=-1)).max()))
                others.append(mode.worst_row(made, other))
        least_other = min(least_other, *others)
    ok = same and worst <= mode.noise_limit and least_other > 0.3
    found = {"error": worst, "limit": mode.noise_limit, "least_other": least_other}
    return {**found, "bits": same, "ok": ok}


def output_qk(mode: Mode, tokens: list[list[int]], layers: int) -> dict[str, Any]:
    """Of queries, keys and the numbers that `output_qk` gives, the weights of attention are those
    of transformers; of a neighbouring head's queries others."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False,
        extra_args={"output_qk": True, "output_residual_stream": [0]},
    )  # fmt: skip
    fed: Any = [{"prompt_token_ids": ids} for ids in tokens]
    worst, apart, same = 0.0, 0.0, True
    outputs: list[Any] = mode.llm.generate(fed, params, use_tqdm=False)
    for prompt, output in zip(tokens, outputs, strict=True):
        given = output.activations
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        want = ref.run(mode.hf, mode.adapter, ids).heads
        same &= given["qk_layers"] == list(range(layers))
        same &= given["residual_stream"].shape[:2] == (1, len(ids))
        seen = torch.ones(len(ids), len(ids)).tril().bool()
        parts = zip(given["attn_q"], given["attn_k"], given["qk_meta"], strict=True)
        for layer, (queries, keys, meta) in enumerate(parts):
            same &= (meta["logits_soft_cap"], meta["sliding_window"]) == (0.0, [-1, -1])
            same &= meta["alibi_slopes"] is None and meta["sinks"] is None
            keys = keys.float().repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
            scores = meta["scale"] * torch.einsum("qhd,khd->qhk", queries.float(), keys)
            weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            exact = want["attn", layer]
            worst = max(worst, float((weights - exact).abs().max()))
            apart = max(apart, float((weights - exact.roll(1, 1)).abs().max()))
    ok = same and worst <= mode.noise_limit and apart > 0.1
    return {"error": worst, "limit": mode.noise_limit, "other": apart, "ok": ok}
