# SPDX-License-Identifier: Apache-2.0
"""Assembles the fork's tree: upstream's tree + patches/seams + patches/taps + vllm/.

`layers` does it on any unpacked upstream tree with the standard library and libcst only.
`assemble` leaves build/tree: a git repository of four commits, our own files as live links.
`assemble_into` does it in place on a tree unpacked elsewhere (a GPU host), offline.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from tools import beside, wheels
from tools.pins import ROOT, BuildError, Pin
from vllm_pilot import udiff


def overlay_files(root: Path = ROOT) -> list[str]:
    """List our own files, as paths in the tree: everything under vllm/ of this repository."""
    return sorted(
        str(path.relative_to(root))
        for path in (root / "vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def apply_seams(tree: Path, root: Path, pin: Pin) -> None:
    """Apply the patches to upstream's files; raises BuildError where one does not fit exactly."""
    for patch in beside.seams(pin, root):
        for diff in patch.diffs:
            file = tree / diff.path
            if not file.exists():
                raise BuildError(
                    f"{diff.path}, which {patch.path} patches, is not upstream; "
                    f"take the pinned wheel"
                )
            file.write_bytes(udiff.apply(patch.path, diff, file.read_bytes()))


def codemod(root: Path) -> ModuleType:
    """Import patches/taps/codemod.py of `root`."""
    if not (root / "patches" / "taps" / "codemod.py").exists():
        raise BuildError(f"{root}/patches/taps/codemod.py is missing; `git checkout patches/taps`")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("patches.taps.codemod")


def wire_taps(tree: Path, root: Path, pin: Pin, cache: Path | None) -> None:
    """Run the codemod on `tree`, or take what it made of the same models from `cache`."""
    kept = cache / codemod_digest(tree, root) if cache else None
    if kept and kept.exists():
        shutil.copytree(kept, tree, dirs_exist_ok=True)
        return
    taps = codemod(root)
    try:
        changed = taps.wire(tree, taps.rows(pin.upstream_version))
    except taps.TapsError as error:
        raise BuildError(str(error)) from error
    if cache and kept:
        shutil.rmtree(cache, ignore_errors=True)
        for file in changed:
            copy = kept.with_suffix(".partial") / file.relative_to(tree)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
        kept.with_suffix(".partial").rename(kept)


def codemod_digest(tree: Path, root: Path) -> str:
    """Hash all that the codemod reads: itself, and the models with their seams."""
    taps = sorted((root / "patches" / "taps").rglob("*.py"))
    models = (tree / "vllm" / "model_executor", tree / "vllm" / "models")
    sources = taps + sorted(file for folder in models for file in folder.rglob("*.py"))
    digest = hashlib.sha256()
    for file in sources:
        digest.update(f"{file.name} {wheels.sha256(file)}\n".encode())
    return digest.hexdigest()


def lay_overlay(tree: Path, root: Path, pin: Pin) -> None:
    """Copy our own files into the tree; raises BuildError where upstream has one of that name."""
    names = overlay_files(root)
    beside.replaced(names, root, pin)  # checks
    for name in names:
        target = tree / name
        if target.exists():
            raise BuildError(
                f"{name} exists upstream; vllm/ holds new files only: rename it, or write a seam"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(beside.ours(name, root, pin))


def layers(
    tree: Path, root: Path, pin: Pin, done: Callable[[str], None], cache: Path | None = None
) -> None:
    """Turn upstream's `tree` into the fork's; `done` is called with each layer's name after it."""
    done("upstream")
    apply_seams(tree, root, pin)
    done("seams")
    wire_taps(tree, root, pin, cache)
    done("taps")
    lay_overlay(tree, root, pin)
    done("overlay")


def git(tree: Path, *arguments: str, stdin: str | None = None) -> str:
    """Run git in `tree`, deaf to the user's and the machine's settings, and return its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # `status` is not to write
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "assemble", f"GIT_{who}_EMAIL": "assemble@localhost"}
        environment[f"GIT_{who}_DATE"] = "2000-01-01T00:00:00Z"
    result = subprocess.run(
        ["git", "-C", tree, *arguments],
        env=environment,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if result.returncode:
        raise BuildError(
            f"git {arguments[0]} failed in {tree}: {result.stderr.strip()}; "
            f"`rm -rf {tree}` and run `make install` again"
        )
    return result.stdout


def commit(tree: Path, name: str) -> None:
    """Commit a layer and tag it with its name; the first, "upstream", makes the repository."""
    if name == "upstream":
        git(tree, "init", "--quiet", "--initial-branch=fork")
        # Binaries are as the wheel's RECORD says; in git they would only cost time.
        (tree / ".git" / "info" / "exclude").write_text("*.so\n/vllm/vllm-rs\n__pycache__/\n")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", name)
    git(tree, "tag", name)


def link_overlay(tree: Path, root: Path, home: Path) -> None:
    """Turn our files into links to the repository, to edit and rerun.

    Args:
        home: where `tree` will stand.
    """
    names = overlay_files(root)
    for name in names:
        (tree / name).unlink()
        (tree / name).symlink_to(os.path.relpath(root / name, (home / name).parent))
    if names:
        # The commit holds the contents, for review; git is not to see the links as changes.
        git(tree, "update-index", "--skip-worktree", "--stdin", stdin="\n".join(names) + "\n")


def copy_or_link(source: str, target: str) -> None:
    """Copy a file, or link an extension: hundreds of megabytes that are never edited."""
    if source.endswith(".so"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


INPUTS = ("patches/**/*.py", "patches/seams/*", "tools/assemble.py", "vllm_pilot/udiff.py")
"""Files that build/tree is made from, but for our own."""


def inputs_digest(root: Path, pin: Pin) -> str:
    """Hash all that build/tree is made from. Our files count by name only, where they are live."""
    digest = hashlib.sha256(f"{pin}\n".encode())
    for path in sorted(path for pattern in INPUTS for path in root.glob(pattern)):
        digest.update(f"{path.relative_to(root)} {wheels.sha256(path)}\n".encode())
    for name in overlay_files(root):
        digest.update(f"{name} {wheels.sha256(root / name) if pin.differs else ''}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(build: Path) -> Iterator[None]:
    """Let one build run at a time, and clear what a killed one left.

    The lock dies with its process.
    """
    build.mkdir(parents=True, exist_ok=True)
    with (build / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for leftover in build.glob("partial-*"):
            shutil.rmtree(leftover)
        yield


@contextlib.contextmanager
def partial(build: Path) -> Iterator[Path]:
    """Make a temporary folder on the file system of `build`, deleted at the end unless renamed."""
    folder = Path(tempfile.mkdtemp(prefix="partial-", dir=build))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def edited(tree: Path) -> list[str]:
    """List the files edited, added or deleted in build/tree since it was assembled."""
    status = git(tree, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
    names = [entry[3:] for entry in status.split("\0") if entry]
    # An editor may have replaced one of our links by a file.
    ours = git(tree, "diff", "--name-only", "-z", "taps", "overlay").split("\0")
    names += [name for name in ours if (tree / name).is_file() and not (tree / name).is_symlink()]
    return sorted(names)


def contents(file: Path) -> bytes | None:
    """Return the contents of a file, None if there is none."""
    return file.read_bytes() if file.is_file() else None


def carry_edits(old: Path, new: Path) -> None:
    """Copy the edits in `old` to `new`, where they are not in the patches yet."""
    for name in edited(old):
        wanted, found = contents(old / name), contents(new / name)
        if wanted == found:
            continue
        base = git(old, "ls-tree", "--object-only", "overlay", "--", name).strip()
        if base != (udiff.blob(found) if found is not None else ""):
            raise BuildError(
                f"{old / name} has edits that are not in patches/seams, and what it is made from "
                f"changed; run `python -m tools export` first, or drop the edits with "
                f"`python -m tools assemble --discard-edits`"
            )
        if wanted is None:
            (new / name).unlink()
        else:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(wanted)


def assemble(pin: Pin, root: Path = ROOT, *, discard_edits: bool = False) -> Path:
    """Make build/tree, all of it or nothing, and return its path.

    Nothing is done when its inputs did not change. Edits in build/tree that are not exported yet
    survive, unless `discard_edits`. Of a version beside the pinned one it is build/tree-VERSION,
    for reading: our files are no links there, and edits are lost.

    Raises:
        BuildError: the layers do not fit, or edits would be lost; the message says what to do.
    """
    build = root / "build"
    tree = build / f"tree{pin.suffix}"
    stamp = tree / ".git" / "assembled-from"
    with locked(build), partial(build) as new, partial(build) as old:
        digest = inputs_digest(root, pin)
        if stamp.exists() and stamp.read_text() == digest and not discard_edits:
            return tree
        upstream = wheels.upstream_folder(pin, build)
        shutil.copytree(upstream / "vllm", new / "vllm", copy_function=copy_or_link)
        if pin.differs:
            beside.make(pin, root)
        layers(new, root, pin, lambda layer: commit(new, layer), build / f"wired{pin.suffix}")
        if not pin.differs:
            link_overlay(new, root, tree)
            if stamp.exists() and not discard_edits:
                carry_edits(tree, new)
        (new / ".git" / "assembled-from").write_text(digest)
        if tree.exists():
            tree.rename(old / "tree")
        new.rename(tree)
    return tree
