# SPDX-License-Identifier: Apache-2.0
"""Which parts the workers hold. Owned by the scheduler."""

from collections import Counter

from vllm.v1.interventions.plan import Part


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
