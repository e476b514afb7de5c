# SPDX-License-Identifier: Apache-2.0
"""What a request may say about capture: parsed, checked and resolved to positions."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.capture.positions import Positions, Run
from vllm.v1.interventions import CapturePlan, Selection, Site, TapShape
from vllm.v1.sites import need_layers, need_mapping, need_point, reject, show, show_key, site_order

NAMED_SELECTORS = (
    "last_prompt",
    "all_prompt",
    "all_generated",
    "last_generated",
    "predicting",
    "all",
)
MAX_POSITION_ENTRIES = 100_000
"""Entries of one `positions` value, and separate runs it may come to: a client could otherwise
send, or make of a few bytes, a list of any length."""


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
    return CapturePlan(
        sites=sites,
        runs=rows.flat(),
        consumers=consumers,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
    )


def _selection(
    spec: Any, path: str, shape: TapShape, num_prompt_tokens: int, max_tokens: int
) -> Selection:
    spec = need_mapping(spec, path)
    unknown = sorted(show_key(k) for k in spec.keys() - {"hooks", "positions"})
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
        self._named: list[Run] = []
        self.wants_last_generated = False
        self.wants_all_generated = False

    @property
    def only_last_generated(self) -> bool:
        return self.wants_last_generated and not self.wants_all_generated

    @property
    def named(self) -> Positions:
        """What was said outright."""
        return Positions(self._named)

    def resolve(self, value: Any, path: str) -> Positions:
        if not isinstance(value, list | tuple | range):
            return Positions(self._entry(value, path))
        if not value:
            reject(path, "is empty")
        # A slice, because a `range` may be longer than len() can say.
        if len(value[: MAX_POSITION_ENTRIES + 1]) > MAX_POSITION_ENTRIES:
            reject(path, f"has too many entries, at most {MAX_POSITION_ENTRIES} are read")
        runs: list[Run] = []
        for i, entry in enumerate(value):
            if isinstance(entry, list | tuple | range):
                reject(f"{path}[{i}]", "is a list inside a list")
            if isinstance(entry, int) and not isinstance(entry, bool):
                position = self._one(entry, f"{path}[{i}]")
                runs += self._outright([(position, position + 1)])
            else:
                runs += self._entry(entry, f"{path}[{i}]")
            self._need_few(len(runs), path)
        return Positions(runs)

    def _entry(self, value: Any, path: str) -> list[Run]:
        if isinstance(value, str):
            return self._by_name(value, path)
        if isinstance(value, Mapping):
            return self._outright(self._range(value, path))
        reject(path, f"unknown selector {show(value)}; {self._allowed()}")

    def _by_name(self, name: str, path: str) -> list[Run]:
        if name not in NAMED_SELECTORS:
            reject(path, f"unknown selector {show(name)}; {self._allowed()}")
        if name == "last_generated":
            self.wants_last_generated = True
        elif name in ("all_generated", "predicting", "all"):
            self.wants_all_generated = True
        run = {
            "last_prompt": (self.prompt - 1, self.prompt),
            "all_prompt": (0, self.prompt),
            "all_generated": (self.prompt, self.end),
            "last_generated": (self.prompt, self.end),
            "predicting": (self.prompt - 1, self.end),
            "all": (0, self.end),
        }[name]
        return [run]

    def _one(self, position: int, path: str) -> int:
        """An absolute position; negative counts from the prompt's end."""
        absolute = position + self.prompt if position < 0 else position
        if not 0 <= absolute < self.end:
            reject(
                path,
                f"position {show(position)} is out of reach: the prompt has {self.prompt} tokens "
                f"and the last row is at {self.end - 1}",
            )
        return absolute

    def _range(self, value: Mapping[Any, Any], path: str) -> list[Run]:
        unknown = sorted(show_key(k) for k in value.keys() - {"start", "stop", "step"})
        if unknown:
            reject(path, f"no selector has the keys {unknown[:8]}; {self._allowed()}")
        numbers = {"start": 0, "stop": self.end, "step": 1}
        for key, number in value.items():
            if not isinstance(number, int) or isinstance(number, bool):
                reject(f"{path}.{key}", f"must be an int, got {show(number)}")
            numbers[key] = number
        if numbers["step"] < 1:
            reject(f"{path}.step", f"must be at least 1, got {show(numbers['step'])}")
        start = self._one(numbers["start"], f"{path}.start")
        last = numbers["stop"] if numbers["stop"] >= 0 else numbers["stop"] + self.prompt
        if not start < last <= self.end:
            reject(
                f"{path}.stop",
                f"{show(numbers['stop'])} must be after start and at most {self.end}, "
                "one past the last row",
            )
        if numbers["step"] == 1:
            return [(start, last)]
        positions = range(start, last, numbers["step"])
        self._need_few(len(positions), path)
        return [(p, p + 1) for p in positions]

    def _outright(self, runs: list[Run]) -> list[Run]:
        self._named += runs
        return runs

    @staticmethod
    def _need_few(num_runs: int, path: str) -> None:
        if num_runs > MAX_POSITION_ENTRIES:
            reject(path, f"come to more than {MAX_POSITION_ENTRIES} separate runs of positions")

    @staticmethod
    def _allowed() -> str:
        return (
            f"use {', '.join(NAMED_SELECTORS)}, a list of positions, "
            "{'start', 'stop', 'step'} or a list of these"
        )
