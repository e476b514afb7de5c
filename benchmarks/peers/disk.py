# SPDX-License-Identifier: Apache-2.0
"""What a disk takes by itself, when files like those of a consumer are written by plain threads."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PIECE = 16 << 20
_POOL = 64 << 20
_APART, _STEP = 1_000_003, 4099
"""Distance in the random bytes at which two files begin, and two pieces of a file: odd, so that no
two blocks are alike."""


class Disk:
    """The disk of a folder, which it owns: what is in there is removed."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder, self._threads = folder, threads
        self._data = memoryview(os.urandom(_POOL))

    def clear(self) -> list[int]:
        """Remove all files and wait for the disk; return what their sizes were."""
        sizes = [path.stat().st_size for path in self._folder.rglob("*") if path.is_file()]
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        return sizes

    def seconds(self, sizes: Sequence[int]) -> float:
        """Time that files of these sizes take, each synced. They are removed afterwards."""
        folder = self._folder / "alone"
        folder.mkdir()
        with ThreadPoolExecutor(self._threads) as pool:
            started = time.perf_counter()
            written = [
                pool.submit(self._write, folder / str(n), n, size)
                for n, size in enumerate(sorted(sizes, reverse=True))
            ]
            for future in written:
                future.result()
            seconds = time.perf_counter() - started
        self.clear()
        return seconds

    def _write(self, path: Path, number: int, size: int) -> None:
        begin = number * _APART
        with open(path, "xb", buffering=0) as file:
            while size:
                begin = (begin + _STEP) % (_POOL - _PIECE)
                size -= file.write(self._data[begin : begin + min(size, _PIECE)]) or 0
            os.fsync(file.fileno())


def filesystem_of(path: Path) -> str:
    """The kind of filesystem that `path` is on: "ext4", "tmpfs"."""
    path = path.resolve()
    mounts = (line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    found = [
        (len(place), number, kind)  # of two at one place the later one is seen
        for number, (place, kind) in enumerate(mounts)
        if path.is_relative_to(place)
    ]
    return max(found)[2]
