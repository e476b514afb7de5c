# SPDX-License-Identifier: Apache-2.0
"""What vLLM-Lens's `attention_patterns` reads, of queries and keys that were captured here.

llm = LLM(MODEL, capture_consumers=["inline"], capture_points=["q", "k"])
hooks = {"q": [15], "k": [15]}
params = SamplingParams(capture={"inline": {"hooks": hooks, "positions": "all"}})
(output,) = llm.generate(PROMPT, params)
rows = output.capture_results["inline"].payload
weights = attention_patterns(activations(rows, scale=128**-0.5), layer=15)
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm.v1.capture import CapturedRows


def activations(
    rows: Mapping[tuple[str, int], CapturedRows],
    scale: float,
    more: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return `attn_q`, `attn_k`, `qk_layers` and `qk_meta` of all positions and heads.

    Args:
        rows: the payload of the consumer `inline`, with `q` and `k` of the same layers.
        scale: what products of queries and keys are multiplied by, mostly width ** -0.5.
        more: layer -> what else its attention does to them, such as `sliding_window`,
            `logits_soft_cap`, `alibi_slopes` and `sinks`, as vLLM-Lens has them.

    Raises:
        KeyError: a layer has queries and no keys.
        RuntimeError: layers have different numbers or widths of heads; take them one by one.
    """
    layers = sorted(layer for point, layer in rows if point == "q")
    return {
        "attn_q": torch.stack([rows["q", layer].values for layer in layers]),
        "attn_k": torch.stack([rows["k", layer].values for layer in layers]),
        "qk_layers": layers,
        "qk_meta": [{"scale": scale, **(more or {}).get(layer, {})} for layer in layers],
    }
