# SPDX-License-Identifier: Apache-2.0
"""What is refused of data sets, and what ends a run over one."""

from __future__ import annotations

import errno
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from tests.errors.case import Case
from vllm.entrypoints.cli.capture.run import need_names, parse_hooks, parse_json
from vllm.pilot import dataset
from vllm.pilot.dataset.shard_store import Shard, ShardStore
from vllm.v1.capture import CaptureResult
from vllm.v1.capture.results import CapturedRows, SiteRows

if TYPE_CHECKING:
    from vllm import LLM

ONE = np.zeros(1, np.int64)
ROWS = SiteRows([("post_block", 0)], lambda site: CapturedRows(ONE, ONE, torch.zeros(1, 4), ONE))
PLAN = {"data": {"examples": 3}, "max_tokens": 1}


def reading(name: str, content: bytes | None, **columns: str) -> Callable[[], object]:
    """Read a file of that name, in a folder of its own that is gone afterwards."""

    def do() -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            if content is not None:
                path.write_bytes(content)
            return dataset.DataFile(str(path), **columns).contents()

    return do


def line(text: str, **columns: str) -> Callable[[], object]:
    return reading("d.jsonl", text.encode(), **columns)


def saved(name: str, content: str) -> Callable[[], object]:
    """Read a folder with one file of `datasets.save_to_disk`."""

    def do() -> object:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_text(content)
            return dataset.DataFile(folder).contents()

    return do


def labelled() -> object:
    with tempfile.TemporaryDirectory() as folder:
        table = pyarrow.table({"text": ["a"], "label": [pyarrow.scalar(1, pyarrow.date32())]})
        pyarrow.parquet.write_table(table, f"{folder}/d.parquet")
        return dataset.DataFile(f"{folder}/d.parquet").contents()


def without_pyarrow() -> object:
    with mock.patch.dict(sys.modules, {"pyarrow": None}):
        return reading("d.parquet", b"PAR1")()


def stored(do: Callable[[ShardStore], object], *shards: Shard) -> Callable[[], object]:
    """Do something with a store that has these shards, empty ones."""

    def inside() -> object:
        with tempfile.TemporaryDirectory() as folder:
            store = ShardStore(folder)
            store.begin(PLAN)
            for shard in shards:
                (Path(folder) / shard.name).write_bytes(b"")
            return do(store)

    return inside


def unbegun(store: ShardStore) -> None:
    Path(store.root, "dataset.json").unlink()
    store.check(PLAN)


def twice(store: ShardStore) -> None:
    with store.locked(), ShardStore(store.root).locked():
        pass


def unlabelled(store: ShardStore) -> object:
    rows = mock.Mock(_activations=SimpleNamespace(root="acts"), _labels={2: None})
    rows.column.return_value = SimpleNamespace(tolist=lambda: [2])
    return dataset.Rows.labels(rows)


def running(step: Any = None, refuses: str = "", **more: Any) -> Callable[[], object]:
    """Capture one example with an engine that does what it is told to."""

    def enqueue(prompts: object, params: object, use_tqdm: bool) -> list[str]:
        if refuses:
            raise ValueError(refuses)
        return ["0-abc"]

    config = SimpleNamespace(
        model="m", revision=None, tokenizer="m", dtype="float32", quantization=None
    )
    engine = SimpleNamespace(step=step, abort_request=lambda ids, internal: None)
    llm: Any = SimpleNamespace(enqueue=enqueue, llm_engine=engine, model_config=config)

    def do() -> object:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "d.jsonl"
            data.write_text(json.dumps({"text": "a"}))
            hooks = {"post_block": "all"}
            return dataset.capture(llm, dataset.DataFile(str(data)), f"{folder}/out", hooks, **more)

    return do


def answering(result: CaptureResult) -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    def step() -> list[RequestOutput]:
        completion = CompletionOutput(0, "", [1], None, None, capture_results={"inline": result})
        return [RequestOutput("0", "a", [1], None, [completion], True)]

    return step


def feeding(address: str = "ipc:///tmp/rows", **more: Any) -> Callable[[], object]:
    """Start to feed a trainer."""
    data, llm = dataset.DataFile("d.jsonl"), cast("LLM", SimpleNamespace())
    return lambda: dataset.feed(llm, data, address, "post_block", 1, **more)


def unanswered() -> object:
    """A trainer without an engine."""
    with mock.patch("vllm.pilot.dataset.trainer.streaming.RETRY_SECONDS", 0.01):
        return next(dataset.stream("ipc:///tmp/nobody-is-here", patience=0))


def answered(reply: bytes) -> object:
    """A trainer whose engine says something."""
    rows = dataset.stream("ipc:///tmp/a")
    with mock.patch.object(rows, "_answer", return_value=[reply]):
        return next(rows)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def lost() -> object:
    """A cluster that does nothing."""
    from vllm.pilot.dataset import capture_on_ray

    ray = mock.MagicMock()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(sys.modules, {"ray": ray, "ray.data": ray.data}),
    ):
        data = Path(folder) / "d.jsonl"
        data.write_text(json.dumps({"text": "a"}))
        asked = dataset.DataFile(str(data)), f"{folder}/out", {"post_block": "all"}
        return capture_on_ray({"model": "m"}, *asked, workers=1)


def says(**named: str) -> dict[str, str]:
    return named


DATASETS = [
    Case(says(), do=reading("x.jsonl", None)),
    Case(says(), do=line("")),
    Case(says(given=".txt"), do=reading("d.txt", b"a")),
    Case(says(), do=saved("a.txt", "")),
    Case(says(allowed="a, b"), do=saved("dataset_dict.json", '{"splits": ["a", "b"]}')),
    Case(says(), do=saved("state.json", '{"_data_files": [], "_indices_data_files": [{}]}')),
    Case(says(), do=without_pyarrow),
    Case(says(), do=reading("d.parquet", b"PAR1")),
    Case(says(), do=reading("d.jsonl", b'"\xff"')),
    Case(says(), do=line('{"text"')),
    Case(says(), do=line("[1]")),
    Case(says(), do=reading("d.csv", b'text\n"a"b\n')),
    Case(says(given="2", allowed="1"), do=reading("d.csv", b"text\na,b\n")),
    Case(says(given="'q'", allowed="text"), do=line('{"text": "a"}', prompt_column="q")),
    Case(says(allowed="q"), do=line('{"q": "a"}')),
    Case(says(given="float"), do=line('{"text": 1.5}')),
    Case(says(), do=line('{"text": ""}')),
    Case(says(), do=line('{"text": [{"role": "user"}]}')),
    Case(says(given="list"), do=line('{"text": "a", "id": []}')),
    Case(says(), do=labelled),
    Case(
        says(given="max_tokens was 1, is 2"),
        do=stored(lambda store: store.check({**PLAN, "max_tokens": 2}), Shard(0, 3)),
    ),
    Case(says(), do=stored(unbegun, Shard(0, 3))),
    Case(says(), do=lambda: dataset.Activations(tempfile.gettempdir() + "/nothing-here")),
    Case(says(), do=stored(twice)),
    Case(
        says(given=Shard(0, 3).name, other=Shard(2, 4).name),
        do=stored(lambda store: store.shards(), Shard(0, 3), Shard(2, 4)),
    ),
    Case(says(given="2"), do=stored(unlabelled)),
    Case(says(reason="too long", done="0", total="1"), do=running(refuses="too long")),
    Case(
        says(given="1", reason="refused: too long", shards="0"),
        do=running(refuses="too long", skip_refused=True),
    ),
    Case(
        says(reason="gone", done="0"), do=running(answering(CaptureResult("error", "gone", None)))
    ),
    Case(says(given="free some space"), do=running(full)),
    Case(
        says(total="1"),
        do=running(answering(CaptureResult("ok", None, ROWS)), confirm=lambda told: False),
    ),
    Case(says(given="1"), do=lost),
    Case(says(given="'http://a'"), do=lambda: dataset.stream("http://a")),
    Case(says(given="'a'"), do=feeding("a")),
    Case(says(), do=lambda: dataset.stream("ipc:///tmp/a", {"plan": "p", "next": [1]})),
    Case(says(given="9", allowed="4"), do=feeding(batch_rows=4, buffer_rows=9)),
    Case(says(given="0"), do=feeding(epochs=0)),
    Case(says(address="ipc:///tmp/nobody-is-here", given="0"), do=unanswered),
    Case(
        says(address="ipc:///tmp/a", reason="state is of other data"),
        do=lambda: answered(b'{"refused": "state is of other data"}'),
    ),
    Case(says(given="'post_block'"), do=lambda: parse_hooks(["post_block"])),
    Case(says(given="q"), do=lambda: parse_hooks(["q:1", "q:2"])),
    Case(says(given="'post_blok'"), do=lambda: need_names({"post_blok": "all"}, "last_prompt")),
    Case(says(given="'last'"), do=lambda: need_names({"q": "all"}, "last")),
    Case(says(option="--positions", given="'[0,'"), do=lambda: parse_json("--positions", "[0,")),
]
