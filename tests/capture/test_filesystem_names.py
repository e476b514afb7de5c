# SPDX-License-Identifier: Apache-2.0
"""Names that clients choose: no path leaves the root, and two different names are two files."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.stored import LAYOUTS, publish, request, started
from vllm.v1.capture import reader
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer, names

pytestmark = pytest.mark.quick

ANY = st.one_of(
    st.text(max_size=12),
    st.text("ab.-_/\\~0:~ A\0\n%", max_size=8),
    st.from_regex(r"[a-c0-2]([a-c0-2._-]{0,5}[a-c0-2])?(-[0-2]-[0-2])?", fullmatch=True),
    st.sampled_from(
        ["", ".", "..", "~", "/etc/x", "a/../b", "con", "a.safetensors", ".tmp", "_shards"]
    ),
)
COMPLETIONS = st.tuples(ANY, st.none() | st.integers(0, 2), st.integers(0, 2), st.integers(1, 3))


def accepted(field: str, value: Any) -> bool:
    try:
        FilesystemConsumer.check_request({field: value}, "capture.filesystem")
    except ValueError as error:
        assert str(error).startswith(f"capture.filesystem.{field}: ")
        return False
    return True


@given(ANY, st.sampled_from(["request_id", "tag"]))
@example("\u017f", "tag")
@example("\u212a", "tag")
@example("a\n", "request_id")
@example("é", "tag")
@example("\uff11", "request_id")
def test_an_accepted_name_is_one_plain_folder_name(value: str, field: str) -> None:
    if accepted(field, value):
        if field == "request_id":
            value = names.name_of(value)
        assert PurePosixPath("root", value).parts == ("root", value)
        assert os.path.normpath(f"/root/{value}") == f"/root/{value}"
        assert value.isascii() and value.isprintable() and len(value) <= 100
        assert names.is_published(value)
        assert value == value.lower(), "a store may take upper and lower case for the same"
        assert value[0].isalnum() and value[-1].isalnum()
        assert not value.endswith(".safetensors")


def test_names_people_use_are_accepted() -> None:
    for value in ("probe_0001", "mnist-probe-v1", "a", "7", "layer.12", "x" * 100, "cmpl-8f3a"):
        assert accepted("request_id", value) and accepted("tag", value)
    assert accepted("tag", "2026-11-21")
    assert names.name_of("2026.11.21") == "2026.11.21"
    ids: list[Any] = ["2026-11-21", "mmlu/abstract_algebra/12", "Run 1", "../x", 17]
    assert all(accepted("request_id", each) for each in ids)
    ids = ["", "x" * 513, True, 1.0, ["a"]]
    assert not any(accepted("request_id", each) for each in ids)


def published(stem: str, prompt: int | None, sample: int, several: int) -> str:
    name = names.name_of(stem)
    return (
        names.completion_name(name, prompt or 0, sample)
        if several > 1 or prompt is not None
        else name
    )


@given(COMPLETIONS, COMPLETIONS)
@example(("a-0-1", None, 0, 1), ("a", None, 1, 2))
@example(("A", None, 0, 1), ("a", None, 0, 1))
@example(("a/b", None, 0, 1), ("a-b", None, 0, 1))
def test_two_names_are_two_files(one: Any, other: Any) -> None:
    """Whether clients chose them or the engine did, one completion or several."""
    first, second = published(*one), published(*other)

    def identity(asked: Any) -> Any:
        stem, prompt, sample, several = asked
        alone = several == 1 and prompt is None
        return stem if alone else (stem, prompt or 0, sample)

    if identity(one) != identity(other):
        assert first.casefold() != second.casefold()
    else:
        # The engine's own ids and the same text from a client: the collision policy decides.
        assert first == second
    assert "/" not in first and not first.startswith((".", "_")) and len(first) < 200


@settings(max_examples=25)  # each syncs its files
@given(st.lists(st.tuples(ANY, ANY, st.sampled_from(LAYOUTS)), max_size=4))
def test_all_that_is_written_is_below_the_root(asked: list[tuple[str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "a", "root")
        expected = set()
        with started(str(root), on_collision="overwrite", flush_seconds=0) as consumer:
            for name, tag, layout in asked:
                try:
                    info = request(name, external_id=name, tag=tag, request_id=name, layout=layout)
                except ValueError:
                    # The engine's id is whatever a client sent; the published name is none of it.
                    info = request(name, external_id=name, layout=layout)
                payload, _ = publish(consumer, info)
                expected.add((payload["tag"], payload["request_id"], layout))
        assert os.listdir(folder) == ["a"] and os.listdir(root.parent) == ["root"]
        found = {(r.tag, r.name, r.layout) for r in reader.open(str(root))}
        assert found == expected


@pytest.mark.parametrize("engine_id", ["../../x", "cmpl-\ud800-1", "A" * 5000, "x-0-12345678"])
def test_an_engine_id_that_is_no_name(tmp_path: Path, engine_id: str) -> None:
    """It is kept in the metadata, and the name is made of its digest."""
    for layout in LAYOUTS:
        with started(str(tmp_path / layout), layout=layout) as consumer:
            payload, _ = publish(consumer, request(engine_id, external_id=engine_id))
        [stored] = reader.open(str(tmp_path / layout))
        assert stored.name == payload["request_id"] == names.name_of(engine_id)
        assert re.fullmatch(r"[a-z0-9_-]{1,60}--[0-9a-f]{32}", stored.name)
        assert stored.external_id == engine_id.encode("utf-8", "backslashreplace").decode()
