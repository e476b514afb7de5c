# SPDX-License-Identifier: Apache-2.0
"""Pairs of letters for a tiny model that reads single characters: capitals are wanted."""

from __future__ import annotations

import random

from vllm.pilot.pairs import Example, Pairs


def letter_pairs(count: int = 30, seed: int = 0) -> Pairs:
    """So many prompts of 6 letters, followed by three of XYZ, or by three of pqr."""
    rng = random.Random(seed)
    positive: list[Example] = []
    negative: list[Example] = []
    for i in range(count):
        prompt = "".join(rng.choice("abcdefghijklmno") for _ in range(6))
        for text, side in (("XYZ", positive), ("pqr", negative)):
            written = "".join(rng.choice(text) for _ in range(3))
            side.append(Example(written, prompt, where=f"letters:{i + 1}"))
    return Pairs(positive, negative, source="letters")
