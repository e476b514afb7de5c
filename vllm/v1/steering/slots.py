# SPDX-License-Identifier: Apache-2.0
"""Which content each slot of the steering table holds. Owned by the scheduler."""

from collections import OrderedDict

from vllm.v1.interventions import UNSTEERED, Content

MAX_STEP_BYTES = 8 << 20
"""Contents sent to the workers in one step: a scheduler message over 16 MB leaves the
shared-memory ring and would stall every request of the step. A single larger content goes alone."""

MAX_SKIPS = 256
"""Steps a request may be passed over by later ones before the slots are kept free for it."""


class SlotTable:
    """Slots 1..`size` of the table; slot 0 is zeros and belongs to nobody.

    A request reserves the slots of all its contents at admission and keeps them until it ends.
    Requests of equal content share a slot. A released slot keeps its content until another one
    needs the place, so a content used again soon is not sent again.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._slot: dict[str, int] = {}
        self._users: dict[str, set[str]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._free = list(range(size, 0, -1))
        self._skips: dict[str, int] = {}
        self._uploads: list[tuple[int, Content]] = []
        self._upload_bytes = 0

    @property
    def in_use(self) -> int:
        return len(self._users)

    def can_reserve(self, request_id: str, contents: list[Content]) -> bool:
        """Whether all of `contents` fit now. A refusal is remembered, for fairness."""
        new = [c for c in contents if not self._users.get(c.digest)]
        fits = len(new) <= self.size - self.in_use
        size = sum(len(c.data) for c in new if c.digest not in self._slot)
        if size and self._uploads:
            fits = fits and self._upload_bytes + size <= MAX_STEP_BYTES
        starved = next((r for r, skips in self._skips.items() if skips > MAX_SKIPS), None)
        if starved is not None and starved != request_id:
            # Sharers too: a content that keeps finding new users never frees its slot.
            fits = fits and all(request_id in self._users.get(c.digest, ()) for c in contents)
        if not fits:
            self._skips[request_id] = self._skips.get(request_id, 0) + 1
        return fits

    def reserve(self, request_id: str, contents: list[Content]) -> None:
        """Take the slots `can_reserve` promised; again for the same request is no change."""
        self._skips.pop(request_id, None)
        for content in contents:
            self._users.setdefault(content.digest, set()).add(request_id)
            # All of them first: placing one must not evict another, to be sent again.
            self._idle.pop(content.digest, None)
        for content in contents:
            if content.digest not in self._slot:
                self._place(content)

    def _place(self, content: Content) -> None:
        if self._free:
            slot = self._free.pop()
        else:
            evicted, _ = self._idle.popitem(last=False)
            slot = self._slot.pop(evicted)
        self._slot[content.digest] = slot
        self._uploads.append((slot, content))
        self._upload_bytes += len(content.data)

    def slot(self, digest: str) -> int:
        return 0 if digest == UNSTEERED else self._slot[digest]

    def release(self, request_id: str, contents: list[Content]) -> None:
        """The request has ended, whether or not it was ever admitted."""
        self._skips.pop(request_id, None)
        for content in contents:
            users = self._users.get(content.digest, set())
            users.discard(request_id)
            if not users and self._users.pop(content.digest, None) is not None:
                self._idle[content.digest] = None

    def take_uploads(self) -> list[tuple[int, Content]]:
        """What the workers must write before the coming step; empties the list."""
        uploads, self._uploads, self._upload_bytes = self._uploads, [], 0
        return uploads
