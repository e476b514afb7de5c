# SPDX-License-Identifier: Apache-2.0
"""Processes that find vLLM imported: cores, workers, servers and programs start in a moment.

A process that is spawned imports vLLM for ten seconds, and a server is four of them, one after the
other. Here Python's fork server imports it once, and forks itself for each process. Otherwise such
a process is as a spawned one: it gets its work as a pickle, its starter's environment and output,
and no threads. It is not its starter's child, so what ends a family of processes does not find it;
and variables that are read when vLLM is imported are those of the first one.

What users start is tested, too: by the server of `tests/http`, the README's program, and in the
tier long.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from tests import ROOT

IMPORTED = "tests.support.warm_imports"


class _Streams:
    """Standard output and error of the process that pickles it, for the one that unpickles it."""

    def __init__(self, *passed: Any) -> None:
        self.passed = passed

    def __reduce__(self) -> tuple[type[_Streams], tuple[Any, ...]]:
        return _Streams, (reduction.DupFd(1), reduction.DupFd(2))

    def use(self) -> None:
        """Have this process write there."""
        for stream, passed in enumerate(self.passed, 1):
            given = passed.detach()
            os.dup2(given, stream)
            os.close(given)


class _Process(ForkServerProcess):
    """A process with the environment and the output that its starter has then, as if spawned."""

    environment: dict[str, str]
    streams: _Streams

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        process_obj.environment = dict(os.environ)
        process_obj.streams = _Streams()
        return ForkServerProcess._Popen(process_obj)

    def run(self) -> None:
        """Do its work."""
        self.streams.use()
        _use(self.environment)
        # It has the address of the server that forked it; CPython would start another one.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def context() -> ForkServerContext:
    """What makes processes that find vLLM imported."""
    made = _Context()
    made.set_forkserver_preload([IMPORTED])
    return made


def start_warm() -> None:
    """Have engines of this process fork their cores and workers where they would spawn them."""
    from vllm.utils import system_utils

    made = {"spawn": context(), "fork": multiprocessing.get_context("fork")}
    system_utils.multiprocessing = SimpleNamespace(get_context=made.__getitem__)  # type: ignore[assignment]


class Running(Protocol):
    """The part of `subprocess.Popen` that servers need."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Warm:
    """`python -m MODULE ARGUMENTS` in a process that finds vLLM imported.

    Args:
        out: the file that it writes to.
        errors: the file for its standard error.
        env: all of its environment.
        folder: where it works.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        out: Path,
        errors: Path,
        env: Mapping[str, str],
        folder: Path,
    ) -> None:
        work = (module, list(arguments), str(out), str(errors), dict(env), str(folder))
        self.process = context().Process(target=_run, args=work)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """That status, when it is there.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self.process.join(timeout)
        status = self.process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def run(
    module: str, *arguments: str, env: Mapping[str, str], folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """What `python -m MODULE ARGUMENTS` printed, and its status, as `subprocess.run` says it.

    Args:
        env: all of its environment.
        folder: where it works.
    """
    with tempfile.TemporaryDirectory() as temporary:
        out, errors = Path(temporary) / "out", Path(temporary) / "errors"
        status = Warm(module, arguments, out, errors, env, folder).wait()
        said = out.read_text(), errors.read_text()
    return subprocess.CompletedProcess([module, *arguments], status, *said)


def _run(
    module: str, arguments: list[str], out: str, errors: str, env: dict[str, str], folder: str
) -> None:
    """In the new process."""
    _use(env)
    os.chdir(folder)
    for stream, name in enumerate((out, errors), 1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, stream)
        os.close(file)
    given = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [folder, *given]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # as Python ends, and multiprocessing would not: engines end their processes
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _use(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
