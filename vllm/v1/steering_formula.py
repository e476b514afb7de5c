# SPDX-License-Identifier: Apache-2.0
"""The formula of all operations on the stream, and the numbers that it takes.

All operations are one formula, with `h` the row as the term finds it, `h0` the row as
it arrived at the point, `v` the term's vector, `a` what is read of the row, which is `h.v` unless
the term has an encoder, and `g` its gate (1 without one):

    h <- (1 - g (replace + renorm) + g renorm |h0| / |h|) h
         + g (constant + norm |h| + strength (clip(a, lo, hi) - a)) v

    add         constant = scale              v as given
    norm_match  norm = scale                  v of length 1
    ablate      strength, lo = hi = 0         v of length 1
    clamp       strength = 1, lo, hi          v of length 1
    pin         strength = 1, lo = hi = value v of length 1
    replace     replace = constant = alpha    v the new row
    normalize   renorm = 1                    v zeros
    swap        strength = 2, lo = hi = 0     v of length 1, along the difference of two directions
    feature     constant = add, lo = hi = value, strength    v the decoder
    low_rank    strength, lo = hi = 0         v a column of B: a term for each of them

With an encoder `e`, `a` is the activation of a feature of a sparse autoencoder, and with `active`
the change is 0 where `a` is:

    a = z where z = b.e + bias > above, else 0

where `b` is the row before the first of the terms with encoders that follow each other: features
act at once, each on what the autoencoder read, and what it did not reconstruct is kept. A term of
low_rank is one without a threshold (`above` is -inf), whose encoder is a row of -A and whose bias
is a number of -c: its change is strength (A h + c) times a column of B. The first of its terms
`opens` and the last one `closes` what is read at once, which is no other operation's then.

    g = sigmoid(sharpness (h.probe - threshold))

where with `cosine` h is brought to length 1, as the probe is then. Gates of terms with encoders are
decided on `b`, too. A gate that is `latched` is the largest of these g over the rows of the request
from the first on that the operation acts on, up to this one.

Where a term `reconstructs`, h is what an autoencoder makes of the row in its place, and b, of the
first terms with encoders, still the row: features act at once with it.

Where they come from: add, Turner et al. 2023 (arXiv:2308.10248); ablate with strength 1, Arditi et
al. 2024 (arXiv:2406.11717); swap, the reflection of Householder 1958 that takes one direction to
the other; activations by ReLU (above 0) and JumpReLU, Rajamanoharan et al. 2024 (arXiv:2407.14435);
low_rank, the form that LoReFT has, Wu et al. 2024 (arXiv:2404.03592), R^T (W h + b - R h).
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
    cosine: float = 0.0
    """1 if the gate compares the cosine of row and probe, which is of length 1 then."""
    latched: float = 0.0
    """1 if the gate stays as far open as it was at any row before."""
    begins: float = 0.0
    """1 at the first of these rows, where the gate knows of none before."""
    bias: float = 0.0
    above: float = 0.0
    active: float = 0.0
    """1 if it acts only where its feature is active."""
    opens: float = 0.0
    """1 if it reads the row as it is, and not as the terms with encoders before it found it."""
    closes: float = 0.0
    """1 if the next term reads the row anew."""
    reconstructs: float = 0.0
    """1 for the first of the site's autoencoders, 2 for the next: the row is made what it
    reconstructs of it, before all terms."""
    lane: float = -1.0
    """Index of the lane that it acts on, where the stream has several; -1 for each lane by
    itself."""
