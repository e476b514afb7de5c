# SPDX-License-Identifier: Apache-2.0
"""What a request may say about capture: parsed, checked and resolved to positions."""

from typing import Any

from vllm.v1.interventions import CapturePlan, Selection, Site, TapShape
from vllm.v1.positions import Positions
from vllm.v1.selectors import Prompt, Selector
from vllm.v1.sites import need_layers, need_mapping, need_point, reject, show_key, site_order


def parse_capture(value: Any, path: str, shape: TapShape, prompt: Prompt) -> CapturePlan:
    """Parse `SamplingParams.capture`: `{consumer: {"hooks": {point: layers}, "positions": ...}}`.

    Args:
        value: the user's mapping; the consumers' names are checked by the caller.
        prompt: what `positions` are resolved on.

    Raises:
        ValueError: unknown key, point or selector, a layer out of range, a position out of reach,
            a selection of nothing.
    """
    consumers = {
        name: _selection(spec, f"{path}.{show_key(name)}", shape, prompt)
        for name, spec in need_mapping(value, path).items()
    }
    if not consumers:
        reject(path, "names no consumer")
    sites = sorted({s for sel in consumers.values() for s in sel.sites}, key=site_order)
    rows = Positions()
    for selection in consumers.values():
        rows = rows | Positions.from_flat(selection.runs)
    return CapturePlan(
        sites=sites,
        runs=rows.flat(),
        consumers=consumers,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
    )


def _selection(spec: Any, path: str, shape: TapShape, prompt: Prompt) -> Selection:
    spec = need_mapping(spec, path)
    unknown = sorted(show_key(k) for k in spec.keys() - {"hooks", "positions"})
    if unknown:
        reject(path, f"unknown keys {unknown[:8]}, allowed are 'hooks' and 'positions'")
    if "hooks" not in spec:
        reject(f"{path}.hooks", "is missing: give {point: layers}")
    sites = _sites(spec["hooks"], f"{path}.hooks", shape)
    selector = Selector(prompt)
    runs = selector.resolve(spec.get("positions", "last_prompt"), f"{path}.positions")
    if not len(runs):
        reject(
            f"{path}.positions",
            f"select nothing: the prompt has {len(prompt.token_ids)} tokens and "
            f"max_tokens={prompt.max_tokens} gives {max(prompt.max_tokens - 1, 0)} generated "
            "positions",
        )
    return Selection(
        sites=sites,
        runs=runs.flat(),
        named=selector.named.flat(),
        last_generated=selector.only_last_generated,
    )


def _sites(hooks: Any, path: str, shape: TapShape) -> list[Site]:
    sites: list[Site] = []
    for key, layers in need_mapping(hooks, path).items():
        point = need_point(key, f"{path}.{show_key(key)}", shape)
        sites += [(point, n) for n in need_layers(layers, point, f"{path}.{point}", shape)]
    if not sites:
        reject(path, "name no layer")
    return sorted(sites, key=site_order)
