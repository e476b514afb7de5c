# SPDX-License-Identifier: Apache-2.0
"""Which content each slot of the steering table holds. Owned by the scheduler."""

from collections import OrderedDict

from vllm.v1.interventions.plan import UNSTEERED, Content, Part, SteeringPlan
from vllm.v1.interventions.scheduler.vector_sets import HeldParts

MAX_STEP_BYTES = 8 << 20
"""Vectors sent to the workers in one step: a scheduler message over 16 MB leaves the
shared-memory ring and would stall every request of the step. A single larger plan goes alone."""

NOTHING, GLOBALS_ALONE = 0, 1
"""Slots that belong to nobody: zeros, and what plain requests get while global tiers are set."""

FIRST_SLOT = 2

ROWS_PER_SLOT = 2
"""Rows of the table: for prompt positions, and for generated ones (global tiers may differ)."""

Key = tuple[str, bool]
"""(content's digest, whether the global tiers are added)."""


def num_table_rows(max_steering_configs: int) -> int:
    return ROWS_PER_SLOT * (FIRST_SLOT + max_steering_configs)


class SlotTable:
    """`size` slots of the table.

    A request reserves the slots of all its contents at admission and keeps them until it ends.
    Requests of equal content share a slot. A released slot keeps its content until another one
    needs the place, so a content used again soon is not sent again.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._slot: dict[Key, int] = {}
        self._placed: dict[int, Content] = {}
        self._users: dict[Key, set[str]] = {}
        self._keys: dict[str, list[Key]] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()
        self._free = list(range(FIRST_SLOT + size - 1, FIRST_SLOT - 1, -1))
        self._parts = HeldParts()
        self._uploads: dict[int, tuple[Content, bool]] = {}

    @property
    def in_use(self) -> int:
        return len(self._users)

    def fits(self, plan: SteeringPlan) -> bool:
        """Whether all contents of `plan` have a slot now, and its vectors fit in this step."""
        keys = {c.digest: (c.digest, plan.inherit) for c in plan.contents}
        if sum(not self._users.get(key) for key in keys.values()) > self.size - self.in_use:
            return False
        parts = {p.digest: p for p in plan.parts}
        needed = {
            digest
            for content in plan.contents
            if keys[content.digest] not in self._slot
            for digest, _ in content.parts
            if digest not in self._parts
        }
        size = sum(len(parts[digest].data) for digest in needed)
        waiting = self._parts.new_bytes
        return not (size and waiting and waiting + size > MAX_STEP_BYTES)

    def reserve(self, request_id: str, plan: SteeringPlan) -> None:
        """Take the slots that `fits` promised."""
        parts = {p.digest: p for p in plan.parts}
        self._keys[request_id] = [(c.digest, plan.inherit) for c in plan.contents]
        for key in self._keys[request_id]:
            self._users.setdefault(key, set()).add(request_id)
            # All of them first: placing one must not evict another, to be sent again.
            self._idle.pop(key, None)
        for content in plan.contents:
            key = (content.digest, plan.inherit)
            if key not in self._slot:
                self._place(key, content, parts)

    def _place(self, key: Key, content: Content, parts: dict[str, Part]) -> None:
        for digest, _ in content.parts:
            self._parts.use(parts[digest])
        if self._free:
            slot = self._free.pop()
        else:
            evicted, _ = self._idle.popitem(last=False)
            slot = self._slot.pop(evicted)
            for digest, _ in self._placed[slot].parts:
                self._parts.drop(digest)
        self._slot[key] = slot
        self._placed[slot] = content
        self._uploads[slot] = (content, key[1])

    def slot(self, digest: str, inherit: bool) -> int:
        if digest == UNSTEERED:
            return GLOBALS_ALONE if inherit else NOTHING
        return self._slot[digest, inherit]

    def release(self, request_id: str) -> None:
        """The request has ended, whether or not it was ever admitted."""
        for key in self._keys.pop(request_id, ()):
            self._users[key].discard(request_id)
            if not self._users[key]:
                del self._users[key]
                self._idle[key] = None

    def take_uploads(self) -> tuple[list[Part], list[tuple[int, Content, bool]], list[str]]:
        """(new parts, (slot, content, inherit) to write, dropped parts); empties the lists."""
        uploads, self._uploads = self._uploads, {}
        new, dropped = self._parts.take()
        return new, [(slot, c, inherit) for slot, (c, inherit) in uploads.items()], dropped

    def restore(self) -> None:
        """The workers have lost everything: send it again."""
        self._parts.restore()
        self._uploads = {
            slot: (self._placed[slot], inherit) for (_, inherit), slot in self._slot.items()
        }
