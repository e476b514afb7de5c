# SPDX-License-Identifier: Apache-2.0
"""The table lists every decoder-like class of the two model trees, and what becomes of it.

The rows are in `table_fused.py`, `table_summed.py`, `table_hand.py` (wired), `table_rest.py`
(inherited, refused) and `table_excluded.py`. A refused class says why at start-up.
"""

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
