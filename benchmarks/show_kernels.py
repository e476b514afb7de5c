# SPDX-License-Identifier: Apache-2.0
"""The run of benchmarks.kernels as tables: one a quantity, a line an operation and size.

python -m benchmarks.show_kernels FILE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.show import Json


def tables(run: Json) -> Iterator[str]:
    """Microseconds, and how fast the bytes were moved: 100% is a copy of as many bytes."""
    for quantity in dict.fromkeys(row["quantity"] for row in run["rows"]):
        rows = [row for row in run["rows"] if row["quantity"] == quantity]
        cases = list(dict.fromkeys(row["case"] for row in rows))
        yield f"| {quantity}: operation | tokens | hidden | {' | '.join(cases)} |"
        yield "|---|---|---|" + "---|" * len(cases)
        for at in dict.fromkeys(tuple(row["at"].values()) for row in rows):
            found = {row["case"]: row for row in rows if tuple(row["at"].values()) == at}
            cells = [_cell(found.get(case), found.get("copy")) for case in cases]
            yield f"| {' | '.join(map(str, at))} | {' | '.join(cells)} |"
        yield ""


def _cell(row: Json | None, copy: Json | None) -> str:
    if row is None:
        return ""
    share = "" if copy in (None, row) else f" ({copy['median'] / row['median']:.0%})"
    return f"{row['median']:.1f}{share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    print("\n".join(tables(json.loads(parser.parse_args().file.read_text()))))


if __name__ == "__main__":
    main()
