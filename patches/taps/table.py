# SPDX-License-Identifier: Apache-2.0
"""The table lists every decoder-like class of the two model trees, and what becomes of it.

The rows are in `table_fused.py`, `table_summed.py`, `table_hand.py` (wired), `table_rest.py`
(inherited, refused) and `table_excluded.py`. A refused class says why at start-up.
"""

from collections.abc import Callable

from patches.taps import table_0_33_0
from patches.taps.rows import Row
from patches.taps.table_excluded import EXCLUDED
from patches.taps.table_fused import FUSED, PAIRED, SANDWICH_FUSED, SINGLE_MIXER
from patches.taps.table_hand import HAND
from patches.taps.table_rest import INHERITED, REFUSED
from patches.taps.table_summed import NORMED, PARALLEL, SANDWICH_UNFUSED, UNFUSED

ROWS: tuple[Row, ...] = (
    *FUSED,
    *SINGLE_MIXER,
    *SANDWICH_FUSED,
    *PAIRED,
    *UNFUSED,
    *SANDWICH_UNFUSED,
    *NORMED,
    *PARALLEL,
    *HAND,
    *INHERITED,
    *REFUSED,
    *EXCLUDED,
)
"""All rows of the table."""

OTHERS: dict[str, Callable[[tuple[Row, ...]], tuple[Row, ...]]] = {"0.33.0": table_0_33_0.rows}
"""The tables of the versions beside the pinned one, made from ROWS."""


def rows(version: str) -> tuple[Row, ...]:
    """Return the rows of a version of upstream: ROWS, but for those that differ there."""
    return OTHERS[version](ROWS) if version in OTHERS else ROWS
