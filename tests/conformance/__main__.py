# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.conformance [--runner v2] [NAME ...]`: prints the table of the hook contract."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .engine import prepare_environment


def main() -> int:
    """Exit status 1 when a row is out of tolerance."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tiny models; default: all")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1")
    options = parser.parse_args()
    prepare_environment(options.runner)
    from .models import MODELS
    from .proof import markdown, prove

    if unknown := sorted(set(options.names) - set(MODELS)):
        parser.error(f"no tiny model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    cache = Path(__file__).parents[2] / "build" / "tiny-models"
    rows = [row for name in options.names or MODELS for row in prove(name, cache)]
    print(markdown(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
