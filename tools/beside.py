# SPDX-License-Identifier: Apache-2.0
"""Carries the seams to a version of upstream beside the pinned one.

Most hunks go where `tools/merge.py` says. Those that it leaves to a hand are in
patches/seams/VERSION.diff, as they are there. Both together are written, at exact places, to
build/seams-VERSION.patch, so that a host without the pinned wheel, network or git can apply it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tools import merge, wheels
from tools.pins import BuildError, Pin, load_pin
from vllm_pilot import udiff

MAX_LINES = 150
"""The lines that may differ for one version."""


def seams(pin: Pin, root: Path) -> list[udiff.Patch]:
    """Read the seams of a version.

    Raises:
        BuildError: `make` has not run since the seams or upstream.toml changed.
    """
    folder = root / "patches" / "seams"
    if pin.differs is None:
        return udiff.series(folder)
    path = _made(pin, root)
    if not path.exists() or udiff.parse(path).fields["Inputs"] != _inputs(pin, root):
        raise BuildError(
            f"{path} is missing, or older than {folder}: run `python -m tools assemble --beside "
            f"{pin.upstream_version}` where there is a network, and bring the file here"
        )
    return [udiff.parse(path)]


def make(pin: Pin, root: Path) -> None:
    """Carry the seams to the version of `pin`, unless that was done; the caller locked build/."""
    path, digest = _made(pin, root), _inputs(pin, root)
    if path.exists() and udiff.parse(path).fields["Inputs"] == digest:
        return
    tree = wheels.upstream_folder(pin, root / "build")
    diffs = [written(name, hunks, tree) for name, hunks in sorted(_hunks(pin, root, tree).items())]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join([f"Inputs: {digest}", "", *diffs]) + "\n")
    partial.replace(path)


def _made(pin: Pin, root: Path) -> Path:
    return root / "build" / f"seams{pin.suffix}.patch"


def _own(pin: Pin, root: Path) -> Path:
    """The hunks of the version alone."""
    return root / "patches" / "seams" / f"{pin.upstream_version}.diff"


def _inputs(pin: Pin, root: Path) -> str:
    """Hash all that the carried seams are made from."""
    files = [*sorted((root / "patches" / "seams").glob("*.patch")), _own(pin, root)]
    digest = hashlib.sha256(f"{pin.sha256} {pin.differs}\n".encode())
    for file in [*files, Path(merge.__file__), Path(__file__)]:
        digest.update(f"{file.name} {wheels.sha256(file)}\n".encode())
    return digest.hexdigest()


def _hunks(pin: Pin, root: Path, tree: Path) -> dict[str, list[udiff.Hunk]]:
    """Return the hunks of each file of the version's `tree`, in their order.

    Raises:
        BuildError: the hunks that need a hand are not those that the version's own stand for.
    """
    assert pin.differs
    base = wheels.upstream_folder(load_pin(root), root / "build")
    own = udiff.parse(_own(pin, root))
    found: dict[str, list[udiff.Hunk]] = {}
    for diff in own.diffs:
        if udiff.blob((tree / diff.path).read_bytes()) != diff.before:
            raise BuildError(f"{diff.path} is not the file that {own.path} was made for")
        found[diff.path] = list(diff.hunks)
    left = []
    for diff in (diff for p in udiff.series(own.path.parent) for diff in p.diffs):
        name = pin.differs.moved.get(diff.path, diff.path)
        if not (tree / name).exists():
            raise BuildError(f"{name} is not in {pin.upstream_version}; say where under `moved`")
        old, new = (base / diff.path).read_text(), (tree / name).read_text()
        for hunk, one in zip(diff.hunks, merge.carry(old, new, diff.hunks)[1], strict=True):
            if one.placed:
                found.setdefault(name, []).append(one.placed)
            else:
                left.append("\n".join([diff.path, *hunk.removed, "", *hunk.added]))
    digest = hashlib.sha256("\n\n".join(left).encode()).hexdigest()[:16]
    if digest != own.fields.get("Instead"):
        raise BuildError(
            f"{own.path} stands for other hunks than these {len(left)}, which need a hand in "
            f"{pin.upstream_version}; correct it, then its line `Instead: {digest}`:\n\n"
            + "\n\n".join(left)
        )
    return {name: sorted(hunks, key=lambda hunk: hunk.start) for name, hunks in found.items()}


def written(name: str, hunks: list[udiff.Hunk], tree: Path) -> str:
    """Return the hunks of a file as `udiff.parse` reads them."""
    data = (tree / name).read_bytes()
    lines, text, moved = data.decode().split("\n"), [], 0
    for hunk, later in zip(hunks, [*hunks[1:], None], strict=True):
        first = hunk.start - bool(hunk.removed)
        if lines[first : first + len(hunk.removed)] != hunk.removed or (
            later and later.start < hunk.start + max(1, len(hunk.removed))
        ):
            raise BuildError(f"{name}:{hunk.start}: two hunks are at one place, or it changed")
        start = hunk.start + moved + (not hunk.removed)
        text.append(f"@@ -{hunk.start},{len(hunk.removed)} +{start},{len(hunk.added)} @@")
        text += [*(f"-{line}" for line in hunk.removed), *(f"+{line}" for line in hunk.added)]
        moved += len(hunk.added) - len(hunk.removed)
    for hunk in reversed(hunks):
        first = hunk.start - bool(hunk.removed)
        lines[first : first + len(hunk.removed)] = hunk.added
    after = udiff.blob("\n".join(lines).encode())
    head = [f"diff --git a/{name} b/{name}", f"index {udiff.blob(data)}..{after} 100644"]
    return "\n".join([*head, *text])


def ours(name: str, root: Path, pin: Pin) -> bytes:
    """Return one of our files as it is for a version."""
    data = (root / name).read_bytes()
    for old, new in (pin.differs.ours if pin.differs else {}).items():
        data = data.replace(old.encode(), new.encode())
    return data


def replaced(names: Iterable[str], root: Path, pin: Pin) -> list[str]:
    """Return those of our files that differ for a version.

    Raises:
        BuildError: a text of `ours` in upstream.toml does not occur once in all of them.
    """
    texts = {name: (root / name).read_bytes() for name in names}
    for old in pin.differs.ours if pin.differs else {}:
        if (times := sum(text.count(old.encode()) for text in texts.values())) != 1:
            raise BuildError(f"{old!r} occurs {times} times in our files, not once; correct `ours`")
    return [name for name, text in texts.items() if ours(name, root, pin) != text]


def difference(pin: Pin, root: Path) -> int:
    """Count the lines, without blank ones and comments, that stand for one version alone."""
    version = pin.upstream_version
    table = root / "patches" / "taps" / f"table_{version.replace('.', '_')}.py"
    _, _, section = (root / "upstream.toml").read_text().partition(f'[beside."{version}"')
    lines = [f'[beside."{version}"{section}'.partition("\n[entry_points")[0]]
    lines += [path.read_text() for path in (_own(pin, root), table) if path.exists()]
    return sum(line.strip()[:1] not in ("", "#") for text in lines for line in text.split("\n"))
