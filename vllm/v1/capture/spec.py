# SPDX-License-Identifier: Apache-2.0
"""What a request may say about capture: parsed, checked and resolved to positions."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.numbered import NumberedCapture
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.interventions import CapturePlan, Selection, Site, Stream, TapShape
from vllm.v1.positions import Positions
from vllm.v1.selectors import Prompt, Selector
from vllm.v1.sites import need_layers, need_mapping, need_point, reject, show, show_key, site_order


def parse_capture(
    value: Any, path: str, shape: TapShape, prompt: Prompt, specs: Mapping[str, ConsumerSpec]
) -> CapturePlan | None:
    """Parse `SamplingParams.capture`: `{consumer: {"hooks": {point: layers}, "positions": ...}}`,
    and add what consumers capture of every request that does not name them.

    Args:
        value: the user's mapping, or None.
        prompt: what `positions` are resolved on.
        specs: the engine's consumers.

    Raises:
        ValueError: unknown consumer, key, point or selector, a layer out of range, a position out
            of reach, a selection of nothing.
    """
    asked = {} if value is None else need_mapping(value, path)
    if value is not None and not asked:
        reject(path, "names no consumer")
    selections: dict[str, Selection] = {}
    for name, request in asked.items():
        at = f"{path}.{show_key(name)}"
        if name not in specs:
            reject(at, f"unknown consumer {show(name)}; known are {list(specs)}")
        selections[name] = selection = _selection(request, at, shape, prompt, specs[name])
        if not selection.runs:
            reject(
                f"{at}.positions",
                f"select nothing: the prompt has {len(prompt.token_ids)} tokens and "
                f"max_tokens={prompt.max_tokens} gives {max(prompt.max_tokens - 1, 0)} generated "
                "positions",
            )
    for name, spec in specs.items():
        if spec.capture is not None and name not in asked:
            of_all = _selection(spec.capture, f"{path}.{name}", shape, prompt, spec)
            if of_all.runs:
                selections[name] = of_all
    if not selections:
        return None
    streams: list[Stream] = []
    placed: dict[str, Selection] = {}
    for relayed in (True, False):
        members = {n: s for n, s in selections.items() if specs[n].in_frontend == relayed}
        if members:
            sites, runs = _union(members.values())
            for name, selection in members.items():
                placed[name] = msgspec.structs.replace(selection, stream=len(streams))
            streams.append(Stream(sites, runs, relayed, width=shape.hidden_size, dtype=shape.dtype))
    sites, runs = _union(streams)
    return CapturePlan(
        sites=sites,
        runs=runs,
        streams=streams,
        consumers={name: placed[name] for name in selections},
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        prompt=value.prompt if isinstance(value, NumberedCapture) else None,
    )


def _union(parts: Iterable[Selection | Stream]) -> tuple[list[Site], list[int]]:
    parts = list(parts)
    rows = Positions()
    for part in parts:
        rows = rows | Positions.from_flat(part.runs)
    return sorted({s for part in parts for s in part.sites}, key=site_order), rows.flat()


def _selection(
    request: Any, path: str, shape: TapShape, prompt: Prompt, spec: ConsumerSpec
) -> Selection:
    request = need_mapping(request, path)
    own = {key: field for key, field in request.items() if key not in ("hooks", "positions")}
    fields = (spec.cls or CaptureConsumer).check_request(own, path)
    if "hooks" not in request:
        reject(f"{path}.hooks", "is missing: give {point: layers}")
    sites = _sites(request["hooks"], f"{path}.hooks", shape)
    selector = Selector(prompt)
    runs = selector.resolve(request.get("positions", "last_prompt"), f"{path}.positions")
    return Selection(
        sites=sites,
        runs=runs.flat(),
        named=selector.named.flat(),
        last_generated=selector.only_last_generated,
        fields=fields,
    )


def _sites(hooks: Any, path: str, shape: TapShape) -> list[Site]:
    sites: list[Site] = []
    for key, layers in need_mapping(hooks, path).items():
        point = need_point(key, f"{path}.{show_key(key)}", shape)
        sites += [(point, n) for n in need_layers(layers, point, f"{path}.{point}", shape)]
    if not sites:
        reject(path, "name no layer")
    return sorted(sites, key=site_order)
