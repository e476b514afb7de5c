# SPDX-License-Identifier: Apache-2.0
"""Every decoder-like class of the two model trees, and what becomes of it."""

from patches.taps.rows import Row
from patches.taps.table_fused import FUSED, SANDWICH_FUSED, SINGLE_MIXER
from patches.taps.table_summed import PARALLEL, SANDWICH_UNFUSED, UNFUSED

ROWS: tuple[Row, ...] = (
    *FUSED,
    *SINGLE_MIXER,
    *SANDWICH_FUSED,
    *UNFUSED,
    *SANDWICH_UNFUSED,
    *PARALLEL,
)
