# SPDX-License-Identifier: Apache-2.0
"""A term: one operation at one site, as the workers' tables hold it.

All operations are one formula, with `h` the row as the term finds it, `h0` the row as
it arrived at the point, `v` the term's vector and `g` its gate (1 without one):

    h <- (1 - g (replace + renorm) + g renorm |h0| / |h|) h
         + g (constant + norm |h| + strength (clip(h.v, lo, hi) - h.v)) v

    add         constant = scale              v as given
    norm_match  norm = scale                  v of length 1
    ablate      strength, lo = hi = 0         v of length 1
    clamp       strength = 1, lo, hi          v of length 1
    pin         strength = 1, lo = hi = value v of length 1
    replace     replace = constant = alpha    v the new row
    normalize   renorm = 1                    v zeros
    swap        strength = 2, lo = hi = 0     v of length 1, along the difference of two directions

    g = sigmoid(sharpness (h.probe - threshold))

Where they come from: add, Turner et al. 2023 (arXiv:2308.10248); ablate with strength 1, Arditi et
al. 2024 (arXiv:2406.11717); swap, the reflection of Householder 1958 that takes one direction to
the other.
"""

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

INF = float("inf")


class Scalars(NamedTuple):
    """The numbers of a term, in the order of the columns of the workers' table."""

    constant: float = 0.0
    norm: float = 0.0
    strength: float = 0.0
    lo: float = -INF
    hi: float = INF
    replace: float = 0.0
    renorm: float = 0.0
    threshold: float = 0.0
    sharpness: float = 0.0
    frozen: float = 0.0
    """1 if the gate is decided at the last prompt row and kept."""
    lane: float = -1.0
    """Index of the lane that it acts on, where the stream has several; -1 for each lane by
    itself."""


class Term(msgspec.Struct, frozen=True):
    """One operation on a row. Two terms of one digest do the same."""

    digest: str
    """Hex SHA-256 over scalars, vector and probe."""
    vector: bytes
    """float32 [hidden], native endian; of a stream of several lanes [lanes, hidden]."""
    probe: bytes
    """Probe of the gate, in the dtype and shape of `vector`; empty without a gate."""
    scalars: Scalars

    @property
    def probe_digest(self) -> str:
        """The digest of the probe as a content of its own; "" without a gate."""
        return f"{self.digest}/probe" if self.probe else ""

    def contents(self) -> "Iterator[Term]":
        """Yield the contents that take a row of the workers' table each: the term, and the probe of
        its gate as a term that no program lists."""
        yield self
        if self.probe:
            yield Term(digest=self.probe_digest, vector=self.probe, probe=b"", scalars=Scalars())

    def deciding(self) -> "Term":
        """A term with this gate and no change: for a last prompt row that only decides."""
        gate = self.scalars._asdict()
        kept = {name: gate[name] for name in ("threshold", "sharpness", "frozen")}
        return make_term(Scalars(**kept), bytes(len(self.vector)), self.probe)


def make_term(scalars: Scalars, vector: bytes, probe: bytes = b"") -> Term:
    """Make a term and its digest; shapes and dtypes are those of `Term`."""
    # As float32: that is what acts.
    numbers = struct.pack(f"={len(scalars)}f", *scalars)
    header = f"{len(vector)};{len(probe)};".encode()
    digest = hashlib.sha256(header + numbers + vector + probe).hexdigest()
    return Term(digest=digest, vector=vector, probe=probe, scalars=scalars)


def rows_needed(terms: list[Term]) -> int:
    """Rows of the vector table that terms need: one each, and one for the probe of a gate."""
    return sum(2 if term.probe else 1 for term in terms)
