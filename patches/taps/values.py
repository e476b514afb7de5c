# SPDX-License-Identifier: Apache-2.0
"""The values that the symbolic execution in proof.py computes with."""

import itertools
import re
from dataclasses import dataclass, field

STALE = "stale"
"""The symbol of a residual argument that the block must not read."""
_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Atom:
    """A symbol: a piece of the stream, or computed from it. Compared by identity.

    `what`: its name in messages. `src`: versions of the complete stream it was computed from (empty
    for a piece of the stream). `whole`: false when half of a deferred sum, or a sum that no tap has
    seen, went into it. `stages`: which branches it passed through ("mixer", "mlp"). `calls`:
    declared callables it passed through. `buffer`: whether it is memory that a call is to fill.
    `normed`: (norm, the ids of the terms it was called on). `tapped`: whether a tap returned it
    for the MLP to read.
    """

    what: str
    src: frozenset[int] = frozenset()
    whole: bool = True
    stages: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()
    buffer: bool = False
    normed: tuple[str, tuple[int, ...]] | None = None
    tapped: bool = False

    @property
    def computed(self) -> bool:
        """True if it was computed from the stream, rather than being a piece of it."""
        return bool(self.src)


@dataclass(frozen=True)
class Tensor:
    """A sum of atoms. `storage` tells which names share memory (for in-place operators)."""

    terms: tuple[Atom, ...]
    storage: int = field(default_factory=lambda: next(_serial))

    def text(self) -> str:
        """Return the sum as text, for messages."""
        return " + ".join(a.what for a in self.terms)


@dataclass(frozen=True)
class Plain:
    """A value that is not a tensor of the stream.

    `parts`: the tensors it holds (dicts). `known`: its truth, where this path fixes it.
    """

    parts: tuple[Tensor, ...] = ()
    known: bool | None = None


@dataclass(frozen=True)
class Nothing:
    """The value None."""


@dataclass(frozen=True)
class Several:
    """A tuple of known length."""

    items: "tuple[Value, ...]"


class Impossible(Exception):
    """Raised on a path on which forward() itself would raise."""


Value = Tensor | Plain | Nothing | Several


def same(a: tuple[Atom, ...], b: tuple[Atom, ...]) -> bool:
    """Tell whether two sums have the same terms, each as often."""
    return sorted(map(id, a)) == sorted(map(id, b))


def minus(a: tuple[Atom, ...], b: tuple[Atom, ...]) -> tuple[Atom, ...] | None:
    """Return the terms of `a` without those of `b`, each taken once; None if one is missing."""
    left = list(a)
    for atom in b:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


@dataclass
class State:
    """One path through forward(): variables, and what the stream is at this moment.

    `stream`: the terms of the complete stream; `version` counts the taps that made it.
    `events`: taps called. `used`: declared callables called. `decided`: tests whose value this
    path has fixed.
    """

    env: dict[str, Value]
    stream: tuple[Atom, ...]
    version: int = 0
    events: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()
    decided: dict[str, bool] = field(default_factory=dict)

    def fork(self) -> "State":
        """Return an independent copy."""
        return State(
            dict(self.env),
            self.stream,
            self.version,
            self.events,
            self.used,
            dict(self.decided),
        )

    def forget(self, name: str) -> None:
        """Forget the tests that mention `name`, which was assigned: they are open again."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        self.decided = {t: v for t, v in self.decided.items() if not word.search(t)}
