# SPDX-License-Identifier: Apache-2.0
"""KV blocks that hold what steered requests wrote, cleared before another request gets them.

Some backends of attention read a whole block and give positions past a request's end the weight 0,
and 0 times a NaN is a NaN. So no request may find in its blocks what a steered request, which can
make any number, left there.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData


class StaleBlocks:
    """Block ids that steered requests wrote to since they were last cleared."""

    def __init__(self, num_blocks: int, clears: bool) -> None:
        """Start with no stale block.

        Args:
            num_blocks: number of KV blocks in the pool.
            clears: False if attention multiplies nothing that it masks, so that no block is stale.
        """
        self._num_blocks = num_blocks
        self._clears = clears
        self._stale: set[int] = set()
        self.writers: set[str] = set()
        """Ids of the admitted requests that are steered."""

    def suspect_all(self) -> None:
        """Take all blocks for stale, where it is not known which ones a steered request wrote."""
        if self._clears:
            self._stale.update(range(self._num_blocks))

    def pop(
        self,
        new_block_ids: Iterable[int] | None,
        new_requests: "Iterable[NewRequestData]",
        cached_requests: "CachedRequestData",
    ) -> list[int] | None:
        """Return the stale blocks among a step's new ones, which the workers clear before the step.

        Args:
            new_block_ids: blocks that requests got for this step and that no load fills.
            new_requests: the step's new requests, with all their blocks.
            cached_requests: the step's other requests, with their new blocks.
        """
        if not self._clears:
            return None
        new = set(new_block_ids or ())
        found = sorted(new & self._stale)
        self._stale -= new
        if self.writers:
            for request in new_requests:
                self._mark(request.req_id, request.block_ids)
            given = zip(cached_requests.req_ids, cached_requests.new_block_ids, strict=True)
            for request_id, groups in given:
                if groups:
                    self._mark(request_id, groups)
        return found or None

    def _mark(self, request_id: str, groups: Iterable[Iterable[int]]) -> None:
        if request_id in self.writers:
            self._stale.update(*groups)
