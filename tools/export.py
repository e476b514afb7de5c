# SPDX-License-Identifier: Apache-2.0
"""Turns edits made in build/tree into patches/seams/*.patch.

A patch owns the upstream files that its header's `Files:` names. Its diff is regenerated from the
tree; its header stays as written.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from tools.assemble import edited, git
from tools.pins import ROOT, BuildError
from vllm_pilot import udiff

DIFF = ["diff", "--unified=0", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"]
DIFF += ["--no-renames", "--diff-algorithm=histogram", "--src-prefix=a/", "--dst-prefix=b/"]
HEADER = """Concern: (one line)
Why: (why this cannot be done without a patch)
Files: {}
"""


def changed(tree: Path, before: str, after: str) -> set[str]:
    """Return the files that differ between two commits of the tree."""
    return set(git(tree, "diff", "--name-only", "-z", before, after).split("\0")) - {""}


def export(root: Path = ROOT) -> list[Path]:
    """Rewrite the patches that differ from build/tree, all or nothing, and return them.

    Raises:
        BuildError: an edit cannot be a seam; the message says what to do.
    """
    tree = root / "build" / "tree"
    if not tree.exists():
        raise BuildError(f"{tree} is missing; run `make install` first")
    patches = udiff.series(root / "patches" / "seams")
    edits = set(edited(tree))
    upstream = set(git(tree, "ls-tree", "-r", "--name-only", "-z", "upstream").split("\0"))
    wired = changed(tree, "seams", "taps")
    check_edits(tree, edits, upstream, wired)
    owned = {file for patch in patches for file in patch.files}
    unowned = sorted((edits | changed(tree, "upstream", "seams")) - owned)
    unowned = [file for file in unowned if unified(tree, [file], wired)]
    if unowned:
        raise BuildError(
            f"no patch owns {', '.join(unowned)}; add it to the `Files:` of a patch in "
            f"{root / 'patches' / 'seams'}, or create NAME.patch there, listed in `series`, with\n"
            + HEADER.format(unowned[0])
        )
    written = []
    for patch in patches:
        missing = sorted(set(patch.files) - upstream)
        if missing:
            raise BuildError(f"{patch.path} claims {missing[0]}, which is not upstream; correct it")
        text = patch.header.rstrip("\n") + "\n\n" + unified(tree, patch.files, wired)
        if text != patch.path.read_text():
            written.append((patch.path, text))
    for path, text in written:
        path.write_text(text)
    return [path for path, _ in written]


def check_edits(tree: Path, edits: set[str], upstream: set[str], wired: set[str]) -> None:
    """Check that edits are of upstream's files, deleted none, and are not of wired files."""
    for file in sorted(edits):
        if file not in upstream:
            raise BuildError(
                f"{file} in {tree} is no upstream file; move it to the same path in the repository"
            )
        if not (tree / file).exists():
            raise BuildError(
                f"{file} was deleted in {tree}, a seam cannot do that; "
                f"`git -C {tree} checkout {file}`"
            )
    for file in sorted(edits & wired):
        raise BuildError(
            f"{file} is wired by the codemod, its edits in {tree} cannot be told from the "
            f"codemod's; change patches/taps, and `git -C {tree} checkout {file}`"
        )


def unified(tree: Path, files: list[str], wired: Set[str] = frozenset()) -> str:
    """Return the diff of the seams in `files`, from upstream to the tree.

    A file that is `wired` is compared as it was before the codemod.
    """
    text = ""
    for file in files:
        end = ["seams"] if file in wired else []
        diff = git(tree, *DIFF, "upstream", *end, "--", file)
        if "\n\\ No newline" in diff:
            raise BuildError(
                f"{file} would end without a newline; put its seam before the last line"
            )
        text += diff
    return text
