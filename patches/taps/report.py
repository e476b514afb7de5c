# SPDX-License-Identifier: Apache-2.0
"""Reports how the table fits a tree: `python -m patches.taps.report TREE`.

It is for a rebase: which classes still fit, which do not and why, which are new. TREE is an
unpacked upstream wheel, not yet wired; nothing is written. Exit status 1 when a hand is needed.
"""

import sys
from collections import Counter
from pathlib import Path

from patches.taps import census
from patches.taps.codemod import verify
from patches.taps.rows import WIRED, Idiom


def report(tree_root: Path) -> tuple[str, bool]:
    """Try the table on an unwired tree.

    Returns:
        The report as text, and whether everything fits.
    """
    outcomes = verify(tree_root)
    findings = census.check(tree_root)
    counts = Counter(o.row.idiom for o in outcomes if o.ok)
    lines = [f"{counts[idiom]:4d} {idiom.value}" for idiom in Idiom]
    carried = sum(counts[idiom] for idiom in WIRED | {Idiom.INHERITED})
    lines.append(f"{carried:4d} classes with taps")
    failed = [str(o.error) for o in outcomes if not o.ok]
    if failed:
        lines += ["", f"{len(failed)} classes no longer fit:", *failed]
    if findings:
        lines += ["", f"{len(findings)} classes on which table and tree disagree:"]
        lines += [f"{finding.key}: {finding.problem}" for finding in findings]
    return "\n".join(lines), not failed and not findings


def main() -> int:
    """Print the report of the tree on the command line; return the exit status."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    text, fits = report(Path(sys.argv[1]))
    print(text)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
