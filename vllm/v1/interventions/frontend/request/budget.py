# SPDX-License-Identifier: Apache-2.0
"""Frontend: one budget for all that the fields of a request make the server do."""

from enum import IntEnum

from vllm.v1.interventions.errors import reject


class Unit(IntEnum):
    """Cost of one item of each kind, in units of about 0.1 us of a processor."""

    SEARCHED = 1
    """A character or token of the prompt that a selector looks at."""
    DECODED = 48
    """A token of the prompt that is decoded with all others, for what its characters are."""
    ALONE = 128
    """A call of the tokenizer for some of them, where bytes of a character are spread."""
    WRITTEN = 768
    """A site of a completion whose rows are written into each chunk of a streamed answer."""
    TOKENIZED = 4
    """A character of the prompt that is tokenized again, to find where its tokens are."""
    CELL = 8
    """One thing that acts, or not, in one segment."""
    ENTRY = 16
    """An entry of `positions`, or a run of positions that it comes to."""
    SEGMENT = 256
    """A run of positions in which the same acts."""
    KILOBYTE = 32
    """1,024 bytes of vectors that are added up, and of the plan that each completion is sent."""
    POOLED = 4
    """A number of a row of the prompt that a probe's pool goes through, between two steps."""
    PRODUCTS = 1
    """16 million products of numbers of rows and weights on the device."""
    WEIGHTS = 1
    """1,024 attention weights of a prompt that are made, or gone through, on the device."""


class Work:
    """Counts the work of one request, before it is done.

    Args:
        limit: the engine's `max_request_work`.
        n: completions of the prompt.
        num_prompts: how many prompts came with the same fields; each may cost its share.
    """

    def __init__(self, limit: int, n: int = 1, num_prompts: int = 1) -> None:
        self.limit = limit
        self.n = n
        self.completions = n * num_prompts
        """Number of completions, of all prompts."""
        self._num_prompts = num_prompts
        self._spent = 0

    def charge(self, number: int, unit: Unit, path: str) -> None:
        """Count `number` of `unit`; raise InterventionError for `path` if that is too much."""
        self._spent += number * unit * self._num_prompts
        if self._spent > self.limit:
            reject(
                path,
                f"takes the request past max_request_work={self.limit}: entries, positions, "
                "segments, searched text and bytes of vectors of its fields cost too much "
                "together; ask for less, or name vectors as a module",
            )
