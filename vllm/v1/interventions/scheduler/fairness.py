# SPDX-License-Identifier: Apache-2.0
"""Fairness among requests that wait for slots."""

MAX_SKIPS = 256
"""Steps a request may be passed over by later ones before what gets free is kept for it."""


class Turns:
    """A request that does not fit is skipped in favour of later ones that do, for a while."""

    def __init__(self) -> None:
        self._skips: dict[str, int] = {}

    def grant(self, request_id: str, fits: bool) -> bool:
        """Whether a request that wants slots may start. A refusal is remembered."""
        starved = next((r for r, skips in self._skips.items() if skips > MAX_SKIPS), None)
        # Sharers too: a content that keeps finding new users never frees its slot.
        granted = fits and starved in (None, request_id)
        if not granted:
            self._skips[request_id] = self._skips.get(request_id, 0) + 1
        return granted

    def leave(self, request_id: str) -> None:
        """The request started, or ended."""
        self._skips.pop(request_id, None)
