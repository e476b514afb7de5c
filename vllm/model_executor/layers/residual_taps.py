# SPDX-License-Identifier: Apache-2.0
"""Taps: where a decoder layer's residual stream is read and written.

The codemod (patches/taps) gives every wired decoder layer class a class attribute
`taps = UnboundTaps(...)` and calls to its methods. After the target model is loaded, the worker
replaces `layer.taps` on each *instance* (`BoundTaps`), so draft models that reuse a target's layer
class keep taps that do nothing.

A tap's code is traced by torch.compile and recorded in CUDA graphs, therefore it

* holds only tensors that live as long as the engine and are changed in place, and
* mentions no layer number: a Python int would make every layer compile separately.

Shapes: `h`, `r` are [tokens, hidden], rows of one step; `tokens` may be padded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from vllm.config.points import BLOCK_POINTS, INPUT_POINTS, POINTS, STREAM_POINTS, Rows
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.row_capture import capture_rows
from vllm.model_executor.layers.steering_terms import TermTables, steer_terms

Made = TypeVar("Made")
"""Type of the result that upstream makes of the stream in the kernel that completes the stream: the
stream's norm, or a mixture of its lanes and their factors."""
Parts = TypeVar("Parts", bound=tuple[torch.Tensor | None, ...])
"""Type of the tensors that upstream hands from kernel to kernel instead of the stream, which the
next kernel completes."""


class PassTap:
    """A tap that does nothing and traces to nothing."""

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def steer_pair(
        self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hand both halves on."""
        return h, r

    def read(self, h: torch.Tensor) -> None:
        """Capture nothing."""
        return None

    def steer_and_capture_pair(
        self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hand both halves on."""
        return h, r

    def norm_if_unsteered(self, n: torch.Tensor | None) -> torch.Tensor | None:
        """Hand the norm on."""
        return n

    def renorm(
        self, n: Made, s: torch.Tensor, norm: Callable[[torch.Tensor], Made]
    ) -> tuple[Made, torch.Tensor]:
        """Hand the norm and the stream on."""
        return n, s

    def settle(
        self,
        parts: Parts,
        write: Callable[..., torch.Tensor],
        parts_of: Callable[[torch.Tensor], Parts],
    ) -> Parts:
        """Hand the parts on."""
        return parts


class UnboundTaps:
    """Class-level default of a wired decoder layer class.

    Args:
        points: the points this class's `forward` calls, a subset of `BLOCK_POINTS`.
        unless: what the wiring assumes away: attributes of the layer that must be false, or true
            after "not ", and "float16", the model's dtype.
        loops: of layers that run several times for a token, the submodule whose children are the
            attention of each execution, named as `at` is called; empty for all others.
        lanes: of layers whose stream has several lanes, the attribute that says how many; empty for
            all others.
        refused: why layers of this class cannot have taps, empty when they can.
        replaced: the points at which the stream may be other than the one before plus a branch.
    """

    pre_attn = PassTap()
    post_attn = PassTap()
    mlp_in = PassTap()
    post_block = PassTap()

    def __init__(
        self,
        *points: str,
        unless: tuple[str, ...] = (),
        loops: str = "",
        lanes: str = "",
        refused: str = "",
        replaced: tuple[str, ...] = (),
    ) -> None:
        unknown = sorted(set(points) - set(BLOCK_POINTS))
        if unknown:
            raise ValueError(f"UnboundTaps: unknown points {unknown}, allowed are {BLOCK_POINTS}")
        self.points = tuple(p for p in STREAM_POINTS if p in points)
        self.inputs = tuple(p for p in INPUT_POINTS if p in points)
        """Points of what its branches read."""
        self.unless = unless
        self.loops = loops
        self.lanes = lanes
        self.refused = refused
        kept = set(points).difference(replaced)
        self.branches = tuple(
            p.name
            for p in POINTS.values()
            if p.rows is Rows.BRANCH and p.made_of[0] in kept and p.made_of[1] in points
        )
        """Branches that are the difference of two of the points."""

    def at(self, execution: int) -> "UnboundTaps":
        """Hand itself on: no execution of the layer has taps."""
        return self


class SiteTap:
    """One point of one layer, reading and writing for this step's requests.

    Args:
        table: [rows, hidden] in the model's dtype, row 0 zeros; None when this point is not
            steered by this engine.
        terms: what ops other than addition read; None when the engine has none of them.
        slots: int32 [max tokens], the table row of each token; shared by all sites.
        arena: [rows, hidden] in the model's dtype, where captured rows go, shared by all sites;
            None when the engine captures nothing.
        dest: int32 [max tokens], the arena row of each token at this site, -1 for none.
        switch: bool [] in the host's memory, whether this step captures here.
    """

    def __init__(
        self,
        table: torch.Tensor | None,
        terms: TermTables | None,
        slots: torch.Tensor,
        arena: torch.Tensor | None,
        dest: torch.Tensor | None,
        switch: torch.Tensor | None,
    ) -> None:
        self.table = table
        self.terms = terms
        self.slots = slots
        self.arena = arena
        self.dest = dest
        self.switch = switch

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Steer and then capture a stream that is whole in `h`."""
        h = self.steer(h)
        self.read(h)
        return h

    def steer_pair(
        self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Steer a stream deferred as `h + r` before the norm that adds them; captures nothing.

        `r` takes the vector because `h` may be a tensor-parallel partial sum (`partial`: the model
        reduces it later, zeros too). The first block has no `r` yet: its stream is `h`.
        """
        if r is None:
            return self.steer(h), None
        if self.terms is None:
            return h, self.steer(r)
        # An op reads the whole stream, and its result is exact in one piece only.
        return torch.zeros_like(h), self.steer(whole(h, partial) + r)

    def steer(self, h: torch.Tensor) -> torch.Tensor:
        """Steer a stream that is whole in `h`, which is not changed; `h` itself if this point is
        not steered."""
        if self.table is None:
            return h
        if self.terms is not None:
            h = h.clone()  # the op works in place; the caller may keep the tensor it gave
            steer_terms(h, self.table, self.slots, self.terms)
            return h
        return h + rows_of(self.table, self.slots[: h.shape[0]])

    def read(self, h: torch.Tensor) -> None:
        """Capture rows of a stream that is whole in `h`."""
        if self.arena is not None and self.dest is not None and self.switch is not None:
            capture_rows(h, self.arena, self.dest, self.switch)

    def steer_and_capture_pair(
        self, h: torch.Tensor, r: torch.Tensor | None, partial: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Steer a stream deferred as `h + r` and capture the sum; returns the new halves."""
        h, r = self.steer_pair(h, r, partial)
        if self.arena is not None:
            self.read(h if r is None else whole(h, partial) + r)
        return h, r

    def norm_if_unsteered(self, n: torch.Tensor | None) -> torch.Tensor | None:
        """Keep `n`, a norm of the stream from before this point; None, to be computed again, if the
        point is steered."""
        return n if self.table is None else None

    def renorm(
        self, n: Made, s: torch.Tensor, norm: Callable[[torch.Tensor], Made]
    ) -> tuple[Made, torch.Tensor]:
        """Steer and capture a stream `s` whose norm `n` is computed already; returns the new norm
        and the new stream."""
        new = self(s)
        return (n if new is s else norm(new)), new


class LanesTap(SiteTap):
    """One point of one layer whose stream has several lanes: `h` is [lanes, tokens, hidden].

    The table is [rows, lanes * hidden], and a captured row takes an arena row for each lane.
    """

    def steer(self, h: torch.Tensor) -> torch.Tensor:
        """Steer all lanes of `h`, which is not changed."""
        if self.table is None:
            return h
        if self.terms is not None:
            h = h.clone(memory_format=torch.contiguous_format)
            steer_terms(h, self.table, self.slots, self.terms)
            return h
        added = rows_of(self.table, self.slots[: h.shape[1]])
        return h + added.unflatten(1, (h.shape[0], -1)).transpose(0, 1)

    def read(self, h: torch.Tensor) -> None:
        """Capture rows of all lanes, one lane after the other."""
        if self.arena is not None and self.dest is not None and self.switch is not None:
            capture_rows(h.transpose(0, 1).flatten(1), self.arena, self.dest, self.switch)

    def renorm(
        self, n: Made, s: torch.Tensor, norm: Callable[[torch.Tensor], Made]
    ) -> tuple[Made, torch.Tensor]:
        """Steer and capture a stream `s`, [tokens, lanes, hidden], of which the mixture `n` is made
        already; returns the new mixture and the new stream."""
        new = self.by_token(s)
        return (n if new is s else norm(new)), new

    def settle(
        self,
        parts: Parts,
        write: Callable[..., torch.Tensor],
        parts_of: Callable[[torch.Tensor], Parts],
    ) -> Parts:
        """Steer and capture a stream that a later kernel would write back: it is written back here.

        Args:
            parts: what that kernel would get.
            write: gives the stream of them, [tokens, lanes, hidden].
            parts_of: gives parts that are written back to exactly the stream it gets.
        """
        return parts_of(self.by_token(write(*parts)))

    def by_token(self, s: torch.Tensor) -> torch.Tensor:
        """Steer and capture `s`, [tokens, lanes, hidden] as upstream's kernels have it; `s` itself
        if this point is not steered."""
        lanes = s.transpose(0, 1)
        new = self(lanes)
        return s if new is lanes else new.transpose(0, 1).contiguous()


def rows_of(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`table[rows]`, [tokens, width], of rows that are there.

    Inductor fuses it into the neighbouring add and norm, and makes no check of bounds in the loop
    of that kernel, which takes longer than the addition where there are few tokens.
    """
    return torch.ops.aten._unsafe_index.Tensor(table, [rows])


def whole(h: torch.Tensor, partial: bool) -> torch.Tensor:
    """`h`, summed over tensor-parallel ranks if it is a partial sum."""
    # Some backends reduce in place, and the model reduces `h` again itself.
    return tensor_model_parallel_all_reduce(h.clone()) if partial else h


@dataclass
class BoundTaps:
    """The taps of one layer instance of the target model."""

    pre_attn: PassTap | SiteTap
    post_attn: PassTap | SiteTap
    mlp_in: PassTap | SiteTap
    post_block: PassTap | SiteTap


class LoopedTaps:
    """The taps of one layer instance that runs several times for a token.

    Args:
        executions: by the number that upstream gives `forward` for each.
    """

    def __init__(self, executions: dict[int, BoundTaps]) -> None:
        self._executions = executions

    def at(self, execution: int) -> BoundTaps:
        """The taps of one execution; traced code has those alone, not the number."""
        return self._executions[execution]
