# SPDX-License-Identifier: Apache-2.0
"""A call of another tool: what it does to rows in Hugging Face transformers, and our request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.conformance.heads import recorded
from tests.support.serving import prompt_of, vector

PROMPT = prompt_of(9, 21)
GENERATED = 3
LAYER = 1
"""Where a line's tool acts. The tiny Llama has layers 0 to 3."""
LAYERS = 4
TOKEN = PROMPT[3]
V, W = vector(31), vector(32)
U = V / V.norm()
ACROSS = W - (W @ U) * U
"""Orthogonal to U."""

Rows = torch.Tensor
"""float64 [positions, hidden], of prompt and generated tokens."""
Edit = Callable[[Rows], Rows]


@dataclass(frozen=True)
class Call:
    """A call of another tool."""

    ours: Mapping[str, Any] = field(default_factory=dict)
    """Fields of our request that change rows."""
    does: Mapping[int, Edit] = field(default_factory=dict)
    """Layer -> what the tool does to the output of that decoder block."""
    inside: Mapping[tuple[str, int], Edit] = field(default_factory=dict)
    """What it does within a block: to ("attn_out", layer) and ("mlp_out", layer), what attention
    and MLP add to the stream, or to ("z", layer), [positions, heads * width], ("mlp_in", layer),
    what the MLP reads, or ("pre_attn", layer), what the block reads."""
    point: str = "post_block"
    """What is read, and is compared at all layers that it names; "attn" is weights of attention."""
    layers: Any = "all"
    hooks: Any = None
    """The same in the tool's own words."""
    positions: Any = "all"
    reads: Callable[[int], slice] = lambda length: slice(None)
    """Which positions the tool returns, of a request with so many rows."""


def at(*layers: int, **entry: Any) -> dict[str, Any]:
    return {"post_block": {layer: {"vector": V, **entry} for layer in layers}}


def op(name: str, **fields: Any) -> dict[str, Any]:
    return {"op": name, "point": "post_block", "layers": [LAYER], **fields}


def only(rows: Rows, where: Any, edit: Edit) -> Rows:
    changed = rows.clone()
    changed[where] = edit(rows)[where]
    return changed


def placed(rows: Rows, added: Mapping[int, torch.Tensor]) -> Rows:
    changed = rows.clone()
    for position, delta in added.items():
        changed[position] += delta
    return changed


def along(rows: Rows, direction: torch.Tensor) -> Rows:
    return (rows @ direction.double())[:, None]


def norms(rows: Rows) -> Rows:
    return rows.norm(dim=-1, keepdim=True)


def add(scale: float) -> Edit:
    return lambda rows: rows + scale * V.double()


def to(value: Callable[[Rows], Rows], direction: torch.Tensor = U) -> Edit:
    """Sets the projection to `value` of it."""
    return lambda rows: (
        rows + (value(along(rows, direction)) - along(rows, direction)) * (direction.double())
    )


def without_v(rows: Rows) -> Rows:
    return rows - along(rows, V) * V.double() / (V.double() @ V.double())


def keeping(edit: Edit) -> Edit:
    return lambda rows: edit(rows) * norms(rows) / norms(edit(rows))


IN_PROMPT, AFTER = slice(0, len(PROMPT)), slice(len(PROMPT), None)
ROW = vector(33, 15.0)


def streams(model: Any, token_ids: list[int], call: Call) -> dict[tuple[str, int], torch.Tensor]:
    """(point, layer) -> float64 [n, ...] of a Llama of transformers, with what the call does; at
    "attn" weights, [n, heads, keys]."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    with ExitStack() as hooks, recorded(model, model.model.layers) as heads:

        def on_input(module: Any, *sites: tuple[str, int]) -> None:
            def before(_: Any, args: Any, kwargs: Any) -> Any:
                given = args[0] if args else kwargs["hidden_states"]
                found.update(dict.fromkeys(sites, given[0]))
                edit = call.inside.get(sites[0])
                return None if edit is None else ((edit(given[0])[None], *args[1:]), kwargs)

            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            hooks.callback(handle.remove)

        def on_output(module: Any, site: tuple[str, int], edit: Edit | None) -> None:
            def after(_: Any, args: Any, output: Any) -> Any:
                hidden = output[0] if isinstance(output, tuple) else output
                hidden = hidden if edit is None else edit(hidden[0])[None]
                found[site] = hidden[0]
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            hooks.callback(module.register_forward_hook(after).remove)

        for layer, block in enumerate(model.model.layers):
            on_input(block, ("pre_attn", layer))
            on_input(block.post_attention_layernorm, ("post_attn", layer))
            on_input(block.self_attn.o_proj, ("z", layer))
            on_input(block.mlp, ("mlp_in", layer))
            on_input(block.mlp.down_proj, ("mlp_act", layer))
            for name, module in (("attn_out", block.self_attn), ("mlp_out", block.mlp)):
                on_output(module, (name, layer), call.inside.get((name, layer)))
            on_output(block, ("post_block", layer), call.does.get(layer))
        on_output(model.model.norm, ("final", LAYERS - 1), None)
        with torch.no_grad():
            model(torch.tensor([token_ids]))
    return {**found, **heads}
