# SPDX-License-Identifier: Apache-2.0
"""Processes of checks on a GPU host, which leave none of its memory taken. Imports no vllm: a
process sets its environment up first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any


class Processes:
    """The modes' processes that run now, each the leader of a session in which its workers are."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[str, str]:
        """What it prints, and to stderr. All of its session is gone afterwards."""
        with self._lock:
            if self._ended:
                raise RuntimeError("no mode is to start any more")
            process = subprocess.Popen(
                command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            return process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)  # the workers too, which hold the pipes
            output, errors = process.communicate()
            return output, f"{errors}\nstopped after {timeout} s"
        finally:
            kill(process)
            with self._lock:
                self._running.remove(process)

    def checks(
        self, command: list[str], env: dict[str, str], timeout: float, last: str
    ) -> list[dict[str, Any]]:
        """What a mode prints, a JSON object a check; one more, that failed, if `last` lacks.

        Args:
            command: it ends with the mode's name.
        """
        output, errors = self.run(command, env, timeout)
        rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"mode"')]
        if not rows or rows[-1]["check"] != last:
            log = {"ok": False, "log": errors[-8000:]}
            rows.append({"mode": command[-1], "check": "all checks", **log})
        return rows

    def end(self) -> None:
        """Kill all; none starts afterwards."""
        with self._lock:
            self._ended = True
            for process in self._running:
                kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def show(row: dict[str, Any]) -> bool:
    """Print a check's outcome; whether it is good."""
    values = {k: v for k, v in row.items() if k not in ("mode", "check", "ok", "log")}
    shown = ", ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()
    )
    print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['mode']:20} {row['check']:22} {shown}")
    print(row.get("log", ""), end="", flush=True)
    return bool(row["ok"])


def all_good(processes: Processes, modes: Sequence[Callable[[], list[Any]]], jobs: int) -> bool:
    """Run the modes and print their checks as they end; whether all are good. What runs is killed
    where this is ended."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [pool.submit(mode) for mode in modes]
            return all([show(row) for done in as_completed(futures) for row in done.result()])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            raise
