# SPDX-License-Identifier: Apache-2.0
"""The reference of q, k, v and z: what the attention of a Hugging Face model gets and returns.

Attentions of transformers call a function of their module, `eager_attention_forward(module, query,
key, value, ...)`, with what the hook contract names; it is wrapped while a sequence runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

_NAME = "eager_attention_forward"

_Rows = tuple[torch.Tensor, ...]


@contextmanager
def recorded(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    deltas: Mapping[tuple[str, int], torch.Tensor] | None = None,
) -> Iterator[dict[tuple[str, int], torch.Tensor]]:
    """Afterwards, of the one sequence that ran within: (point, layer) -> float32 [n, heads, width];
    at "attn" the weights, [n, heads, n], where values times these are the output.

    What attention returns in a layer gets `deltas["z", layer]`, [n, heads * width], added.
    Layers whose attention was called not once, or does without that function, are left out.
    """
    layer_of = {module: layer for layer, block in enumerate(blocks) for module in block.modules()}
    calls: dict[int, list[_Rows]] = {}
    rows: dict[tuple[str, int], torch.Tensor] = {}

    def recording(attend: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            out = attend(module, query, key, value, *args, **kwargs)
            if module in layer_of:
                delta = (deltas or {}).get(("z", layer_of[module]))
                if delta is not None:
                    out = (out[0] + delta.reshape(out[0].shape), *out[1:])
                # These are [1, heads, n, width], the output [1, n, heads, width].
                given = [x[0].transpose(0, 1).clone() for x in (query, key, value)]
                weights = (
                    value.new_empty(0) if out[1] is None else out[1][0].transpose(0, 1).clone()
                )
                calls.setdefault(layer_of[module], []).append((*given, out[0][0].clone(), weights))
            return out

        return call

    files = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as stack:
        for file in files:
            if hasattr(file, _NAME):
                attend = getattr(file, _NAME)
                stack.enter_context(mock.patch.object(file, _NAME, recording(attend)))
        yield rows
    for layer, made in calls.items():
        if len(made) == 1:
            *given, weights = made[0]
            rows.update({(p, layer): x for p, x in zip("qkvz", given, strict=True)})
            _, _, value, out = given
            # Some leave the sink out of the weights that they show, and not of those they use.
            if not weights.numel():
                continue
            values = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
            if torch.allclose(torch.einsum("qhk,khe->qhe", weights, values), out, atol=1e-4):
                rows["attn", layer] = weights
