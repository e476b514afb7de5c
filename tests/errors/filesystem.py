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
    asked("request_id", "", given="''"),
    asked("request_id", True, given="True"),
    asked("tag", "Probe", given="'Probe'"),
    asked("tag", 5, given="5"),
    asked("tag", "a--b", given="'a--b'", forbidden="'--'"),
    asked("tag", "a.safetensors.b", given="'a.safetensors.b'", forbidden="'.safetensors'"),
    asked("metadata", "label", given="'label'"),
    asked("metadata", {"at": object()}, given="it has a object"),
    asked("metadata", {"x": float("nan")}),
    asked("metadata", {"x": "y" * (1 << 14)}, given="16393", allowed="16384"),
    asked("layout", "zip", given="'zip'", allowed="per_file, packed, sharded, ehs"),
    asked("dtype", "int4", given="'int4'", allowed="int8, float8"),
    Case(
        {"given": "['id']"}, do=lambda: FilesystemConsumer.check_request({"id": "x"}, "capture.f")
    ),
]
