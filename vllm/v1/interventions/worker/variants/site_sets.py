# SPDX-License-Identifier: Apache-2.0
"""Keeps count of the sets of sites for which there are graphs that capture there alone."""

from collections import Counter
from collections.abc import Iterable

SETS = 2
"""Number of sets that are kept beside those that are never given up."""
STEPS = 400
"""Number of steps that want a set before it has graphs: the launches of other captures, 2 % of a
step of a model of 8B, have then taken as long as recording a graph does."""
_COUNTED = 64


class SiteSets:
    """Keeps the sets that steps want most lately.

    Args:
        always: sets that are never given up; one of them has all sites.
    """

    def __init__(self, always: Iterable[frozenset[int]]) -> None:
        self._always = list(always)
        self._kept: list[frozenset[int]] = []
        """Last the one used last."""
        self._wanted: Counter[frozenset[int]] = Counter()
        """Number of steps that wanted each set that has no graphs of its own."""

    @property
    def sets(self) -> list[frozenset[int]]:
        """All that have graphs."""
        return [*self._always, *self._kept]

    def clear(self) -> None:
        """Keep none."""
        self._kept.clear()
        self._wanted.clear()

    def choose(self, wanted: frozenset[int], keeps: bool) -> frozenset[int]:
        """The set for a step: what it wants, and the fewest sites besides.

        Args:
            keeps: whether it may be kept from now on.
        """
        chosen = min((sites for sites in self.sets if sites >= wanted), key=len)
        if keeps and chosen != wanted:
            self._wanted[wanted] += 1
            if self._wanted[wanted] >= STEPS:
                chosen = self._keep(wanted)
            elif len(self._wanted) > _COUNTED:
                self._wanted.clear()
        if chosen in self._kept:
            self._kept.remove(chosen)
            self._kept.append(chosen)
        return chosen

    def _keep(self, sites: frozenset[int]) -> frozenset[int]:
        self._wanted.clear()  # so that graphs are recorded for one set in as many steps at most
        del self._kept[: len(self._kept) + 1 - SETS]
        self._kept.append(sites)
        return sites
