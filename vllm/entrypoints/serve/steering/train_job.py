# SPDX-License-Identifier: Apache-2.0
"""A training that a server runs beside its engine: `vllm steering train`, in a process and a folder
of its own."""

import asyncio
import base64
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from vllm.v1.interventions.parent import end_with_parent

State = Literal["running", "done", "failed", "cancelled"]

NAME = "trained"
"""The folder of the result within the job's own; no client says where something is written."""
NICE = 10
"""Niceness of the training: it stands back behind the engine for the CPU."""
KEPT_LINES = 200
"""Lines of what the training says that are kept, the last ones."""
KEPT_BYTES = 1 << 16
HELD, NO_BETTER = 0, 3
"""Exit statuses of `vllm steering train` that leave a report."""


class TrainJob:
    """One training, from its start to what it leaves.

    Args:
        model: the checkpoint that the engine serves.
        pairs: what `Pairs` reads: `{"prompt", "positive", "negative"}` each.
        options: further options of `vllm steering train`.
    """

    def __init__(self, model: str, pairs: Sequence[Any], options: Sequence[str]) -> None:
        self.state: State = "running"
        self.report: dict[str, Any] | None = None
        self.vector: bytes | None = None
        self._said: list[str] | None = None
        self._folder = TemporaryDirectory(prefix="vllm-steering-train-")
        folder = Path(self._folder.name)
        data, self._out, self._log = folder / "pairs.json", folder / NAME, folder / "log"
        data.write_text(json.dumps(pairs))
        self._log.touch()
        arguments = ["steering", "train", model, "--data", str(data), "--out", str(self._out)]
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_command, args=([*arguments, *options], str(self._log)), daemon=True
        )
        self._process.start()
        self._end = asyncio.create_task(self._ended())

    @property
    def said(self) -> list[str]:
        """The last lines that the training printed. Call it on the event loop, which removes the
        folder."""
        return last_lines(self._log) if self._said is None else self._said

    async def cancel(self) -> None:
        """End the training, if it runs; what it has made is dropped."""
        if self.state == "running":
            self.state = "cancelled"
            self._process.kill()
        await asyncio.shield(self._end)

    async def _ended(self) -> None:
        await asyncio.to_thread(self._process.join)
        try:
            await asyncio.to_thread(self._read)
        finally:
            self._folder.cleanup()

    def _read(self) -> None:
        """Take up what there is, ahead of the folder's end."""
        self._said = last_lines(self._log)
        if self.state == "cancelled":
            return
        if self._process.exitcode not in (HELD, NO_BETTER):
            self.state = "failed"
            return
        report = json.loads((self._out / "report.json").read_text())
        del report["command"]  # its folder is gone
        self.report = report
        vector = self._out / f"{NAME}.safetensors"
        self.vector = vector.read_bytes() if vector.exists() else None
        self.state = "done"

    def told(self) -> dict[str, Any]:
        """The job as JSON: `state`, `said`, `report` (null until it is done) and `safetensors`, the
        vector's file in base64 (null where there is no result)."""
        file = None if self.vector is None else base64.b64encode(self.vector).decode()
        return {"state": self.state, "said": self.said, "report": self.report, "safetensors": file}


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a file, at most `KEPT_LINES` and `KEPT_BYTES`."""
    with log.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - KEPT_BYTES))
        return opened.read().decode(errors="replace").splitlines()[-KEPT_LINES:]


def run_command(arguments: Sequence[str], log: str) -> None:
    """Run `vllm` with arguments in this process, which is the training's own; never returns.

    Args:
        log: the file that what it prints goes to.
    """
    end_with_parent()
    os.nice(NICE)
    # The engine has the GPU's memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with open(log, "wb") as opened:
        for stream in (1, 2):
            os.dup2(opened.fileno(), stream)
    sys.argv = ["vllm", *arguments]
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
    sys.exit(HELD)
