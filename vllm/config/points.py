# SPDX-License-Identifier: Apache-2.0
"""Points of the model at which rows are steered and captured, each in one row of a table.

The codemod (patches/taps) runs this file by its path, where vLLM is not installed: it imports
nothing but the standard library.
"""

from dataclasses import dataclass
from enum import Enum


class Rows(Enum):
    """Kind of the rows of a point."""

    STREAM = "of the residual stream"
    HEADS = "of the heads of attention"
    INPUT = "of what a branch reads, after its norm"
    INNER = "of a module within a branch, of a width of their own"
    BRANCH = "of a branch, float32: the stream after it less the stream before it"


@dataclass(frozen=True)
class Point:
    """A point, all of which can be captured."""

    name: str
    rows: Rows
    steered: bool = False
    """True if it can be steered."""
    made_of: tuple[str, ...] = ()
    """Points of its layer that are copied in its place: one whose rows it has, or the two whose
    difference they are, the first less the second. Empty for a point that is copied itself."""
    instead: str = ""
    """The point to name where this one, which can only be captured, is not allowed."""

    @property
    def copied(self) -> tuple[str, ...]:
        """The points whose rows are copied for those of this one."""
        return self.made_of or (self.name,)


EMBED = "embed"
"""Name of the point that the first block reads."""

QUERIES = "q"
"""Name of the point of attention that has the queries, as they meet keys."""

RETURNED = "z"
"""Name of the point of attention that has what each head returns, and that can be steered."""

ROUTER = "router_logits"
"""Name of the point that has the logits by which a token's experts are chosen."""

NEURONS = "mlp_act"
"""Name of the point that has what the down projection of a dense MLP reads."""

FINAL = "final"
"""Name of the point that the head reads, which has no tap: its rows are what the model returns."""

POINTS = {
    point.name: point
    for point in (
        Point(EMBED, Rows.STREAM, made_of=("pre_attn",), instead="pre_attn of layer 0"),
        Point("pre_attn", Rows.STREAM, steered=True),
        Point(QUERIES, Rows.HEADS),
        Point("k", Rows.HEADS),
        Point("v", Rows.HEADS),
        Point(RETURNED, Rows.HEADS, steered=True),
        Point("attn_out", Rows.BRANCH, made_of=("post_attn", "pre_attn"), instead="post_attn"),
        Point("post_attn", Rows.STREAM, steered=True),
        Point("mlp_in", Rows.INPUT, steered=True),
        Point(ROUTER, Rows.INNER, instead="post_attn"),
        Point(NEURONS, Rows.INNER, instead="post_block"),
        Point("mlp_out", Rows.BRANCH, made_of=("post_block", "post_attn"), instead="post_block"),
        Point("post_block", Rows.STREAM, steered=True),
        Point(FINAL, Rows.STREAM, instead="post_block of the last layer"),
    )
}
"""Name -> point, in the order in which the model computes them."""

READ_POINTS = tuple(POINTS)
"""Names of the points that a capture may name."""

CAPTURE_POINTS = tuple(p.name for p in POINTS.values() if not p.made_of)
"""Names of the points that are copied themselves."""

STEERING_POINTS = tuple(p.name for p in POINTS.values() if p.steered)
"""Names of the points that can be steered."""

STREAM_POINTS = tuple(p for p in STEERING_POINTS if POINTS[p].rows is Rows.STREAM)
"""The points of a decoder block, each of which is a tap in the residual stream."""

INPUT_POINTS = tuple(p.name for p in POINTS.values() if p.rows is Rows.INPUT)
"""The points of a decoder block, each of which is a tap in what a branch reads."""

BLOCK_POINTS = tuple(p for p in STEERING_POINTS if p in (*STREAM_POINTS, *INPUT_POINTS))
"""Names of the points that are taps of a decoder block."""

HEAD_POINTS = tuple(p.name for p in POINTS.values() if p.rows is Rows.HEADS)
"""The points of an attention layer, whose rows are heads: what it gets, and what it returns."""

INNER_POINTS = tuple(p.name for p in POINTS.values() if p.rows is Rows.INNER)
"""The points of modules within a branch, whose rows are as wide as `LayerShape.widths` says."""

RESIDUAL_POINTS = tuple(p for p in READ_POINTS if p not in (*HEAD_POINTS, *INNER_POINTS))
"""Names of the points whose rows are as wide as the residual stream."""

ATTENTION_POINTS = (QUERIES, RETURNED)
"""The points that attention weights need: queries, and z, which proves the weights."""
