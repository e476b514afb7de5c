# SPDX-License-Identifier: Apache-2.0
"""The commands and programs of docs/http.md and of the README, against a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.conformance.models import HIDDEN
from tests.http.server import KEY, Server

pytestmark = pytest.mark.full

PLACE = "http://localhost:8000"
LINES = 'curl() { command curl "$@"; echo; }\n'


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: list[str], program: str, server: Server, folder: Path = ROOT) -> str:
    environment = os.environ | {"VLLM_STEERING_API_KEY": KEY}
    done = subprocess.run(
        command, input=program.replace(PLACE, server.url), env=environment, cwd=folder,
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def fitted(program: str) -> str:
    """The examples have vectors of a model with a hidden size of 4."""
    wide = "AACAPwAAAAAAAAAAAAAAAA=="
    assert HIDDEN % 3 == 0
    ones = "AACAPwAAgD8AAIA/" * (HIDDEN // 3)
    return program.replace(wide, ones).replace('"shape": [1, 4]', f'"shape": [1, {HIDDEN}]')


def curls(document: str) -> list[str]:
    return [block for block in blocks(document, "sh") if PLACE in block]


@pytest.mark.parametrize("document", ["docs/http.md", "README.md"])
def test_curl(server: Server, document: str) -> None:
    """No command is refused, and each has an answer."""
    assert curls(document)
    for block in curls(document):
        answers = run(["sh", "-e"], LINES + fitted(block), server).splitlines()
        assert len(answers) == block.count("curl ")
        for answer in answers:
            assert "error" not in json.loads(answer), answer


def test_capture_by_curl_has_rows(server: Server) -> None:
    [command] = [c for c in curls("docs/http.md") if "capture" in c]
    assert '"status":"ok"' in run(["sh"], command, server)


def test_programs(server: Server) -> None:
    by_openai, by_ours = blocks("docs/http.md", "python")
    steered = run([sys.executable, "-"], by_openai, server)
    plain = run([sys.executable, "-"], by_openai.replace('"scale": 0.5', '"scale": 0.0'), server)
    assert steered.startswith("ok ") and plain.startswith("ok ")
    assert steered != plain, steered
    printed = run([sys.executable, "-"], by_ours, server)
    said = dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)
    assert said.keys() >= {"plain", "steered", "chat", "version"}
    assert said["chat"].endswith("{'inline': 'ok'}")


def test_programs_fail_where_the_server_refuses(server: Server) -> None:
    """The twin."""
    [command] = [c for c in curls("docs/http.md") if "capture" in c]
    refused = run(["sh"], command.replace("post_block", "mlp"), server)
    assert '"error":{' in refused


def test_the_cookbooks_client(server: Server, tmp_path: Path) -> None:
    program = blocks("docs/cookbook.md", "python")[-1]
    assert run([sys.executable, "-"], program, server, tmp_path) == "rows 16\n"
    assert (tmp_path / "cookbook-http.png").stat().st_size > 1000
