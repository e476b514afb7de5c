# SPDX-License-Identifier: Apache-2.0
"""A server that speaks S3, with moto behind it, in a process of its own.

Flask must not be imported where an engine starts: upstream's kernel dispatcher looks at the globals
of all modules, and Flask's refuse to be looked at outside of a request.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from tests import ROOT


class S3Server:
    """May go away and come back, at the same port and with what it had."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = self._tell("start")

    def stop(self) -> None:
        self._tell("stop")

    def start(self) -> None:
        self._tell("start")

    def _tell(self, word: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec."""
        return {"endpoint_url": f"http://127.0.0.1:{self.port}", "key": "a", "secret": "b"}


@contextmanager
def s3_server(bucket: str) -> Iterator[S3Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3_server"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        server = S3Server(process)
        fsspec.filesystem("s3", **server.options).mkdir(bucket)
        yield server
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Starts and stops as it is told on standard input; says its port."""
    from moto.server import ThreadedMotoServer

    port, server = 0, None
    for line in sys.stdin:
        if line.strip() == "start":
            server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
            server.start()
            port = server.get_host_and_port()[1]
        elif server is not None:
            server.stop()
        print(port, flush=True)


if __name__ == "__main__":
    main()
