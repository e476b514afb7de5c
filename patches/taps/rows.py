# SPDX-License-Identifier: Apache-2.0
"""The table's vocabulary: what a row may say about a decoder class."""

import runpy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_POINTS = Path(__file__).parents[2] / "vllm/config/points.py"
_TABLE = runpy.run_path(str(_POINTS))
ALL_POINTS: tuple[str, ...] = _TABLE["STREAM_POINTS"]
"""The points of the stream that a block can have, in stream order."""
BLOCK_POINTS: tuple[str, ...] = _TABLE["BLOCK_POINTS"]
"""The points that a block can have, in the order in which it computes them."""
MLP_IN = "mlp_in"
"""Name of the point of what the MLP reads."""
FLOAT16 = "hidden_states.dtype == torch.float16"
"""The test of upstream for float16, as `Row.assume` names it."""
MODELS = "vllm/model_executor/models/"
FAMILIES = "vllm/models/"
"""The two folders of upstream's models."""


class Idiom(Enum):
    """Way in which a decoder block carries the stream (docs/hook-contract.md)."""

    FUSED = "fused"  # (hidden, residual) pair, norms that add
    FUSED_SINGLE = "fused-single-mixer"  # FUSED with one mixer and no second norm
    PAIRED = "paired"  # a pair whose norms a call hides, or some layers lack
    UNFUSED = "unfused"  # explicit sums, one complete stream
    SANDWICH_FUSED = "sandwich-fused"  # FUSED with a norm on each branch's output
    SANDWICH_UNFUSED = "sandwich-unfused"  # UNFUSED with a norm on each branch's output
    NORMED = "normed"  # UNFUSED with the first sum and the second norm inside one call
    PARALLEL = "parallel"  # mixer and MLP from the same input, or one mixer, one sum
    LANES = "lanes"  # one tensor of several lanes, which the block mixes before and after
    HAND = "hand"  # lines and a digest of the class, for what the proof cannot read
    INHERITED = "inherited"  # forward() comes from a wired class
    EXCLUDED = "excluded"  # never wired, and why
    REFUSED = "refused"  # not wired, and why: the class says so at run time


DEFERRED = frozenset({Idiom.FUSED, Idiom.FUSED_SINGLE, Idiom.SANDWICH_FUSED, Idiom.PAIRED})
SUMMED = frozenset(
    {Idiom.UNFUSED, Idiom.SANDWICH_UNFUSED, Idiom.NORMED, Idiom.PARALLEL, Idiom.LANES}
)
WIRED = DEFERRED | SUMMED | {Idiom.HAND}
"""The idioms whose classes get taps. The stream is a pair of tensors in DEFERRED, one in SUMMED."""


class NormCall(Enum):
    """The meaning of a norm that is called with two arguments."""

    ADDS = "norm(h, r) -> (N(h + r), h + r)"
    PASSES = "norm(h, r) -> (N(h), r)"  # Cohere


class Second(Enum):
    """The second value that forward() returns, in the idioms that return a complete stream."""

    ABSENT = "return h"
    NONE = "return h, None"
    STALE = "return h, residual, where residual is old and no reader uses it"


class Allow(Enum):
    """A thing that a class does beyond its idiom, and that leaves the points' meaning as it is."""

    NO_MIXER = "some layers have no mixer: it counts as one that adds nothing"
    NO_MLP = "some configuration has no MLP"
    NORMED_SKIP = "some configuration lets the skip carry the normed value"
    POST_NORM = "some configuration norms the sums instead of the branches"
    TAIL = "the block ends with operations on the whole stream; post_block is what they leave"
    NO_MLP_IN = "no one tensor is a norm of the stream and read by the MLP alone: no mlp_in"
    UNTAPPED_SUM = "some configuration sums in the middle too, where the class has no point"


@dataclass(frozen=True)
class Row:
    """One decoder class, and how it is wired.

    `norms`: attributes of the norms that read the stream, in order. In the fused idioms the first
    is the one of `if residual is None`, the others are the ones that take the deferred sum before
    the MLP. `branch_norms`: norms applied to a branch's output. `mixers`, `mlps`: the callables of
    the two branches, as written after `self.`. `functions`: what else a branch passes through
    (reductions over ranks, say): all must occur, and nothing undeclared may.
    `stream`, `residual`, `skip`: names of variables in forward(). `assume`: tests (source text)
    that must be false for the wiring to be right: `self.<attribute>`, `not self.<attribute>`, or
    FLOAT16. They go into the
    class attribute, and the binder refuses a layer for which one is true.
    `given`: (attribute, definition in `__init__`) that tests depend on, with `self.config` for
    `config`. `inline`: methods and sublayers, as written after `self.`, whose code belongs to the
    block. `anchor`: the start of the statement before which PAIRED puts post_attn. `renorm`:
    (callee, norm) of NORMED, after `self.`. `lines`, `digest`: of HAND, (before or after, text of
    the statement, line), and hand.py's digest of upstream's class. `allow`: see Allow.
    `loops`: of a class whose layers run several times a token, the parameter of forward() that says
    which time, and what holds the attention of each, after `self.`. `lanes`: of LANES and HAND, the
    attribute that says how many there are, after `self.`. `method`: of HAND, the method that has
    the block's code, if forward() only calls it. `parent`: "file:Class", for INHERITED. `reason`:
    for EXCLUDED and REFUSED.
    """

    file: str
    cls: str
    idiom: Idiom
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    branch_norms: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ("self_attn",)
    mlps: tuple[str, ...] = ("mlp",)
    functions: tuple[str, ...] = ()
    stream: str = "hidden_states"
    residual: str = "residual"
    skip: str = "residual"
    norm_call: NormCall = NormCall.ADDS
    second: Second = Second.ABSENT
    assume: tuple[str, ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    inline: tuple[str, ...] = ()
    anchor: str = ""
    renorm: tuple[str, str] = ("", "")
    lines: tuple[tuple[str, str, str], ...] = ()
    digest: str = ""
    allow: frozenset[Allow] = frozenset()
    loops: tuple[str, str] = ("", "")
    lanes: str = ""
    method: str = "forward"
    parent: str = ""
    reason: str = ""

    @property
    def points(self) -> tuple[str, ...]:
        """The points of this class, in stream order."""
        if self.idiom in (Idiom.EXCLUDED, Idiom.REFUSED, Idiom.INHERITED):
            return ()
        if self.idiom is Idiom.HAND:
            return tuple(
                p for p in ALL_POINTS if any(f"taps.{p}" in line for *_, line in self.lines)
            )
        whole = self.idiom is Idiom.FUSED and Allow.UNTAPPED_SUM in self.allow
        if whole or self.idiom in (Idiom.PARALLEL, Idiom.FUSED_SINGLE, Idiom.LANES):
            return ("pre_attn", "post_block")
        return ALL_POINTS

    @property
    def taps(self) -> tuple[str, ...]:
        """The points of this class that have taps, in the order in which it computes them."""
        own = (*self.points, *(MLP_IN,) * self.mlp_in)
        return tuple(p for p in BLOCK_POINTS if p in own)

    @property
    def mlp_in(self) -> bool:
        """True if what the MLP reads is a point: one tensor, a norm of the stream, that nothing
        else reads."""
        proved = self.idiom in WIRED - {Idiom.HAND, Idiom.LANES}
        return proved and bool(self.mlps) and Allow.NO_MLP_IN not in self.allow

    @property
    def replaced(self) -> tuple[str, ...]:
        """The points at which the stream is not proved to be the one before plus a branch."""
        if self.idiom is Idiom.HAND or self.allow & {Allow.NORMED_SKIP, Allow.POST_NORM}:
            return tuple(p for p in self.points if p != "pre_attn")
        return ("post_block",) if Allow.TAIL in self.allow else ()

    @property
    def unless(self) -> tuple[str, ...]:
        """The tests of `assume` for the binder: "<attribute>", "not <attribute>" or "float16"."""
        return tuple("float16" if a == FLOAT16 else a.replace("self.", "") for a in self.assume)

    @property
    def key(self) -> str:
        """The row's name `file:Class`, unique in the table."""
        return f"{self.file}:{self.cls}"
