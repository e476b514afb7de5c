# SPDX-License-Identifier: Apache-2.0
"""python -m tools VERB: see `python -m tools --help`."""

from __future__ import annotations

import argparse
import sys

from tools.assemble import assemble
from tools.export import export
from tools.pins import ROOT, BuildError, load_pin


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("assemble", help="make build/tree, or assemble INTO an unpacked tree")
    verb.add_argument("--discard-edits", action="store_true", help="drop edits not yet exported")
    verbs.add_parser("export", help="write the edits made in build/tree to patches/seams")
    options = parser.parse_args()
    try:
        if options.verb == "assemble":
            print(assemble(load_pin(), discard_edits=options.discard_edits))
        elif options.verb == "export":
            written = [str(path.relative_to(ROOT)) for path in export()]
            print("\n".join(written) or "nothing to export")
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
