# SPDX-License-Identifier: Apache-2.0
"""The codemod raises one error, and says with it what to do."""


class TapsError(Exception):
    """Raised when a class of the upstream tree does not fit its row of the table.

    Its attributes are all text, and all part of the message: `file` (relative to the tree), `cls`
    (may be empty), `expected`, `found` and `remedy`.
    """

    def __init__(self, file: str, cls: str, expected: str, found: str, remedy: str) -> None:
        self.file = file
        self.cls = cls
        self.expected = expected
        self.found = found
        self.remedy = remedy
        where = f"{file}: class {cls}" if cls else file
        super().__init__(
            f"{where}\n  expected: {expected}\n  found:    {found}\n  remedy:   {remedy}"
        )


REMEDY_SHAPE = (
    "upstream changed this class: read its forward(), then correct its row in "
    "patches/taps/table.py (names, idiom), or declare it REFUSED with the reason"
)
REMEDY_PROOF = (
    "do not ship this wiring: compare forward() with docs/hook-contract.md and give the class "
    "another idiom, or declare it REFUSED in patches/taps/table.py with the reason"
)
