# SPDX-License-Identifier: Apache-2.0
"""What a request may say about operations (`SamplingParams.steering`): parsed and checked."""

from dataclasses import dataclass

from vllm.v1.capture.positions import Positions
from vllm.v1.interventions import Site
from vllm.v1.steering.terms import Term


@dataclass(frozen=True)
class Op:
    """One entry of `steering`."""

    name: str
    """One of `terms.OPS`."""
    sites: list[Site]
    positions: Positions | None
    """Where it acts; None for everywhere."""
    terms: list[Term]
    """One; `replace` has one for each of `positions`, ascending."""
    frozen: bool
    """Whether its gate is decided at the last prompt row: it acts from there on, and where it does
    not act on that row itself, the row needs `terms[0].deciding()`."""
