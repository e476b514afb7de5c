# SPDX-License-Identifier: Apache-2.0
"""The formula of all operations on the stream, and the numbers that it takes.

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

from typing import NamedTuple

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
