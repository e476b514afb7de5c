# SPDX-License-Identifier: Apache-2.0
"""What a `positions` selector means, for judging: no code shared with the engine's own."""

from __future__ import annotations

from typing import Any


def expected_positions(selector: Any, prompt: int, generated: int) -> list[int]:
    """The positions a selector means once a request has ended."""
    rows = prompt + generated - 1
    if isinstance(selector, list):
        excepts = [isinstance(s, dict) and "except" in s for s in selector]
        less = [s["except"] for s, is_except in zip(selector, excepts, strict=True) if is_except]
        kept = [s for s, is_except in zip(selector, excepts, strict=True) if not is_except]
        parts = [expected_positions(s, prompt, generated) for s in kept]
        gone = {p for s in less for p in expected_positions(s, prompt, generated)}
        return sorted({p for part in parts for p in part} - gone)
    if isinstance(selector, int):
        absolute = selector if selector >= 0 else prompt + selector
        return [absolute] if absolute < rows else []
    if isinstance(selector, dict):
        first = prompt if "of" in selector else 0
        if "at" in selector:
            return sorted({first + p for p in selector["at"]})
        start, stop = first + selector.get("start", 0), first + selector.get("stop", rows)
        return list(range(start, min(stop, rows), selector.get("step", 1)))
    return {
        "last_prompt": [prompt - 1],
        "all_prompt": list(range(prompt)),
        "all_generated": list(range(prompt, rows)),
        "last_generated": [rows - 1] if generated > 1 else [],
        "predicting": list(range(prompt - 1, rows)),
        "all": list(range(rows)),
    }[selector]
