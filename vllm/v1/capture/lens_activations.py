# SPDX-License-Identifier: Apache-2.0
"""Captured rows as vLLM-Lens gives them: `RequestOutput.activations` (docs/coming-from.md)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.results import CapturedRows, CaptureResult
from vllm.v1.interventions.makings import AttentionRule
from vllm.v1.interventions.plan import Site


def activations_of(results: Mapping[str, CaptureResult] | None) -> dict[str, Any] | None:
    """Return what vLLM-Lens gives of a completion.

    Returns:
        Layers ascending, of the inline result: of rows of the stream after blocks
        `residual_stream` [layers, n, hidden]; of queries and keys with all heads `attn_q` [layers,
        n, heads, width], `attn_k` [layers, n, key heads, width], `qk_layers`, and `qk_meta`, how
        each layer makes weights of them; nothing of queries and keys if layers differ in heads.
        None where there is nothing of that.
    """
    payload = results["inline"].payload if results and "inline" in results else None
    rows = payload if isinstance(payload, Mapping) else {}
    mine = {site: made for site, made in rows.items() if isinstance(made, CapturedRows)}
    forms = {n: q.form for (p, n), q in mine.items() if p == "q" and q.form is not None}
    whole = {n: f for n, f in forms.items() if _is_whole(mine["q", n], mine.get(("k", n)), f)}
    return activations({site: made.values for site, made in mine.items()}, whole)


def _is_whole(queries: CapturedRows, keys: CapturedRows | None, form: AttentionRule) -> bool:
    """Tell whether queries and keys are of the same positions and of all heads."""
    if keys is None or not np.array_equal(queries.positions, keys.positions):
        return False
    every = tuple(range(len(queries.heads)))
    return queries.heads == every and keys.heads == every[: len(every) // form["group"]]


def activations(
    values: Mapping[Site, torch.Tensor], forms: Mapping[int, AttentionRule]
) -> dict[str, Any] | None:
    """Return what `activations_of` does, of rows by site, and the form of each layer whose queries
    and keys are all there."""
    made: dict[str, Any] = {}
    if stream := sorted(layer for point, layer in values if point == "post_block"):
        made["residual_stream"] = torch.stack([values["post_block", n] for n in stream])
    layers = sorted(forms)
    if len({(values["q", n].shape, values["k", n].shape) for n in layers}) == 1:
        made["attn_q"] = torch.stack([values["q", n] for n in layers])
        made["attn_k"] = torch.stack([values["k", n] for n in layers])
        made["qk_layers"] = layers
        made["qk_meta"] = [_meta(forms[n], values["q", n], values["k", n]) for n in layers]
    return made or None


def _meta(form: AttentionRule, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """A form in vLLM-Lens's words; its windows are (keys before, keys after)."""
    window = [form["window"] - 1, 0] if "window" in form else [-1, -1]
    said: dict[str, Any] = {"scale": form["scale"], "logits_soft_cap": form.get("cap", 0.0)}
    said |= {"num_heads_local": q.shape[1], "num_kv_heads_local": k.shape[1]}
    said |= {"num_kv_heads_total": k.shape[1], "head_size": q.shape[2], "use_alibi_sqrt": False}
    others = {"alibi_slopes": form.get("slopes"), "sinks": form.get("sinks")}
    return {**said, **others, "sliding_window": window}
