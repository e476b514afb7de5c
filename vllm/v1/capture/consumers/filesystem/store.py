# SPDX-License-Identifier: Apache-2.0
"""A store keeps files that are there whole or not at all, and durable when `put` returns.

Paths are relative to the root. No lock is held while the store works: it may hang.
"""

import contextlib
import errno
import os
import shutil
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fsspec.core
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from vllm.v1.capture.file_format import Buffer

FileContent = Sequence[Buffer]
"""The content of a file, in pieces to be written one after the other."""
_MOST_PIECES = os.sysconf("SC_IOV_MAX")
"""The most pieces that one call of `os.writev` takes."""


class Store(ABC):
    """A folder tree, on a disk or in an object store.

    All methods raise the store's `OSError`, and `FileExistsError` where `replace` is false and the
    path is taken.
    """

    is_local: ClassVar[bool] = False
    """True if other programs of this host open files by the path that `full` returns."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")

    def full(self, path: str) -> str:
        """Return the path as `fs` takes it, with the root in front."""
        return f"{self.root}/{path}"

    def prepare(self) -> None:  # noqa: B027
        """Find out what cannot work. Called once, before anything is written."""

    @abstractmethod
    def put(self, path: str, pieces: FileContent, replace: bool) -> None:
        """Write one file.

        Args:
            path: relative to the root; folders are made as needed.
            replace: whether a file that is there is replaced.
        """

    @abstractmethod
    def put_folder(self, path: str, files: Mapping[str, FileContent], replace: bool) -> None:
        """Write several files at once, and leave nothing else in their folder.

        Locally the folder appears at once. In an object store its files appear one by one, and a
        second `put_folder` of this process to the same path meanwhile raises FileExistsError. The
        files of two processes could mix, which the reader notices.
        """

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file or folder; one that is not there is no error."""

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, sorted; none if there is no folder."""
        path = self.full(folder)
        self.fs.invalidate_cache(path)
        try:
            found = self.fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rsplit("/", 1)[-1] for name in found)


def open_store(root: str, storage_options: Mapping[str, Any]) -> Store:
    """Open the store at a path or URL.

    Args:
        storage_options: keywords of the fsspec file system.

    Raises:
        ValueError: there is no such protocol, its library is not installed, or an option is
            unknown.
    """
    try:
        fs, path = fsspec.core.url_to_fs(root, **storage_options)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"root: {root!r} cannot be opened: {error}") from error
    if isinstance(fs, LocalFileSystem):
        return LocalStore(fs, os.path.abspath(path))
    return ObjectStore(fs, path)


class LocalStore(Store):
    """A folder on a local file system.

    A file is written under a temporary name, synced and renamed, and the rename is synced. Below
    the root no symbolic link is followed, so that nothing is written elsewhere: each folder is
    opened by its name in the one above, and used by its descriptor.
    """

    is_local = True

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        super().__init__(fs, root)
        self._durable: set[str] = set()
        """The folders whose entry in their parent was synced, by their paths."""

    def prepare(self) -> None:
        """Make the root, and try a hard link there."""
        folder = Path(self.root)
        self._make_folder(folder)
        one, other = _temporary(folder), _temporary(folder)
        try:
            one.touch()
            try:
                os.link(one, other)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"root: {self.root} is on a file system without hard links ({error.strerror}), "
                    "which files are published with so that none is overwritten; name an object "
                    "store by its URL, such as s3://, not by the path it is mounted at",
                ) from error
        finally:
            one.unlink(missing_ok=True)
            other.unlink(missing_ok=True)

    def put(self, path: str, pieces: FileContent, replace: bool) -> None:
        """Write one file, which appears at once."""
        with self._parent(path) as final, _unfinished(final.parent) as unfinished:
            _write(unfinished, pieces)
            if replace:
                os.replace(unfinished, final)
            else:
                # Unlike a rename it fails where there is a file.
                os.link(unfinished, final, follow_symlinks=False)
                unfinished.unlink()
            self._sync_or_remove(final)

    def put_folder(self, path: str, files: Mapping[str, FileContent], replace: bool) -> None:
        """Write several files, whose folder appears at once."""
        with self._parent(path) as final, _unfinished(final.parent) as unfinished:
            unfinished.mkdir()
            with _opened(unfinished) as inside:
                for name, pieces in files.items():
                    _write(inside / name, pieces)
                _sync(inside)
            while not _move_folder(unfinished, final):
                if not replace:
                    raise FileExistsError(path)
                with _unfinished(final.parent) as old, contextlib.suppress(FileNotFoundError):
                    os.rename(final, old)
            self._sync_or_remove(final)

    def remove(self, path: str) -> None:
        """Remove a file or folder; one that is not there is no error."""
        with self._parent(path) as final:
            _remove(final)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[Path]:
        """Make and open the folder of a path below the root; gives the path as it is found there,
        whatever becomes of the names above it."""
        *folders, name = path.split("/")
        place = Path(self.root)
        self._make_folder(place)
        with contextlib.ExitStack() as opened:
            for depth, folder in enumerate(folders, start=1):
                self._make_folder(place / folder, "/".join(folders[:depth]))
                place = opened.enter_context(_opened(place / folder))
            yield place / name

    def _make_folder(self, folder: Path, known_as: str = "") -> None:
        """Make a folder, also if somebody removed it meanwhile; its entry is durable, too."""
        known_as = known_as or str(folder)
        if known_as in self._durable and folder.is_dir():
            return
        if not folder.parent.is_dir():
            self._make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError as error:  # which would else be taken for a request's name
            reason = "is a file where a folder must be"
            raise NotADirectoryError(errno.ENOTDIR, reason, str(folder)) from error
        _sync(folder.parent)
        self._durable.add(known_as)

    def _sync_or_remove(self, final: Path) -> None:
        try:
            _sync(final.parent)
        except OSError:
            _remove(final)
            raise


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """Open a folder; the path that is given out means it for as long as it is open.

    Raises:
        NotADirectoryError: it is a symbolic link, or no folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Give out a temporary path in a folder, and remove what is there at the end."""
    path = _temporary(folder)
    try:
        yield path
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _remove(final: Path) -> None:
    if final.is_dir() and not final.is_symlink():
        # Its name first: what is left of a folder must not look like a request.
        with _unfinished(final.parent) as unfinished:
            os.rename(final, unfinished)
    else:
        final.unlink(missing_ok=True)


def _move_folder(source: Path, target: Path) -> bool:
    """Rename a folder; return False where `target` is taken."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _temporary(folder: Path) -> Path:
    return folder / f".{uuid.uuid4().hex}.tmp"


def _write(path: Path, pieces: FileContent) -> None:
    """Write and sync a new file, in few calls that let go of the interpreter and buffer nothing."""
    left = [memoryview(piece) for piece in pieces]
    with open(path, "xb", buffering=0) as file:
        at = 0
        while at < len(left):
            written = os.writev(file.fileno(), left[at : at + _MOST_PIECES])
            while at < len(left) and written >= len(left[at]):
                written -= len(left[at])
                at += 1
            if written:  # a part of the next one
                left[at] = left[at][written:]
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStore(Store):
    """A folder in an object store, which writes each file whole or not at all.

    Where nothing may be replaced the store is asked to refuse (S3's If-None-Match, and what fsspec
    makes of it elsewhere; a file system of fsspec that has no such thing looks first). Threads of
    this process are told apart here in any case.
    """

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        super().__init__(fs, root)
        self._lock = threading.Lock()
        self._claimed: set[str] = set()

    def put(self, path: str, pieces: FileContent, replace: bool) -> None:
        """Write one file."""
        with contextlib.nullcontext() if replace else self._claim(path):
            self._put(path, pieces, replace)

    def put_folder(self, path: str, files: Mapping[str, FileContent], replace: bool) -> None:
        """Write several files one by one, and remove what else is in their folder."""
        # Also where it replaces: two at once would mix their files.
        with self._claim(path):
            old = self.names(path)
            if old and not replace:
                raise FileExistsError(path)
            written = []
            try:
                for name, pieces in files.items():
                    self._put(f"{path}/{name}", pieces, replace)
                    written.append(name)
            except BaseException:
                for name in written:
                    with contextlib.suppress(Exception):
                        self.remove(f"{path}/{name}")
                raise
            for name in set(old) - files.keys():
                self.remove(f"{path}/{name}")

    def remove(self, path: str) -> None:
        """Remove a file or folder; one that is not there is no error."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.full(path), recursive=True)

    def _put(self, path: str, pieces: FileContent, replace: bool) -> None:
        # bytes.join lets go of the GIL.
        data = b"".join(pieces)
        self.fs.pipe_file(self.full(path), data, mode="overwrite" if replace else "create")

    @contextlib.contextmanager
    def _claim(self, path: str) -> Iterator[None]:
        """Keep other threads from writing to the path meanwhile.

        Raises:
            FileExistsError: one is writing to it now.
        """
        with self._lock:
            if path in self._claimed:
                raise FileExistsError(f"{path} is being written by another request")
            self._claimed.add(path)
        try:
            yield
        finally:
            with self._lock:
                self._claimed.discard(path)
