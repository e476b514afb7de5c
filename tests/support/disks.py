# SPDX-License-Identifier: Apache-2.0
"""Small disks, to be filled up."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """Whether `folder`, made where it is missing, is a disk of this size within: only root may
    mount one.

    Args:
        size: as tmpfs takes it, such as "256k".
    """
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = not os.geteuid() and not subprocess.run(mount, capture_output=True).returncode
    yield mounted
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within, a file that grows beyond `size` bytes is an OSError as of a full disk: anybody may
    have that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
