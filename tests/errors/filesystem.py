# SPDX-License-Identifier: Apache-2.0
"""What is refused of requests to the filesystem consumer."""

from __future__ import annotations

from typing import Any

from tests.errors.case import Case
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer


def asked(field: str, value: Any, **says: str) -> Case:
    path = "capture.filesystem"
    says = {"path": f"{path}.{field}", **says}
    return Case(says, do=lambda: FilesystemConsumer.check_request({field: value}, path))


FILESYSTEM = [
    asked("request_id", "../x", given="'../x'"),
    asked("tag", "Probe", given="'Probe'"),
    asked("tag", 5, given="5"),
    asked("request_id", "a--b", given="'a--b'", forbidden="'--'"),
    asked("tag", "a.safetensors.b", given="'a.safetensors.b'", forbidden="'.safetensors'"),
    asked("request_id", "run-3-1", given="'run-3-1'"),
    asked("layout", "zip", given="'zip'", allowed="per_file, packed, sharded"),
    Case(
        {"given": "['id']"}, do=lambda: FilesystemConsumer.check_request({"id": "x"}, "capture.f")
    ),
]
