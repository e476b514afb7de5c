# SPDX-License-Identifier: Apache-2.0
"""Results of a request's rules."""

from dataclasses import dataclass

FLAG, STOP, FORCE = RULES_DO = ("flag", "stop", "force")
"""Actions that a rule may take where it fires."""
RULE = "rule:"
"""Prefix of a rule's name where the rule is the reason why an answer stopped."""


@dataclass(frozen=True)
class RuleResult:
    """Result of a rule for one completion. Positions are indices in prompt plus generated text.

    An answer has a rule of the operator only if the rule fired, and then its name alone, with None.
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
    last: float | None = None
    """The score of the last of these rows: of a probe with a pool, that of the whole answer."""
    forced_at: int | None = None
    """The position of the first token that it put into the answer; None if it put none."""
