# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md as patterns: the first column of its tables."""

from __future__ import annotations

import re

from tests import ROOT

PAGE = ROOT / "docs" / "errors.md"
_ROW = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)
_PLACE = re.compile(r"\\\{([a-z]+)\\\}")

BEGIN = "<!-- mistakes: python -m tests.errors.mistakes -->"
"""Begins the table of mistakes, which is generated; tables of messages stand before it."""

MESSAGES = _ROW.findall(PAGE.read_text().partition(BEGIN)[0])


def pattern(message: str) -> re.Pattern[str]:
    """`{name}` becomes a group of that name; a path has no colon."""
    return re.compile(
        _PLACE.sub(
            lambda m: f"(?P<{m[1]}>{'[^:]+' if m[1] == 'path' else '.+'})", re.escape(message)
        ),
        re.DOTALL,
    )


PATTERNS = {message: pattern(message) for message in MESSAGES}
