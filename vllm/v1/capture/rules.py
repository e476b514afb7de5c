# SPDX-License-Identifier: Apache-2.0
"""What comes of a request's rules."""

from dataclasses import dataclass

RULES_DO = ("flag", "stop")
"""What a rule may do where it fires."""
RULE = "rule:"
"""What stands before a rule's name where it is the reason why an answer stopped."""


@dataclass(frozen=True)
class RuleResult:
    """What a rule saw of one completion. Positions are indices in prompt plus generated text.

    Of a rule of the operator an answer has the name alone, with None, and only if it fired.
    """

    fired_at: int | None
    """The position of the first row at which it fired; None if it never did."""
    fired: int
    """At how many rows it fired."""
    rows: int
    """Number of rows that it looked at."""
    max: float | None
    """The largest of their scores, those that are not finite left out; None if there is none."""
    min: float | None
    mean: float | None
