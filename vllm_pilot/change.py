# SPDX-License-Identifier: Apache-2.0
"""Changes a folder of installed packages, all of it or nothing: `apply` and `remove`.

First everything is written beside the files, and checked. Then `state.json` says what is about to
happen, and files are renamed into their places. A process that is killed before leaves upstream's
files; one that is killed later leaves a record, with which the next change goes back to upstream's
before it does anything else. A file is never written in place: its other names (hard links of a
package cache) keep their contents.
"""

from __future__ import annotations

import compileall
import contextlib
import dataclasses
import fcntl
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_pilot import BuildError
from vllm_pilot.state import (
    STATE,
    Entry,
    Found,
    Phase,
    State,
    altered,
    digest,
    look,
    read,
    write,
)

UNCHANGED = "nothing was changed"


@dataclass(frozen=True)
class Wanted:
    """The files to have: `before` is the hash of upstream's file, None for a file of ours alone."""

    version: str
    distribution: str
    upstream: str
    files: Mapping[str, tuple[str | None, bytes]]

    @property
    def state(self) -> State:
        """The record of these files, with the work begun."""
        files = {name: Entry(before, digest(new)) for name, (before, new) in self.files.items()}
        return State(Phase.APPLYING, self.version, self.distribution, self.upstream, files)


def upstream_bytes(site: Path, name: str) -> bytes | None:
    """Return upstream's contents of a file, whether or not ours was applied; None without one."""
    state = read(site)
    entry = state.files.get(name) if state else None
    original = site / STATE / "originals" / name
    if entry and original.exists() and look(site / name, entry) is not Found.UPSTREAM:
        return original.read_bytes()
    return (site / name).read_bytes() if (site / name).is_file() else None


def apply(site: Path, wanted: Wanted) -> list[str]:
    """Make the files of `site` those of `wanted`, and return what differs from what was applied.

    Raises:
        BuildError: vLLM runs, another change is at work, the folder cannot be written, or a file is
            neither upstream's nor ours; nothing was changed then.
    """
    new = wanted.state
    with locked(site):
        refuse_running(site)
        old = read(site)
        had: dict[str, str] = {}
        if old:
            wrong = altered(site, old) if old.phase is Phase.APPLIED else None
            if wrong == {}:
                had = {name: entry.after for name, entry in old.files.items()}
            have = {name: entry.after for name, entry in new.files.items()}
            if had == have and old.version == new.version:
                return []
            restore(site, old, foreign=is_foreign(old, new.distribution, new.upstream))
        stage(site, wanted)
        os.sync()
        try:
            write(site, new)
        except OSError as error:
            raise BuildError(f"{error}; {UNCHANGED}") from error
        try:
            for name in sorted(new.files, key=lambda name: new.files[name].before is not None):
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                move(site / STATE / "new" / name, site / name)
            write(site, dataclasses.replace(new, phase=Phase.APPLIED, files=measured(site, new)))
        except BaseException as error:
            restore(site, new, foreign=False)
            if isinstance(error, OSError):
                raise BuildError(f"{error}; {UNCHANGED}") from error
            raise
        shutil.rmtree(site / STATE / "new")
    compile_again(site, new.files)
    have = {name: entry.after for name, entry in new.files.items()}
    return sorted(name for name, _ in set(have.items()) ^ set(had.items()))


def remove(site: Path, installed: tuple[str, str] | None, *, discard: bool = False) -> list[str]:
    """Give `site` its bytes of before `apply`, and return the files that were ours.

    Args:
        site: the folder that holds `vllm/`.
        installed: the distribution and version that are there now. Where they are not those that
            were patched, only our own files go: the others are that version's.
        discard: whether files that were edited since are given up.

    Raises:
        BuildError: vLLM runs, another change is at work, the folder cannot be written, or a file
            was edited since; nothing was changed then.
    """
    if not (site / STATE).exists():
        return []
    with locked(site):
        refuse_running(site)
        state = read(site)
        if state is None:
            return []
        foreign = installed is None or is_foreign(state, *installed)
        restore(site, state, foreign=foreign, discard=discard)
    compile_again(site, state.files)
    return sorted(state.files)


def is_foreign(state: State, distribution: str, version: str) -> bool:
    """Tell whether another vLLM is installed than the one that was patched."""
    return (state.distribution, state.upstream) != (distribution, version)


@contextlib.contextmanager
def locked(site: Path) -> Iterator[None]:
    """Let one change run at a time; the lock dies with its process.

    Without a record at the end, nothing is left behind.
    """
    folder = site / STATE
    busy = f"another vllm-pilot is at work on {site}; wait for it to end; {UNCHANGED}"
    try:
        folder.mkdir(exist_ok=True)
        file = (folder / "lock").open("a")
    except FileNotFoundError:
        raise BuildError(busy) from None
    except OSError as error:
        raise BuildError(
            f"{site} cannot be written ({error.strerror}); run vllm-pilot as the user who "
            f"installed vLLM, or use a virtual environment of your own; {UNCHANGED}"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one before may have deleted the file that was opened here.
            if os.fstat(file.fileno()).st_ino != (folder / "lock").stat().st_ino:
                raise BuildError(busy)
        except (BlockingIOError, FileNotFoundError):
            raise BuildError(busy) from None
        try:
            yield
        finally:
            if not (folder / "state.json").exists():
                shutil.rmtree(folder)


def refuse_running(site: Path) -> None:
    """Raise BuildError where a process has extensions or programs of `site`/vllm in memory.

    Processes of other users are seen by root only.
    """
    inside = f"{site}/vllm/".encode()
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and inside in (process / "maps").read_bytes():
                running.append(process.name)
    if running:
        raise BuildError(
            f"vLLM runs from {site} (process {', '.join(sorted(running, key=int))}); stop it "
            f"first; {UNCHANGED}"
        )


def stage(site: Path, wanted: Wanted) -> None:
    """Write our files to `.vllm-pilot/new` and upstream's to `.vllm-pilot/originals`.

    Raises:
        BuildError: a file is neither upstream's nor ours, or a folder cannot be written.
    """
    new, originals = site / STATE / "new", site / STATE / "originals"
    for folder in (new, originals):
        shutil.rmtree(folder, ignore_errors=True)
    state = wanted.state
    strange = []
    for name, entry in state.files.items():
        found = look(site / name, entry)
        fits = {Found.UPSTREAM} if entry.before else {Found.MISSING, Found.OURS}
        if found not in fits:
            strange.append(f"{name} ({'ours, with no original' if found is Found.OURS else found})")
    if strange:
        raise BuildError(
            f"{len(strange)} files in {site} are not those of the pinned wheel: "
            f"{some(strange)}; reinstall it: pip install --force-reinstall --no-deps "
            f"{wanted.distribution}=={wanted.upstream}; {UNCHANGED}"
        )
    for folder in sorted({existing((site / name).parent) for name in state.files}):
        if not os.access(folder, os.W_OK):
            raise BuildError(
                f"{folder} cannot be written; run vllm-pilot as the user who installed vLLM; "
                f"{UNCHANGED}"
            )
    try:
        for name, (before, data) in wanted.files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
            if before:
                shutil.copymode(site / name, new / name)
                keep(site / name, originals / name)
    except OSError as error:
        raise BuildError(f"{error}; {UNCHANGED}") from error


def keep(path: Path, original: Path) -> None:
    """Give a file a second name, or a copy where the file system or its owner allows none."""
    original.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, original)
    except OSError:
        shutil.copy2(path, original)


def restore(site: Path, state: State, *, foreign: bool, discard: bool = False) -> None:
    """Put upstream's files back, whatever was done of `apply` or of an earlier `restore`.

    Args:
        site: the folder that holds `vllm/`.
        state: its record.
        foreign: whether another vLLM was installed over it: what is not ours stays.
        discard: whether files that were edited since are given up.
    """
    found = {name: look(site / name, entry) for name, entry in state.files.items()}
    edited = [name for name, what in found.items() if what is Found.OTHER]
    if edited and not foreign and not discard:
        raise BuildError(
            f"{len(edited)} files were edited since: {some(edited)}; save them, then run "
            f"`vllm-pilot remove --discard`; {UNCHANGED}"
        )
    back = {Found.OURS} if foreign else {Found.OURS, Found.MISSING, Found.OTHER}
    gone = {Found.OURS} if foreign else {Found.OURS, Found.OTHER}
    originals = site / STATE / "originals"
    patched = [n for n, e in state.files.items() if e.before and found[n] in back]
    lost = [n for n in patched if look(originals / n, state.files[n]) is not Found.UPSTREAM]
    if lost:
        raise BuildError(
            f"the originals of {some(lost)} are lost; reinstall: pip install --force-reinstall "
            f"--no-deps {state.distribution}=={state.upstream}; {UNCHANGED}"
        )
    if state.phase is Phase.APPLIED:  # else the record says already that they may be a mix
        write(site, dataclasses.replace(state, phase=Phase.REMOVING))
    for name in patched:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        move(originals / name, site / name)
    for name, entry in state.files.items():
        if entry.before is None and found[name] in gone:
            discard_file(site / name)
        elif found[name] is Found.MISSING and name not in patched:
            drop_bytecode(site / name)  # which `apply` made, and pip did not know of
    folders = {folder for name in state.files for folder in PurePosixPath(name).parents}
    for folder in sorted(folders - {PurePosixPath(".")}, key=lambda f: -len(f.parts)):
        with contextlib.suppress(OSError):  # where other files are in it
            (site / folder).rmdir()
    (site / STATE / "state.json").unlink()


def move(source: Path, target: Path) -> None:
    """Rename a file into its place, without the bytecode of the one that was there."""
    drop_bytecode(target)
    source.replace(target)


def discard_file(path: Path) -> None:
    """Delete a file and its bytecode."""
    drop_bytecode(path)
    path.unlink()


def drop_bytecode(path: Path) -> None:
    """Delete a source's bytecode, of all Pythons: it may be of a kind that is never checked."""
    if path.suffix == ".py":
        folder = path.parent / "__pycache__"
        for compiled in folder.glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        with contextlib.suppress(OSError):  # where there is none, or more in it
            folder.rmdir()


def compile_again(site: Path, names: Iterable[str]) -> None:
    """Compile sources, as pip does: those who run vLLM may not be allowed to write beside it."""
    if sys.dont_write_bytecode:
        return
    for name in names:
        path = site / name
        if path.suffix == ".py" and path.exists():
            compileall.compile_file(path, quiet=2, force=True)


def measured(site: Path, state: State) -> dict[str, Entry]:
    """Return the entries of `state` with the size and time of each file."""
    entries = {}
    for name, entry in state.files.items():
        stat = (site / name).stat()
        entries[name] = dataclasses.replace(entry, size=stat.st_size, mtime_ns=stat.st_mtime_ns)
    return entries


def existing(folder: Path) -> Path:
    """Return the folder, or the one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def some(names: list[str]) -> str:
    """Name a few of many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
