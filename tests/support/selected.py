# SPDX-License-Identifier: Apache-2.0
"""What a `positions` selector means, for judging: no code shared with the engine's own."""

from __future__ import annotations

from typing import Any


def expected_positions(selector: Any, prompt: int, generated: int) -> list[int]:
    """The positions a selector means once a request has ended."""
    rows = prompt + generated - 1
    if isinstance(selector, list):
        parts = [expected_positions(s, prompt, generated) for s in selector]
        return sorted({p for part in parts for p in part})
    if isinstance(selector, int):
        absolute = selector if selector >= 0 else prompt + selector
        return [absolute] if absolute < rows else []
    if isinstance(selector, dict):
        start, stop = selector.get("start", 0), selector.get("stop", rows)
        return list(range(start, min(stop, rows), selector.get("step", 1)))
    return {
        "last_prompt": [prompt - 1],
        "all_prompt": list(range(prompt)),
        "all_generated": list(range(prompt, rows)),
        "last_generated": [rows - 1] if generated > 1 else [],
        "predicting": list(range(prompt - 1, rows)),
        "all": list(range(rows)),
    }[selector]
