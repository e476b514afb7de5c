# SPDX-License-Identifier: Apache-2.0
"""Upstream's tree + patches/seams + patches/taps + vllm/ = the fork's tree.

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

from tools import udiff, wheels
from tools.pins import ROOT, BuildError, Pin

LAYERS = ("upstream", "seams", "taps", "overlay")


def overlay_files(root: Path = ROOT) -> list[str]:
    """Our own files, as paths in the tree: everything under vllm/ of this repository."""
    return sorted(
        str(path.relative_to(root))
        for path in (root / "vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def apply_seams(tree: Path, root: Path) -> None:
    for patch in udiff.series(root / "patches" / "seams"):
        for diff in patch.diffs:
            file = tree / diff.path
            if not file.exists():
                raise BuildError(
                    f"{diff.path}, which {patch.path} patches, is not upstream; "
                    f"take the pinned wheel"
                )
            file.write_bytes(udiff.apply(patch.path, diff, file.read_bytes()))


def codemod(root: Path) -> ModuleType:
    """patches/taps/codemod.py of `root`."""
    if not (root / "patches" / "taps" / "codemod.py").exists():
        raise BuildError(f"{root}/patches/taps/codemod.py is missing; `git checkout patches/taps`")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("patches.taps.codemod")


def wire_taps(tree: Path, root: Path) -> None:
    """Runs the codemod on `tree`."""
    taps = codemod(root)
    try:
        taps.wire(tree)
    except taps.TapsError as error:
        raise BuildError(str(error)) from error


def lay_overlay(tree: Path, root: Path) -> None:
    for name in overlay_files(root):
        target = tree / name
        if target.exists():
            raise BuildError(
                f"{name} exists upstream; vllm/ holds new files only: rename it, or write a seam"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)


def layers(tree: Path, root: Path, done: Callable[[str], None]) -> None:
    """Turns upstream's `tree` into the fork's; `done` is called after each of LAYERS."""
    done("upstream")
    apply_seams(tree, root)
    done("seams")
    wire_taps(tree, root)
    done("taps")
    lay_overlay(tree, root)
    done("overlay")


def git(tree: Path, *arguments: str, stdin: str | None = None) -> str:
    """Runs git in `tree`, deaf to the user's and the machine's settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "assemble", f"GIT_{who}_EMAIL": "assemble@localhost"}
        environment[f"GIT_{who}_DATE"] = "2000-01-01T00:00:00Z"
    result = subprocess.run(
        ["git", "-C", tree, *arguments],
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise BuildError(
            f"git {arguments[0]} failed in {tree}: {result.stderr.strip()}; "
            f"`rm -rf {tree}` and run `make install` again"
        )
    return result.stdout


def commit(tree: Path, name: str) -> None:
    if name == "upstream":
        git(tree, "init", "--quiet", "--initial-branch=fork")
        # Binaries are as the wheel's RECORD says; in git they would only cost time.
        (tree / ".git" / "info" / "exclude").write_text("*.so\n/vllm/vllm-rs\n__pycache__/\n")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", name)
    git(tree, "tag", name)


def link_overlay(tree: Path, root: Path, home: Path) -> None:
    """Our files become links to the repository: edit and rerun. `home`: where `tree` will stand."""
    names = overlay_files(root)
    for name in names:
        (tree / name).unlink()
        (tree / name).symlink_to(os.path.relpath(root / name, (home / name).parent))
    if names:
        # The commit holds the contents, for review; git is not to see the links as changes.
        git(tree, "update-index", "--skip-worktree", "--stdin", stdin="\n".join(names) + "\n")


def copy_or_link(source: str, target: str) -> None:
    """Extensions (hundreds of megabytes, never edited) are hard links into the unpacked wheel."""
    if source.endswith(".so"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def inputs_digest(root: Path, pin: Pin) -> str:
    """Hash of all that build/tree is made from. Our live files count by name only."""
    digest = hashlib.sha256(f"{pin}\n".encode())
    for folder, pattern in ((root / "patches", "*"), (root / "tools", "*.py")):
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(root)} {wheels.sha256(path)}\n".encode())
    digest.update("\n".join(overlay_files(root)).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(build: Path) -> Iterator[None]:
    """One build at a time; the lock dies with its process."""
    build.mkdir(parents=True, exist_ok=True)
    with (build / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unexported(tree: Path) -> dict[str, bytes | None]:
    """Files edited in build/tree since it was assembled: path -> contents, None if deleted."""
    status = git(tree, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
    names = [entry[3:] for entry in status.split("\0") if entry]
    # An editor may have replaced one of our links by a file.
    ours = git(tree, "diff", "--name-only", "-z", "taps", "overlay").split("\0")
    names += [name for name in ours if (tree / name).is_file() and not (tree / name).is_symlink()]
    return {name: (tree / name).read_bytes() if (tree / name).exists() else None for name in names}


def assemble(pin: Pin, root: Path = ROOT, *, discard_edits: bool = False) -> Path:
    """Leaves build/tree. All or nothing; nothing to do when its inputs did not change.

    Edits in build/tree that are not in the patches yet stop it, unless `discard_edits`.
    """
    build = root / "build"
    tree = build / "tree"
    stamp = tree / ".git" / "assembled-from"
    with locked(build):
        for leftover in build.glob("partial-*"):
            shutil.rmtree(leftover)
        digest = inputs_digest(root, pin)
        if stamp.exists() and stamp.read_text() == digest and not discard_edits:
            return tree
        edits = unexported(tree) if stamp.exists() and not discard_edits else {}
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=build))
        upstream = wheels.upstream_folder(pin, build)
        shutil.copytree(upstream / "vllm", partial / "vllm", copy_function=copy_or_link)
        layers(partial, root, lambda name: commit(partial, name))
        for name, data in edits.items():
            new = partial / name
            if (new.read_bytes() if new.exists() else None) != data:
                raise BuildError(
                    f"{tree / name} has edits that are not in patches/seams; run `python -m tools "
                    f"export` first, or drop them with `python -m tools assemble --discard-edits`"
                )
        link_overlay(partial, root, tree)
        (partial / ".git" / "assembled-from").write_text(digest)
        if tree.exists():
            tree.rename(Path(tempfile.mkdtemp(prefix="partial-", dir=build)) / "old")
        partial.rename(tree)
        for leftover in build.glob("partial-*"):
            shutil.rmtree(leftover)
    return tree
