# SPDX-License-Identifier: Apache-2.0
"""Record of the sum of vectors in each slot of the steering table. Owned by the scheduler."""

from collections import Counter, OrderedDict

from vllm.v1.interventions.messages import FIRST_SLOT, GLOBALS_ALONE, NOTHING, StepInterventions
from vllm.v1.interventions.plan import UNSTEERED, Plan, SteeringPlan, VectorSet, VectorSum
from vllm.v1.interventions.scheduler.pools.protocol import MAX_STEP_BYTES

Key = tuple[str, bool]
"""Content of a slot: (digest of the sum, True if the global tiers are added)."""


class SlotTable:
    """The slots of the steering table, `size` of them for requests.

    A request reserves the slots of all its sums at admission and keeps them until it ends.
    Requests of equal sum share a slot. A released slot keeps its sum until another one
    needs the place, so a sum used again soon is not sent again.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._slot: dict[Key, int] = {}
        self._placed: dict[int, VectorSum] = {}
        self._users: dict[Key, set[str]] = {}
        self._keys: dict[str, list[Key]] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()
        self._free = list(range(FIRST_SLOT + size - 1, FIRST_SLOT - 1, -1))
        self._sets = HeldVectorSets()
        self._uploads: dict[int, tuple[VectorSum, bool]] = {}

    @property
    def in_use(self) -> int:
        """Slots that admitted requests hold."""
        return len(self._users)

    def fits(self, plan: Plan) -> bool:
        """Tell whether all sums of `plan` have a slot now, and their vectors fit in this step."""
        if plan.steering is None:
            return True
        return self._fits(plan.steering)

    def _fits(self, plan: SteeringPlan) -> bool:
        keys = {c.digest: (c.digest, plan.inherit) for c in plan.sums}
        if sum(not self._users.get(key) for key in keys.values()) > self.size - self.in_use:
            return False
        sets = {p.digest: p for p in plan.sets}
        needed = {
            digest
            for vector_sum in plan.sums
            if keys[vector_sum.digest] not in self._slot
            for digest, _ in vector_sum.sets
            if digest not in self._sets
        }
        size = sum(len(sets[digest].data) for digest in needed)
        waiting = self._sets.new_bytes
        return not (size and waiting and waiting + size > MAX_STEP_BYTES)

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take the slots that `fits` promised."""
        if plan.steering is not None:
            self._reserve(request_id, plan.steering)

    def _reserve(self, request_id: str, plan: SteeringPlan) -> None:
        sets = {p.digest: p for p in plan.sets}
        self._keys[request_id] = [(c.digest, plan.inherit) for c in plan.sums]
        for key in self._keys[request_id]:
            self._users.setdefault(key, set()).add(request_id)
            # All of them first: placing one must not evict another, to be sent again.
            self._idle.pop(key, None)
        for vector_sum in plan.sums:
            key = (vector_sum.digest, plan.inherit)
            if key not in self._slot:
                self._place(key, vector_sum, sets)

    def _place(self, key: Key, vector_sum: VectorSum, sets: dict[str, VectorSet]) -> None:
        for digest, _ in vector_sum.sets:
            self._sets.use(sets[digest])
        if self._free:
            slot = self._free.pop()
        else:
            evicted, _ = self._idle.popitem(last=False)
            slot = self._slot.pop(evicted)
            for digest, _ in self._placed[slot].sets:
                self._sets.drop(digest)
        self._slot[key] = slot
        self._placed[slot] = vector_sum
        self._uploads[slot] = (vector_sum, key[1])

    def slot(self, digest: str, inherit: bool) -> int:
        """The slot of a sum that was reserved; one of nobody's for `UNSTEERED`."""
        if digest == UNSTEERED:
            return GLOBALS_ALONE if inherit else NOTHING
        return self._slot[digest, inherit]

    def release(self, request_id: str) -> None:
        """Give back what an ended request holds, whether or not it was ever admitted."""
        for key in self._keys.pop(request_id, ()):
            self._users[key].discard(request_id)
            if not self._users[key]:
                del self._users[key]
                self._idle[key] = None

    def upload(self, step: StepInterventions) -> None:
        """Put vector sets that come and go, and slots to write, into the step's message."""
        uploads, self._uploads = self._uploads, {}
        step.sums = [(slot, c, inherit) for slot, (c, inherit) in uploads.items()]
        step.new_sets, step.dropped_sets = self._sets.pop_changes()

    def restore(self) -> None:
        """Send all sums and vector sets again: the workers have lost them."""
        self._sets.restore()
        self._uploads = {
            slot: (self._placed[slot], inherit) for (_, inherit), slot in self._slot.items()
        }


class HeldVectorSets:
    """Counts the uses of each vector set: the first sends it to the workers, the last drops it."""

    def __init__(self) -> None:
        self._held: dict[str, VectorSet] = {}
        self._uses: Counter[str] = Counter()
        self._new: dict[str, VectorSet] = {}
        self._dropped: dict[str, None] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    @property
    def new_bytes(self) -> int:
        """Bytes of the vector sets that are to be sent."""
        return sum(len(vector_set.data) for vector_set in self._new.values())

    def use(self, vector_set: VectorSet) -> None:
        """Count one use more."""
        self._uses[vector_set.digest] += 1
        if vector_set.digest not in self._held:
            self._held[vector_set.digest] = vector_set
            if vector_set.digest in self._dropped:
                del self._dropped[vector_set.digest]  # the workers still have it
            else:
                self._new[vector_set.digest] = vector_set

    def drop(self, digest: str) -> None:
        """Count one use less."""
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest], self._held[digest]
            if self._new.pop(digest, None) is None:
                self._dropped[digest] = None

    def pop_changes(self) -> tuple[list[VectorSet], list[str]]:
        """Vector sets that the workers must get, and digests they may forget; empties both."""
        new, self._new = list(self._new.values()), {}
        dropped, self._dropped = list(self._dropped), {}
        return new, dropped

    def restore(self) -> None:
        """Note that the workers have lost everything."""
        self._new, self._dropped = dict(self._held), {}
