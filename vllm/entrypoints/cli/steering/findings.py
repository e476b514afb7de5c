# SPDX-License-Identifier: Apache-2.0
"""The findings of the check, and the table of them that it prints."""

from collections.abc import Sequence
from dataclasses import dataclass


class Unknown(Exception):
    """Raised where a check cannot be made; its text says why."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, a line of the table."""

    check: str
    agrees: bool | None
    """True if it holds; None if it was not checked."""
    measured: str = ""
    allowed: str = ""
    note: str = ""

    @classmethod
    def skipped(cls, check: str, reason: str) -> "Finding":
        """Make the finding of a check that was not made."""
        return cls(check, None, note=reason)

    @classmethod
    def at_most(cls, check: str, error: float, tolerance: float, note: str = "") -> "Finding":
        """Make a finding that agrees if `error <= tolerance`; not-a-number disagrees."""
        return cls(check, error <= tolerance, f"{error:.1e}", f"<= {tolerance:.1e}", note)

    @classmethod
    def at_least(cls, check: str, value: float, least: float, note: str = "") -> "Finding":
        """Make a finding that agrees if `value >= least`; not-a-number disagrees."""
        return cls(check, value >= least, f"{value:.1e}", f">= {least:.1e}", note)


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as plain text, one line each, with a line of headings."""
    verdicts = {True: "ok", False: "DISAGREES", None: "not checked"}
    rows = [("check", "verdict", "measured", "allowed", "note")]
    rows += [(f.check, verdicts[f.agrees], f.measured, f.allowed, f.note) for f in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
