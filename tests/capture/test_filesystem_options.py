# SPDX-License-Identifier: Apache-2.0
"""The filesystem consumer's options and the fields of its requests: which there are, and which are
refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.stored import publish, request, started
from vllm.v1.capture.consumers.filesystem import FilesystemCaptureRequest, FilesystemConsumer

pytestmark = pytest.mark.quick

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"root": ""}, "root: must be a path or URL"),
    ({"root": "nonsense://x"}, "root: 'nonsense://x' cannot be opened"),
    ({"layout": "flat"}, "layout: must be one of per_file, packed, sharded, ehs, got 'flat'"),
    ({"on_collision": "ignore"}, "on_collision: must be one of error, overwrite, suffix"),
    ({"shard_max_bytes": "lots"}, "shard_max_bytes: must be a number from 1 to"),
    ({"shard_max_bytes": "0"}, "shard_max_bytes: must be a number"),
    ({"shard_max_bytes": True}, "shard_max_bytes: must be a number"),
    ({"flush_seconds": "-1"}, "flush_seconds: must be a number from 0 to 3600, got '-1'"),
    ({"flush_seconds": "nan"}, "flush_seconds: must be a number"),
    ({"storage_options": "anon"}, "storage_options: must be a dict"),
    ({"hidden_states_path": "yes"}, "hidden_states_path: must be true or false, got 'yes'"),
    ({"hidden_states_path": True}, "needs layout=ehs and a local root, got layout=packed"),
    (
        {"hidden_states_path": "true", "layout": "ehs", "root": "memory://acts"},
        "local root, got layout=ehs and 'memory://acts'",
    ),
]


@pytest.mark.parametrize("options, message", BAD_OPTIONS)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        FilesystemConsumer(**({"root": "/nowhere"} | options))
    assert message in str(raised.value)


def test_options_of_a_command_line(tmp_path: Path) -> None:
    from vllm.v1.capture.registry import parse_consumers

    text = f"filesystem:root={tmp_path}/x,layout=sharded,shard_max_bytes=1000,flush_seconds=0"
    [spec] = parse_consumers([text]).values()
    assert not spec.in_frontend
    consumer = spec.make()
    assert isinstance(consumer, FilesystemConsumer)
    assert not (tmp_path / "x").exists(), "nothing is touched before it starts"


def test_a_root_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), started(str(tmp_path / "file" / "root")):
        pass


def test_a_file_system_without_links_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="without hard links"), started(str(tmp_path)):
        pass
    assert os.listdir(tmp_path) == []


def test_a_request_in_python_is_the_dict_of_its_fields() -> None:
    hooks = {"post_block": [12]}
    made = FilesystemCaptureRequest(request_id="probe_0001", tag="mnist-probe-v1", hooks=hooks)
    fields = {"hooks": hooks, "positions": "last_prompt", "request_id": "probe_0001"}
    assert dict(made) == fields | {"tag": "mnist-probe-v1"} == made
    assert made != fields
    assert len(made) == 4 and "layout" not in made and made.get("tag") == "mnist-probe-v1"
    with pytest.raises(KeyError):
        made["layout"]
    with pytest.raises(KeyError):
        made["__class__"]
    with pytest.raises(AttributeError):
        made.tag = "x"  # type: ignore[misc]


def test_the_request_is_cheap_to_import() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from vllm.v1.capture.consumers.filesystem import FilesystemCaptureRequest; "
        "from vllm.v1.capture import reader; "
        "print([m for m in ('vllm.entrypoints.llm', 'vllm.config', 'transformers', 's3fs') "
        "if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def spread(check: Callable[[dict[str, Any], str], dict[str, Any]], **fields: Any) -> Any:
    return check(fields, "capture.filesystem")


def test_wrong_requests() -> None:
    check = FilesystemConsumer.check_request
    assert spread(check, request_id=None, tag="T".lower()) == {"tag": "t"}
    for fields, message in (
        ({"request_id": ""}, "capture.filesystem.request_id: '' is not an id: use 1 to"),
        ({"request_id": 3.0}, "capture.filesystem.request_id: 3.0 is not an id"),
        ({"tag": "a--b"}, "tag: 'a--b' may not contain '--'"),
        ({"tag": "a.safetensors.b"}, "may not contain '.safetensors'"),
        ({"metadata": [1]}, "capture.filesystem.metadata: must be a mapping"),
        ({"tag": "Probe"}, "capture.filesystem.tag: 'Probe' is not a name"),
        ({"tag": "x" * 101}, "capture.filesystem.tag: "),
        (
            {"layout": "zip"},
            "capture.filesystem.layout: unknown layout 'zip'; layouts are per_file",
        ),
        ({"layout": ["packed"]}, "capture.filesystem.layout: unknown layout list"),
        (
            {"prompt": 1},
            "capture.filesystem: unknown keys ['prompt'], allowed are hooks, lane, positions",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            check(fields, "capture.filesystem")
        assert message in str(raised.value)
    assert spread(check, tag="2026-11-21") == {"tag": "2026-11-21"}


@pytest.mark.parametrize(("given", "says"), [("true", True), (True, True), ("false", False)])
def test_the_path_of_a_file(tmp_path: Path, given: Any, says: bool) -> None:
    """Only where it is asked for, as clients see a path of the server; in one layout alone."""
    with started(str(tmp_path), layout="ehs", hidden_states_path=given) as consumer:
        payload, _ = publish(consumer, request(request_id="one"))
        other, _ = publish(consumer, request(request_id="two", layout="packed"))
    assert ("hidden_states_path" in payload) == says
    assert "hidden_states_path" not in other
    if says:
        assert payload["hidden_states_path"] == str(tmp_path / payload["paths"][0])
