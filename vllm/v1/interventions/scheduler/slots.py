# SPDX-License-Identifier: Apache-2.0
"""Which content each slot of the steering table holds. Owned by the scheduler."""

from collections import Counter, OrderedDict

from vllm.v1.interventions.messages import FIRST_SLOT, GLOBALS_ALONE, NOTHING, StepInterventions
from vllm.v1.interventions.plan import UNSTEERED, Content, Part, Plan, SteeringPlan
from vllm.v1.interventions.scheduler.admission import MAX_STEP_BYTES

Key = tuple[str, bool]
"""(content's digest, whether the global tiers are added)."""


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

    def fits(self, plan: Plan) -> bool:
        """Whether all sums of `plan` have a slot now, and their vectors fit in this step."""
        if plan.steering is None:
            return True
        return self._fits(plan.steering)

    def _fits(self, plan: SteeringPlan) -> bool:
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

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take the slots that `fits` promised."""
        if plan.steering is not None:
            self._reserve(request_id, plan.steering)

    def _reserve(self, request_id: str, plan: SteeringPlan) -> None:
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

    def upload(self, step: StepInterventions) -> None:
        """Put new and dropped parts, and the slots to write, into the coming step's message."""
        uploads, self._uploads = self._uploads, {}
        step.contents = [(slot, c, inherit) for slot, (c, inherit) in uploads.items()]
        step.new_parts, step.dropped_parts = self._parts.take()

    def restore(self) -> None:
        """The workers have lost everything: send it again."""
        self._parts.restore()
        self._uploads = {
            slot: (self._placed[slot], inherit) for (_, inherit), slot in self._slot.items()
        }


class HeldParts:
    """Counts the uses of each part: the first sends it to the workers, the last has it dropped."""

    def __init__(self) -> None:
        self._held: dict[str, Part] = {}
        self._uses: Counter[str] = Counter()
        self._new: dict[str, Part] = {}
        self._dropped: dict[str, None] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    @property
    def new_bytes(self) -> int:
        return sum(len(part.data) for part in self._new.values())

    def use(self, part: Part) -> None:
        self._uses[part.digest] += 1
        if part.digest not in self._held:
            self._held[part.digest] = part
            if part.digest in self._dropped:
                del self._dropped[part.digest]  # the workers still have it
            else:
                self._new[part.digest] = part

    def drop(self, digest: str) -> None:
        """One use less."""
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest], self._held[digest]
            if self._new.pop(digest, None) is None:
                self._dropped[digest] = None

    def take(self) -> tuple[list[Part], list[str]]:
        """(parts the workers must get, parts they may forget); empties both."""
        new, self._new = list(self._new.values()), {}
        dropped, self._dropped = list(self._dropped), {}
        return new, dropped

    def restore(self) -> None:
        """The workers have lost everything."""
        self._new, self._dropped = dict(self._held), {}
