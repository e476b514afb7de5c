# SPDX-License-Identifier: Apache-2.0
"""Focus: the weights of the keys of a span, multiplied and renormalised.

With logits s, weights A and a factor w on the keys S of a span, attention is softmax(s + log w on
S), so A becomes A w / (1 + (w - 1) m) on S and A / (1 + (w - 1) m) elsewhere, where m is the sum of
A over S. A share sets m instead: w is what it takes, where m is less.

Where it comes from: a factor over all heads is InstABoost (arXiv:2506.13734), one of chosen heads
PASTA (arXiv:2311.02262), a share Spotlight (arXiv:2505.12025), 0 attention knock-out
(arXiv:2304.14767).
"""

import msgspec

FOCUS = "focus"
"""The operation's name in requests."""
FACTOR, SHARE, RATIO = 1, 2, 3
"""Rules: w is a number; what the span has of all weight becomes a number a, where it is less; w is
a by what it has."""

MAX_FACTORS = 4
"""The most factors at one layer; of shares there is one."""
MAX_RUNS = 64
"""The most runs of neighbouring keys that the spans of one layer may have together."""


class FocusOp(msgspec.Struct, frozen=True, array_like=True):
    """One `focus` of a request, as workers know it."""

    rule: int
    number: float
    """A factor >= 0, or a share in (0, 1)."""
    heads: dict[int, tuple[int, ...]]
    """Layer -> its heads, sorted; () for all."""
    runs: list[int]
    """The keys of the span: start, stop (exclusive) of each run, flattened; sorted, disjoint."""


class FocusProgram(msgspec.Struct, frozen=True, array_like=True):
    """A set of a request's focus operations that act together."""

    digest: str
    """Hex SHA-256 over what acts."""
    ops: list[int]
    """Their places among the request's."""
