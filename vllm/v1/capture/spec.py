# SPDX-License-Identifier: Apache-2.0
"""What a request may say about capture: parsed, checked and resolved to positions."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.capture.positions import Positions
from vllm.v1.interventions import CapturePlan, Selection, Site, TapShape
from vllm.v1.sites import need_layers, need_mapping, need_point, reject, show, site_order
from vllm.v1.steering.spec import show_key

NAMED_SELECTORS = (
    "last_prompt",
    "all_prompt",
    "all_generated",
    "last_generated",
    "predicting",
    "all",
)
MAX_POSITION_ENTRIES = 100_000
"""Entries of one `positions` list; a client could otherwise send a list of any length."""


def parse_capture(
    value: Any, path: str, shape: TapShape, num_prompt_tokens: int, max_tokens: int
) -> CapturePlan:
    """Parse `SamplingParams.capture`: `{consumer: {"hooks": {point: layers}, "positions": ...}}`.

    Args:
        value: the user's mapping; the consumers' names are checked by the caller.
        num_prompt_tokens: length of the prompt.
        max_tokens: upper bound of the generated tokens. The last one is never fed back, so the
            request has at most `num_prompt_tokens + max_tokens - 1` rows.

    Raises:
        ValueError: unknown key, point or selector, a layer out of range, a position out of reach,
            a selection of nothing.
    """
    consumers = {
        name: _selection(spec, f"{path}.{show_key(name)}", shape, num_prompt_tokens, max_tokens)
        for name, spec in need_mapping(value, path).items()
    }
    if not consumers:
        reject(path, "names no consumer")
    sites = sorted({s for sel in consumers.values() for s in sel.sites}, key=site_order)
    rows = Positions()
    for selection in consumers.values():
        rows = rows | Positions.from_flat(selection.runs)
    return CapturePlan(sites=sites, runs=rows.flat(), consumers=consumers)


def _selection(
    spec: Any, path: str, shape: TapShape, num_prompt_tokens: int, max_tokens: int
) -> Selection:
    spec = need_mapping(spec, path)
    unknown = sorted(str(k) for k in spec.keys() - {"hooks", "positions"})
    if unknown:
        reject(path, f"unknown keys {unknown[:8]}, allowed are 'hooks' and 'positions'")
    if "hooks" not in spec:
        reject(f"{path}.hooks", "is missing: give {point: layers}")
    sites = _sites(spec["hooks"], f"{path}.hooks", shape)
    selector = _Selector(num_prompt_tokens, max_tokens)
    runs = selector.resolve(spec.get("positions", "last_prompt"), f"{path}.positions")
    if not len(runs):
        reject(
            f"{path}.positions",
            f"select nothing: the prompt has {num_prompt_tokens} tokens and "
            f"max_tokens={max_tokens} gives {max(max_tokens - 1, 0)} generated positions",
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


class _Selector:
    """Resolves one `positions` value and remembers what it said outright."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.prompt = num_prompt_tokens
        self.end = num_prompt_tokens + max_tokens - 1
        self.named = Positions()
        self.wants_last_generated = False
        self.wants_other_generated = False

    @property
    def only_last_generated(self) -> bool:
        return self.wants_last_generated and not self.wants_other_generated

    def resolve(self, value: Any, path: str) -> Positions:
        if isinstance(value, str):
            return self._by_name(value, path)
        if isinstance(value, Mapping):
            return self._named(self._range(value, path))
        if isinstance(value, list | tuple | range):
            if len(value) > MAX_POSITION_ENTRIES:
                reject(path, f"has {len(value)} entries, at most {MAX_POSITION_ENTRIES} are read")
            if not value:
                reject(path, "is empty")
            numbers = [x for x in value if isinstance(x, int) and not isinstance(x, bool)]
            if len(numbers) == len(value):
                return self._named(
                    Positions.of(self._one(x, f"{path}[{i}]") for i, x in enumerate(value))
                )
            union = Positions()
            for i, entry in enumerate(value):
                if isinstance(entry, int) and not isinstance(entry, bool):
                    part = self._named(Positions.of([self._one(entry, f"{path}[{i}]")]))
                elif isinstance(entry, list | tuple):
                    reject(f"{path}[{i}]", "is a list inside a list")
                else:
                    part = self.resolve(entry, f"{path}[{i}]")
                union = union | part
            return union
        reject(path, f"unknown selector {show(value)}; {self._allowed()}")

    def _by_name(self, name: str, path: str) -> Positions:
        if name not in NAMED_SELECTORS:
            reject(path, f"unknown selector {show(name)}; {self._allowed()}")
        if name == "last_generated":
            self.wants_last_generated = True
        elif name in ("all_generated", "predicting", "all"):
            self.wants_other_generated = True
        generated = (self.prompt, self.end)
        return Positions(
            {
                "last_prompt": [(self.prompt - 1, self.prompt)],
                "all_prompt": [(0, self.prompt)],
                "all_generated": [generated],
                "last_generated": [generated],
                "predicting": [(self.prompt - 1, self.end)],
                "all": [(0, self.end)],
            }[name]
        )

    def _one(self, position: int, path: str) -> int:
        """An absolute position; negative counts from the prompt's end."""
        absolute = position + self.prompt if position < 0 else position
        if not 0 <= absolute < self.end:
            reject(
                path,
                f"position {position} is out of reach: the prompt has {self.prompt} tokens and "
                f"the last row is at {self.end - 1}",
            )
        return absolute

    def _range(self, value: Mapping[Any, Any], path: str) -> Positions:
        unknown = sorted(str(k) for k in value.keys() - {"start", "stop", "step"})
        if unknown:
            reject(path, f"unknown selector with keys {unknown[:8]}; {self._allowed()}")
        numbers = {"start": 0, "stop": self.end, "step": 1}
        for key, number in value.items():
            if not isinstance(number, int) or isinstance(number, bool):
                reject(f"{path}.{key}", f"must be an int, got {show(number)}")
            numbers[key] = number
        if numbers["step"] < 1:
            reject(f"{path}.step", f"must be at least 1, got {numbers['step']}")
        start = self._one(numbers["start"], f"{path}.start")
        last = numbers["stop"] if numbers["stop"] >= 0 else numbers["stop"] + self.prompt
        if not start < last <= self.end:
            reject(
                f"{path}.stop",
                f"{numbers['stop']} must be after start and at most {self.end}, "
                "one past the last row",
            )
        if numbers["step"] == 1:
            return Positions([(start, last)])
        return Positions.of(range(start, last, numbers["step"]))

    def _named(self, positions: Positions) -> Positions:
        self.named = self.named | positions
        self.wants_other_generated |= positions.stop > self.prompt
        return positions

    @staticmethod
    def _allowed() -> str:
        return (
            f"use {', '.join(NAMED_SELECTORS)}, a list of positions, "
            "{'start', 'stop', 'step'} or a list of these"
        )
