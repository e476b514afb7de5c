# SPDX-License-Identifier: Apache-2.0
"""One line of the check's table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What one check measured."""

    check: str
    agrees: bool | None
    """None: not checked."""
    measured: str = ""
    allowed: str = ""
    note: str = ""

    @classmethod
    def skipped(cls, check: str, reason: str) -> "Finding":
        return cls(check, None, note=reason)

    @classmethod
    def at_most(cls, check: str, error: float, tolerance: float, note: str = "") -> "Finding":
        """A not-a-number disagrees."""
        return cls(check, error <= tolerance, f"{error:.1e}", f"<= {tolerance:.1e}", note)

    @classmethod
    def at_least(cls, check: str, value: float, least: float, note: str = "") -> "Finding":
        """A not-a-number disagrees."""
        return cls(check, value >= least, f"{value:.1e}", f">= {least:.1e}", note)


def table(findings: Sequence[Finding]) -> str:
    """Plain text, one line a finding."""
    verdicts = {True: "ok", False: "DISAGREES", None: "not checked"}
    rows = [("check", "verdict", "measured", "allowed", "note")]
    rows += [(f.check, verdicts[f.agrees], f.measured, f.allowed, f.note) for f in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
