# SPDX-License-Identifier: Apache-2.0
"""The command line of the fork's build tools. `make help` lists what most people need."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from tools import areas, beside, pilot_wheel
from tools.assemble import assemble, git
from tools.check import check
from tools.export import export
from tools.into import assemble_into
from tools.pins import ROOT, BuildError, Pin, load_pin, other_pins
from tools.rebase import find_wheel, finish, rebase
from tools.release import release


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("assemble", help="make build/tree (of four commits), or TREE in place")
    choice = verb.add_mutually_exclusive_group()
    choice.add_argument("--discard-edits", action="store_true", help="drop edits not yet exported")
    choice.add_argument("--into", metavar="TREE", type=Path, help="an unpacked wheel; offline")
    choice.add_argument("--beside", metavar="VERSION", help="build/tree-VERSION of another version")
    verbs.add_parser("export", help="write the edits made in build/tree to patches/seams")
    verbs.add_parser("check", help="are the patches small, is all else upstream's?")
    verb = verbs.add_parser("rebase", help="merge the seams into another upstream version")
    choice = verb.add_mutually_exclusive_group(required=True)
    choice.add_argument("wheel", nargs="?", metavar="VERSION|WHEEL")
    choice.add_argument("--finish", action="store_true", help="write build/rebase to patches/seams")
    verbs.add_parser("pilot-wheel", help="the wheel vllm-pilot, in dist/")
    verbs.add_parser("release", help="that wheel, its checksum and its changes, in dist/")
    verbs.add_parser("diffstat", help="how little the fork is")
    return parser.parse_args()


def listing(paths: Iterable[Path | str], empty: str) -> str:
    """Return the paths, one a line, or `empty` if there are none."""
    return "\n".join(map(str, paths)) or empty


def diffstat() -> str:
    """Count lines against upstream, in its files (seams, taps) and in ours, then code by area."""
    tree = ROOT / "build" / "tree"
    rows = [
        (layer, git(tree, "diff", "--shortstat", before, layer).strip() or "nothing")
        for before, layer in (("upstream", "seams"), ("seams", "taps"), ("taps", "overlay"))
    ]
    seams = git(tree, "diff", "--stat=100", "upstream", "seams")
    layers = "\n".join(f"{layer:8} {text}" for layer, text in rows)
    others = "".join(
        f"{pin.upstream_version:8} {beside.difference(pin, ROOT)} lines for it alone, of at most "
        f"{beside.MAX_LINES}\n"
        for pin in other_pins(ROOT)
    )
    return f"{seams}{layers}\n{others}\n{areas.table(ROOT)}"


def pin_beside(version: str) -> Pin:
    """Return the pin of a version beside the pinned one; raises BuildError if there is none."""
    pins = {pin.upstream_version: pin for pin in other_pins(ROOT)}
    if version not in pins:
        raise BuildError(f"upstream.toml knows {', '.join(pins) or 'none'} beside; not {version}")
    return pins[version]


def run(options: argparse.Namespace) -> str:
    """Do what the command line says, and return the text to print.

    Raises:
        BuildError: it cannot be done, or `check` found something.
    """
    match options.verb:
        case "assemble" if options.into:
            return listing(assemble_into(options.into.resolve()), "nothing to do")
        case "assemble" if options.beside:
            return str(assemble(pin_beside(options.beside)))
        case "assemble":
            return str(assemble(load_pin(), discard_edits=options.discard_edits))
        case "export":
            return listing(export(), "nothing to export")
        case "check":
            if wrong := check():
                raise BuildError("\n".join(wrong))
            return "patches and tree are as they should be"
        case "rebase" if options.finish:
            return listing(finish(), "no patch changed")
        case "rebase":
            report = rebase(find_wheel(options.wheel))
            print(report.summary())
            return f"docs/rebase-{report.version}.md has the rest"
        case "pilot-wheel":
            return str(pilot_wheel.build(ROOT / "dist", load_pin()))
        case "release":
            return listing(release(ROOT / "dist", load_pin(), ROOT), "")
        case _:
            return diffstat()


if __name__ == "__main__":
    try:
        print(run(arguments()))
    except BuildError as error:
        sys.exit(f"error: {error}")
