# SPDX-License-Identifier: Apache-2.0
"""Counts the words of each page that is written by hand: `make docs-stats`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = {
    "README.md": 550,
    "AGENTS.md": 350,
    "CONTRIBUTING.md": 1920,
    "docs/README.md": 150,
    "docs/analyzers.md": 550,
    "docs/attention.md": 1900,
    "docs/capture-files.md": 1230,
    "docs/features.md": 1290,
    "docs/capture.md": 5420,
    "docs/coming-from.md": 1365,
    "docs/cookbook.md": 1000,
    "docs/datasets.md": 1180,
    "docs/design.md": 3110,
    "docs/gpu-quickstart.md": 350,
    "docs/learning.md": 800,
    "docs/hook-contract-families.md": 1500,
    "docs/hook-contract.md": 1660,
    "docs/http.md": 1600,
    "docs/map.md": 80,
    "docs/performance.md": 1015,
    "docs/playground.md": 980,
    "docs/probes.md": 880,
    "docs/reliability.md": 515,
    "docs/scale.md": 495,
    "docs/steering.md": 1932,
    "docs/tutorial.md": 895,
}
"""Most words of prose on each page: words outside of code blocks and tables."""
WITHOUT = {"docs/errors.md", "docs/models.md", "docs/mutations.md", "docs/rebase-0.33.0.md"}
"""Pages of tables alone, or of which a tool writes all."""

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def words(text: str) -> int:
    """Count the words of a page outside of code blocks and tables."""
    lines = _FENCED.sub("", text).splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith(("|", "    ")))


def counted(root: Path = ROOT) -> dict[str, int]:
    """Return the number of words of each page with a budget, by its path below `root`."""
    return {page: words((root / page).read_text()) for page in BUDGETS}


def main() -> int:
    """Print the words of each page; exit status 1 if a page has more than its budget."""
    found = counted()
    for page, count in found.items():
        print(f"{count:6} of {BUDGETS[page]:6}  {page}")
    print(f"{sum(found.values()):6} of {sum(BUDGETS.values()):6}")
    return any(count > BUDGETS[page] for page, count in found.items())


if __name__ == "__main__":
    raise SystemExit(main())
