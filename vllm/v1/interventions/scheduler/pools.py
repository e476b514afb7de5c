# SPDX-License-Identifier: Apache-2.0
"""Rows of the workers' tables, handed out to requests. Owned by the scheduler."""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from operator import neg
from typing import Generic, TypeVar

from vllm.v1.interventions.plan import UNSTEERED, VectorSet

MAX_STEP_BYTES = 8 << 20
"""Vectors sent to the workers in one step: a scheduler message over 16 MB leaves the
shared-memory ring and would stall every request of the step. A single larger plan goes alone."""

T = TypeVar("T")


class Pool(Generic[T]):
    """The rows of one table of the workers, and the content of each.

    A request reserves all it will ever need when it is admitted and keeps it until it ends.
    Contents of equal digest share their rows.

    Args:
        size: number of rows for requests.
        rows: returns the number of neighbouring rows that a content takes.
        num_bytes: returns the number of bytes that a content counts of `MAX_STEP_BYTES`.
        keeps: whether a content that nobody uses keeps its place until another one needs it, the
            one unused for longest first, so that it is not sent again if it is used again soon.
            Each content then takes one row.
        first: the first of the rows.
    """

    def __init__(
        self,
        size: int,
        rows: Callable[[T], int] = lambda content: 1,
        num_bytes: Callable[[T], int] = lambda content: 0,
        keeps: bool = False,
        first: int = 1,
    ) -> None:
        self.size = size
        self._rows, self._num_bytes, self._keeps = rows, num_bytes, keeps
        self._free = list(range(first + size - 1, first - 1, -1))
        """Free rows, descending: the lowest is given out first."""
        self._placed: dict[str, tuple[int, T]] = {}
        """Digest -> the first row of the content, and the content."""
        self._users: Counter[str] = Counter()
        self._digests: dict[str, list[str]] = {}
        """Owner -> digests of the contents that it uses."""
        self._unused: OrderedDict[str, None] = OrderedDict()
        """Digests of contents that are kept though nobody uses them, in the order they became
        so."""
        self._new: dict[str, None] = {}
        self._new_bytes = 0

    @property
    def in_use(self) -> int:
        """Rows that admitted requests hold."""
        return self.size - len(self._free) - len(self._unused)

    def has(self, wanted: Mapping[str, T]) -> bool:
        """Tell whether all of `wanted`, digest -> content, has its rows already."""
        return self._placed.keys() >= wanted.keys()

    def fits(self, wanted: Mapping[str, T]) -> bool:
        """Tell whether all of `wanted`, digest -> content, has rows now, and can be sent in the
        coming step."""
        new = [content for digest, content in wanted.items() if digest not in self._placed]
        if not new:
            return True
        if _is_too_much(sum(map(self._num_bytes, new)), self._new_bytes):
            return False
        needed = sum(map(self._rows, new))
        evictable = len(self._unused) - sum(digest in self._unused for digest in wanted)
        if needed > len(self._free) + evictable:
            return False
        if needed == len(new):
            return True  # of single rows any will do
        free = self._free.copy()
        return all(_take(free, self._rows(content)) is not None for content in new)

    def reserve(self, owner: str, wanted: Mapping[str, T]) -> bool:
        """Give an owner the rows that `fits` promised. Returns whether any is new."""
        self._digests[owner] = list(wanted)
        for digest in wanted:
            self._users[digest] += 1
            # All of them first: placing one must not evict another, to be sent again.
            self._unused.pop(digest, None)
        new = [digest for digest in wanted if digest not in self._placed]
        for digest in new:
            content = wanted[digest]
            if not self._free:
                self._remove(self._unused.popitem(last=False)[0])
            row = _take(self._free, self._rows(content))
            assert row is not None
            self._placed[digest] = row, content
            self._new[digest] = None
            self._new_bytes += self._num_bytes(content)
        return bool(new)

    def row(self, digest: str) -> int:
        """The first row of a content in use; 0 for `UNSTEERED`."""
        return self._placed[digest][0] if digest != UNSTEERED else 0

    def release(self, owner: str) -> None:
        """Take back what an owner holds; nothing if it never reserved."""
        for digest in self._digests.pop(owner, ()):
            self._users[digest] -= 1
            if self._users[digest]:
                continue
            del self._users[digest]
            if self._keeps:
                self._unused[digest] = None
            else:
                self._remove(digest)

    def _remove(self, digest: str) -> None:
        """Free the rows of a content that nobody uses."""
        first, content = self._placed.pop(digest)
        if digest in self._new:
            del self._new[digest]
            self._new_bytes -= self._num_bytes(content)
        for row in range(first, first + self._rows(content)):
            insort(self._free, row, key=neg)

    def pop_new(self) -> list[tuple[int, T]]:
        """Return the (first row, content) of all that is to be sent with the coming step's
        message."""
        new, self._new, self._new_bytes = self._new, {}, 0
        return [self._placed[digest] for digest in new]

    def restore(self) -> None:
        """Send all contents again: the workers have lost them."""
        self._new = dict.fromkeys(self._placed)
        self._new_bytes = sum(self._num_bytes(content) for _, content in self._placed.values())


class VectorSets:
    """Vector sets that sums in slots are made of: the first use of one sends it to the workers, the
    end of the last drops it there."""

    def __init__(self) -> None:
        self._in_slot: dict[int, list[str]] = {}
        """Slot -> digests of the sets that its sum is made of."""
        self._held: dict[str, VectorSet] = {}
        self._uses: Counter[str] = Counter()
        self._new: dict[str, VectorSet] = {}
        self._new_bytes = 0
        self._dropped: dict[str, None] = {}

    def fits(self, sets: list[VectorSet]) -> bool:
        """Tell whether those of `sets` that the workers lack can be sent in the coming step."""
        new = [each for each in sets if each.digest not in self._held]
        num_bytes = sum([len(each.data) for each in new]) if new else 0
        return not _is_too_much(num_bytes, self._new_bytes)

    def hold(self, slot: int, sets: list[VectorSet]) -> None:
        """Hold the sets of a slot's sum in place of those that it held before."""
        digests, before = [vector_set.digest for vector_set in sets], self._in_slot.get(slot, [])
        if digests == before:
            return
        for vector_set in sets:
            self._use(vector_set)
        for digest in before:
            self._leave(digest)
        self._in_slot[slot] = digests

    def _use(self, vector_set: VectorSet) -> None:
        self._uses[vector_set.digest] += 1
        if vector_set.digest not in self._held:
            self._held[vector_set.digest] = vector_set
            if vector_set.digest in self._dropped:
                del self._dropped[vector_set.digest]  # the workers still have it
            else:
                self._new[vector_set.digest] = vector_set
                self._new_bytes += len(vector_set.data)

    def _leave(self, digest: str) -> None:
        self._uses[digest] -= 1
        if not self._uses[digest]:
            num_bytes = len(self._held.pop(digest).data)
            del self._uses[digest]
            if self._new.pop(digest, None) is None:
                self._dropped[digest] = None
            else:
                self._new_bytes -= num_bytes

    def pop_changes(self) -> tuple[list[VectorSet], list[str]]:
        """Return vector sets that the workers must get, and digests they may forget."""
        new, self._new, self._new_bytes = list(self._new.values()), {}, 0
        dropped, self._dropped = list(self._dropped), {}
        return new, dropped

    def restore(self) -> None:
        """Send all sets again: the workers have lost them."""
        self._new, self._dropped = dict(self._held), {}
        self._new_bytes = sum(len(each.data) for each in self._held.values())


def _is_too_much(num_bytes: int, waiting: int) -> bool:
    """Tell whether a step that sends `waiting` bytes has no room for so many more."""
    return num_bytes > 0 and waiting > 0 and waiting + num_bytes > MAX_STEP_BYTES


def _take(free: list[int], number: int) -> int | None:
    """Take the lowest `number` neighbours from `free`, rows in descending order; returns the first,
    or None if there are no such neighbours."""
    for i in range(len(free) - number, -1, -1):
        row = free[i + number - 1]
        if free[i] - row == number - 1:
            del free[i : i + number]
            return row
    return None
