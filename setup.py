# SPDX-License-Identifier: Apache-2.0
"""`python setup.py bdist_wheel` leaves the wheel in dist/, by the same backend that pip calls."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.backend import build_wheel
from tools.pins import ROOT, BuildError

REMEDY = (
    "setup.py does `bdist_wheel` and nothing else; install with `pip install .`, make a wheel "
    "anywhere with `pip wheel . --no-deps`, and work on the fork with `make install`"
)


def main(arguments: list[str]) -> None:
    """Builds the wheel, or exits with a sentence that says what does."""
    if arguments != ["bdist_wheel"]:
        sys.exit(f"error: {REMEDY}")
    target = ROOT / "dist"
    target.mkdir(exist_ok=True)
    try:
        print(Path(target, build_wheel(str(target))))
    except BuildError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: no {error.name} for {sys.executable}; run .venv/bin/python setup.py")


if __name__ == "__main__":
    main(sys.argv[1:])
