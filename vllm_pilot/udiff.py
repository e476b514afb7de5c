# SPDX-License-Identifier: Apache-2.0
"""Parses and applies unified diffs without context (-U0), with a header, at exact positions.

    Concern: one line
    Why: why this cannot be done without a patch (continuation lines are indented)
    Files: vllm/a.py vllm/b.py
    Changes: why lines change or go (only where the patch removes lines)

    diff --git a/vllm/a.py b/vllm/a.py
    index <blob before>..<blob after> 100644
    ...

The `index` line pins the file that the patch was made for, so nothing is ever applied with fuzz.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from vllm_pilot import BuildError

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """One change: lines old[start-1 : start-1+len(removed)] give way to `added`; start is 1-based.

    A pure insertion has no `removed` and goes after line `start`.
    """

    start: int
    new_start: int
    removed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    context: int = 0


@dataclass
class FileDiff:
    """The changes of one file. `before` and `after` are git's names for its contents."""

    path: str
    before: str = ""
    after: str = ""
    hunks: list[Hunk] = field(default_factory=list)


@dataclass
class Patch:
    """One patch file: its header, as text and as fields, and its diffs."""

    path: Path
    header: str
    fields: dict[str, str]
    diffs: list[FileDiff]

    @property
    def files(self) -> list[str]:
        """The upstream files that the header claims."""
        return self.fields.get("Files", "").split()


def blob(data: bytes) -> str:
    """Return git's name for a file's contents."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def parse_fields(header: str) -> dict[str, str]:
    """Read `Key: value` lines; indented lines continue the value before them."""
    fields: dict[str, str] = {}
    key = ""
    for line in header.splitlines():
        match = re.match(r"^([A-Z][a-z]+): *(.*)$", line)
        if match:
            key = match[1]
            fields[key] = match[2]
        elif line.startswith((" ", "\t")) and key:
            fields[key] += " " + line.strip()
    return fields


def parse(path: Path) -> Patch:
    """Read a patch file; raises BuildError on anything that is not the format above."""
    text = path.read_text()
    header, mark, body = text.partition("diff --git ")
    diffs: list[FileDiff] = []
    in_hunk = False
    for number, line in enumerate((mark + body).split("\n")[:-1], header.count("\n") + 1):
        where = f"{path}:{number}"
        if line.startswith("diff --git "):
            diffs.append(FileDiff(line.split(" b/", 1)[-1]))
            in_hunk = False
        elif match := HUNK.match(line):
            diffs[-1].hunks.append(Hunk(int(match[1]), int(match[3])))
            in_hunk = True
        elif not in_hunk:
            if line.startswith("index "):
                diffs[-1].before, _, diffs[-1].after = line.split()[1].partition("..")
            elif not line.startswith(("--- a/", "+++ b/")):
                raise BuildError(f"{where}: unexpected {line!r}; write patches with `tools export`")
        elif line.startswith("-"):
            diffs[-1].hunks[-1].removed.append(line[1:])
        elif line.startswith("+"):
            diffs[-1].hunks[-1].added.append(line[1:])
        elif line.startswith(" "):
            diffs[-1].hunks[-1].context += 1
        else:
            raise BuildError(f"{where}: unexpected {line!r}; write patches with `tools export`")
    return Patch(path, header, parse_fields(header), diffs)


def apply(patch: Path, diff: FileDiff, old: bytes) -> bytes:
    """Apply `diff` to `old`; raises BuildError unless that is exactly the file it was made for."""
    remedy = (
        f"{diff.path} is not the file that {patch} was made for; take the pinned wheel, or move "
        f"the patches with `python -m tools rebase`"
    )
    if blob(old) != diff.before:
        raise BuildError(remedy)
    lines = old.decode().split("\n")
    for hunk in reversed(diff.hunks):
        first = hunk.start - 1 if hunk.removed else hunk.start
        last = first + len(hunk.removed)
        if hunk.context or lines[first:last] != hunk.removed:
            raise BuildError(f"line {hunk.start}: {remedy}")
        lines[first:last] = hunk.added
    new = "\n".join(lines).encode()
    if blob(new) != diff.after:
        raise BuildError(
            f"{patch} does not give the {diff.path} that it says (was it edited by hand?); edit "
            f"build/tree and run `python -m tools export`"
        )
    return new


def series(seams: Path) -> list[Patch]:
    """Read the patches that `seams`/series lists, in order.

    Raises:
        BuildError: listing and files disagree, or two patches claim a file.
    """
    listing = seams / "series"
    if not listing.exists():
        raise BuildError(f"{listing} is missing; restore it, it lists the patches in order")
    lines = (line.partition("#")[0].strip() for line in listing.read_text().splitlines())
    names = [line for line in lines if line]
    unlisted = {path.name for path in seams.glob("*.patch")} - set(names)
    if unlisted:
        raise BuildError(f"{seams / sorted(unlisted)[0]} is not listed in {listing}; add it there")
    for name in names:
        if not (seams / name).exists():
            raise BuildError(f"{listing} lists {name}, which is missing; restore or unlist it")
    patches = [parse(seams / name) for name in names]
    owner: dict[str, Path] = {}
    for patch in patches:
        for file in patch.files:
            if file in owner:
                raise BuildError(
                    f"{patch.path} and {owner[file]} both claim {file}; a file belongs to one patch"
                )
            owner[file] = patch.path
    return patches
