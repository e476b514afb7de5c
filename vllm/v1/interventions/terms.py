# SPDX-License-Identifier: Apache-2.0
"""A term: one operation at one site, as the workers' tables hold it.

`vllm.v1.steering_formula` says what its numbers do.
"""

import hashlib
import struct
from collections.abc import Iterator

import msgspec

from vllm.v1.steering_formula import Scalars

_DECIDING = ("threshold", "sharpness", "frozen", "cosine", "opens", "closes")
"""Numbers of a term that decides and changes nothing: those of the gate, and what it reads."""


class Term(msgspec.Struct, frozen=True):
    """One operation on a row. Two terms of one digest do the same."""

    digest: str
    """Hex SHA-256 over scalars, vector, probe and encoder."""
    vector: bytes
    """float32 [hidden], native endian; of a stream of several lanes [lanes, hidden]."""
    probe: bytes
    """Probe of the gate, in the dtype and shape of `vector`; empty without a gate."""
    scalars: Scalars
    encoder: bytes = b""
    """Encoder of a feature, as `probe`; empty if the row is read by the vector."""
    features: tuple[str, str] | None = None
    """Name and stamp of the autoencoder that it reconstructs by, of one that got its name while the
    engine served."""

    @property
    def probe_digest(self) -> str:
        """The digest of the probe as a content of its own; "" without a gate."""
        return f"{self.digest}/probe" if self.probe else ""

    @property
    def encoder_digest(self) -> str:
        """The digest of the encoder as a content of its own; "" without one."""
        return f"{self.digest}/encoder" if self.encoder else ""

    def contents(self) -> "Iterator[Term]":
        """Yield the contents that take a row of the workers' table each: the term, and the probe of
        its gate and its encoder as terms that no program lists."""
        yield self
        for digest, vector in (
            (self.probe_digest, self.probe),
            (self.encoder_digest, self.encoder),
        ):
            if vector:
                yield Term(digest=digest, vector=vector, probe=b"", scalars=Scalars())

    def deciding(self) -> "Term":
        """A term with this gate and no change: for a last prompt row that only decides."""
        gate = self.scalars._asdict()
        kept = {name: gate[name] for name in _DECIDING}
        return make_term(Scalars(**kept), bytes(len(self.vector)), self.probe, self.encoder)

    def beginning(self) -> "Term":
        """This term at the first row that its latched gate judges."""
        scalars = self.scalars._replace(begins=1.0)
        return make_term(scalars, self.vector, self.probe, self.encoder)


def make_term(scalars: Scalars, vector: bytes, probe: bytes = b"", encoder: bytes = b"") -> Term:
    """Make a term and its digest; shapes and dtypes are those of `Term`."""
    # As float32: that is what acts.
    numbers = struct.pack(f"={len(scalars)}f", *scalars)
    header = f"{len(vector)};{len(probe)};{len(encoder)};".encode()
    digest = hashlib.sha256(header + numbers + vector + probe + encoder).hexdigest()
    return Term(digest=digest, vector=vector, probe=probe, scalars=scalars, encoder=encoder)


def rows_needed(terms: list[Term]) -> int:
    """Rows of the vector table that terms need: one each, and one for each probe and encoder."""
    return sum(1 + bool(term.probe) + bool(term.encoder) for term in terms)
