# SPDX-License-Identifier: Apache-2.0
"""Data sets through a real engine: the rows that `llm.generate` captures, killed and continued, and
the command."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec.config
import pytest
import torch

from tests import ROOT
from tests.conformance.engine import engine
from tests.conformance.models import HIDDEN
from tests.http.server import save_model
from tests.support.s3_server import s3_server
from vllm import SamplingParams
from vllm.entrypoints.cli.capture.main import CaptureSubcommand
from vllm.inputs import TokensPrompt
from vllm.pilot import dataset
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from vllm import LLM, RequestOutput

pytestmark = pytest.mark.full

HOOKS = {"pre_attn": [0], "post_block": "all"}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "capture_consumers": ["inline"],
    "capture_points": ["pre_attn", "post_block", "z"],
}
ENGINE_OPTIONS = [
    "--enforce-eager", "--dtype=float32", "--max-model-len=96", "--max-num-seqs=16",
    "--block-size=32", "--kv-cache-memory-bytes=16777216", "--max-num-batched-tokens=256",
]  # fmt: skip
NUM = 60
RECORDS = [
    {"id": f"ex/{i}", "label": "even" if i % 2 == 0 else "odd", "text": f"{i} apples " + "x" * i}
    for i in range(NUM)
]


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_models, tmp_path_factory.mktemp("dataset") / "model")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with engine(model, **SETTINGS) as made:
        yield made


@pytest.fixture
def data(tmp_path: Path) -> dataset.DataFile:
    return write(tmp_path / "data.jsonl", RECORDS)


def write(path: Path, records: list[dict[str, Any]]) -> dataset.DataFile:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return dataset.DataFile(str(path))


def expected(llm: LLM, records: list[dict[str, Any]], positions: Any, max_tokens: int = 1) -> Any:
    """What `llm.generate` captures of each prompt at post_block 1."""
    asked = {"inline": {"hooks": HOOKS, "positions": positions}}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, capture=asked)
    outputs = llm.generate([record["text"] for record in records], params, use_tqdm=False)
    return [payload["post_block", 1] for payload in payloads(outputs)]


def payloads(outputs: list[RequestOutput]) -> list[Any]:
    """What `inline` returned."""
    results = [output.capture_results for output in outputs]
    assert all(results)
    return [result["inline"].payload for result in results if result is not None]


def need_rows(activations: dataset.Activations, reference: Any, tolerance: float = 1e-4) -> None:
    """All of them, in order; batches round differently."""
    rows = activations.rows("post_block", 1)
    assert activations.complete
    numbers = [i for i, each in enumerate(reference) for _ in range(len(each))]
    assert rows.column("example").tolist() == numbers
    for name, attribute in (("position", "positions"), ("token_id", "token_ids")):
        found = [n for each in reference for n in getattr(each, attribute).tolist()]
        assert rows.column(name).tolist() == found
    values = torch.cat([each.values for each in reference])
    assert (rows.tensor() - values).norm() <= tolerance * values.norm()


def test_rows_ids_labels_and_tokens(
    llm: LLM, data: dataset.DataFile, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[dataset.Estimate] = []
    out = tmp_path / "acts"
    activations = dataset.capture(
        llm,
        data,
        out,
        HOOKS,
        {"start": 0, "step": 3},
        max_tokens=4,
        shard_bytes=20_000,
        confirm=lambda each: told.append(each) or True,  # type: ignore[func-returns-value]
    )
    reference = expected(llm, RECORDS, {"start": 0, "step": 3}, max_tokens=4)
    need_rows(activations, reference)
    assert len(activations.shards) > 3
    assert activations.sites[0] == ("pre_attn", 0)
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    tokenizer = llm.get_tokenizer()
    for record, line, rows in zip(RECORDS, lines, reference, strict=True):
        assert (line["id"], line["label"], line["error"]) == (record["id"], record["label"], None)
        assert line["place"] == f"{data.path}:{line['example'] + 1}"
        assert line["tokens"] == [tokenizer.decode([token]) for token in rows.token_ids]
    labels = activations.rows("post_block", 1).labels().tolist()
    assert labels == [
        r["label"] for r, rows in zip(RECORDS, reference, strict=True) for _ in rows.values
    ]
    # The twin: rows of other positions are other rows.
    with pytest.raises(AssertionError):
        need_rows(activations, expected(llm, RECORDS, {"start": 0, "step": 4}, max_tokens=4))
    size = sum(path.stat().st_size for path in out.iterdir())
    assert not told[0].exact and 0.8 < told[0].num_bytes / size < 1.2
    progress = capfd.readouterr().err
    assert "tokens/s" in progress and "iB/s" in progress and f"{NUM}/{NUM}" in progress
    # All is there: nothing is run.
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("[!.]*")}
    dataset.capture(llm, data, out, HOOKS, {"start": 0, "step": 3}, max_tokens=4)
    assert before == {path.name: path.stat().st_mtime_ns for path in out.glob("[!.]*")}


def test_means_in_place_of_rows(llm: LLM, data: dataset.DataFile, tmp_path: Path) -> None:
    """One row an example, also of positions that are strided; ids and labels as ever."""
    every, strided = "all_prompt", {"start": 0, "step": 3}
    for name, positions, other in (("a", every, strided), ("b", strided, every)):
        out = tmp_path / name
        made = dataset.capture(llm, data, out, HOOKS, positions, more={"reduce": "mean"})
        rows = made.rows("post_block", 1)
        assert made.complete and rows.column("example").tolist() == list(range(NUM))
        assert rows.labels().tolist() == [record["label"] for record in RECORDS]
        found = rows.tensor()
        want, wrong = (
            torch.stack([each.values.mean(0) for each in expected(llm, RECORDS, which)])
            for which in (positions, other)
        )
        size = want.norm()
        assert (found - want).norm() <= 1e-4 * size < 0.05 * size < (found - wrong).norm()


def test_chats_and_token_ids(llm: LLM, tmp_path: Path) -> None:
    chat: Any = [{"role": "user", "content": "hi there"}]
    data = write(tmp_path / "d.jsonl", [{"messages": chat}, {"messages": [5, 6, 7]}])
    hooks = {"post_block": [1], "z": {1: [0, 2]}}
    activations = dataset.capture(llm, data, tmp_path / "acts", hooks)
    asked = {"inline": {"hooks": hooks, "positions": "last_prompt"}}
    params = SamplingParams(temperature=0, max_tokens=1, capture=asked)
    outputs = llm.chat([chat], params, use_tqdm=False)
    outputs += llm.generate([TokensPrompt(prompt_token_ids=[5, 6, 7])], params, use_tqdm=False)
    answers = payloads(outputs)
    need_rows(activations, [payload["post_block", 1] for payload in answers])
    heads = activations.rows("z", 1)
    assert heads.shape[:2] == (2, 2)
    expected_heads = torch.cat([payload["z", 1].values for payload in answers])
    assert torch.allclose(heads.tensor(), expected_heads, atol=1e-5)
    assert [line["prompt_tokens"] for line in activations.manifest()][1] == 3


SLOW = """
import time
from vllm.pilot.dataset.writer import ShardWriter
add = ShardWriter.add

def slow(writer, captured):
    if captured.example.number >= LAST:
        time.sleep(600)
    add(writer, captured)

ShardWriter.add = slow
"""
"""Of a program that is to be stopped: it never comes to example LAST, however late that is."""
KILLED = """
from pathlib import Path
from tests.conformance.engine import prepare_environment
if __name__ == "__main__":
    prepare_environment("v1")
    from tests.conformance.engine import engine
    from tests.pilot.test_dataset_capture import HOOKS, SETTINGS
    from vllm.pilot import dataset
    LAST = 50
    exec({slow!r})
    with engine(Path({model!r}), **SETTINGS) as llm:
        data = dataset.DataFile({data!r})
        dataset.capture(llm, data, {out!r}, HOOKS, "all_prompt", shard_bytes=1)
"""


def test_killed_and_continued(
    llm: LLM, model: Path, data: dataset.DataFile, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    code = KILLED.format(model=str(model), data=data.path, out=str(out), slow=SLOW)
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while child.poll() is None and len(list(out.glob("*.safetensors"))) < 4:
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    begun = dataset.Activations(str(out))
    done = begun.shards
    assert len(done) >= 4 and not begun.complete
    # Not with other arguments, nor with other data.
    with pytest.raises(dataset.DatasetError, match=r'positions was "all_prompt", is "last_prompt"'):
        dataset.capture(llm, data, out, HOOKS)
    changed = write(tmp_path / "changed.jsonl", [*RECORDS[:-1], {"text": "other"}])
    with pytest.raises(dataset.DatasetError, match=r"data.sha256 was .*, is "):
        dataset.capture(llm, changed, out, HOOKS, "all_prompt")
    assert dataset.Activations(str(out)).shards == done
    activations = dataset.capture(llm, data, out, HOOKS, "all_prompt")
    assert activations.shards[: len(done)] == done
    need_rows(activations, expected(llm, RECORDS, "all_prompt"))
    assert [line["id"] for line in activations.manifest()] == [r["id"] for r in RECORDS]


def test_ctrl_c_and_continued(llm: LLM, model: Path, tmp_path: Path) -> None:
    """As a terminal does it: the engine core, a process of its own, is interrupted too."""
    many = [{"id": f"many/{i}", "text": f"{i} apples"} for i in range(20 * NUM)]
    data = write(tmp_path / "many.jsonl", many)
    out, said = tmp_path / "acts", tmp_path / "said"
    asked = ["--data", data.path, "--out", str(out), "--hooks", json.dumps(HOOKS)]
    code = f"LAST = 900{SLOW}from vllm.entrypoints.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "capture", "run", str(model), *asked]
    command += ["--yes", "--shard-bytes=1"]
    # What a shell starts in the background, as `make test-full` does with these tests, ignores
    # interrupts, and hands that down; a handler is not handed down, so the child has the default.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    with said.open("w") as file:
        try:
            child = subprocess.Popen(
                [*command, *ENGINE_OPTIONS],
                cwd=ROOT,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                stderr=file,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, inherited)
        while child.poll() is None and len(list(out.glob("*.safetensors"))) < 4:
            time.sleep(0.02)
        os.killpg(child.pid, signal.SIGINT)
        status = child.wait()
    assert status == 130, said.read_text()
    begun = dataset.Activations(str(out))
    assert len(begun.shards) >= 4 and not begun.complete
    safe = (
        f"interrupted. {begun.shards[-1].stop:,} of {len(many):,} examples are safe in {out}, in "
    )
    assert f"{safe}{len(begun.shards)} shards; the same command goes on" in said.read_text()
    activations = dataset.capture(llm, data, out, HOOKS)
    assert activations.shards[: len(begun.shards)] == begun.shards
    need_rows(activations, expected(llm, many, "last_prompt"))
    assert [line["id"] for line in activations.manifest()] == [r["id"] for r in many]


def test_an_example_that_is_refused(llm: LLM, tmp_path: Path) -> None:
    records = [*RECORDS[:5], {"text": "x" * 200}, *RECORDS[6:10]]
    data = write(tmp_path / "d.jsonl", records)
    named = textwrap.dedent(r"d.jsonl:6: the engine refuses it: .*\(--skip-refused\)")
    with pytest.raises(dataset.DatasetError, match=named):
        dataset.capture(llm, data, tmp_path / "stopped", HOOKS)
    activations = dataset.capture(llm, data, tmp_path / "acts", HOOKS, skip_refused=True)
    assert activations.complete
    lines = list(activations.manifest())
    assert [line["rows"] for line in lines] == [1] * 5 + [0] + [1] * 4
    assert lines[5]["error"].startswith("refused: ") and lines[4]["error"] is None
    with pytest.raises(dataset.DatasetError, match=r"refuses it: .*no_point"):
        dataset.capture(llm, data, tmp_path / "other", {"no_point": "all"})
    with pytest.raises(dataset.DatasetError, match=r"each of 10 examples is refused: .*no_point"):
        dataset.capture(llm, data, tmp_path / "other", {"no_point": "all"}, skip_refused=True)
    assert not list((tmp_path / "other").glob("[!.]*")), "it can be begun with other hooks"


def test_where_there_is_no_room(llm: LLM, data: dataset.DataFile, tmp_path: Path) -> None:
    with pytest.raises(dataset.DatasetError) as raised:
        dataset.capture(llm, data, tmp_path / "acts", HOOKS, confirm=lambda told: False)
    assert str(raised.value).startswith("not started: 60 examples: ")
    assert "are free there" in str(raised.value)
    assert "0 of 60 examples are safe" in str(raised.value)


def test_the_page(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of docs/datasets.md are one program; its engine is this module's."""
    page = (ROOT / "docs" / "datasets.md").read_text()
    program = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    engine_line = 'llm = LLM(model=MODEL, capture_consumers=["inline"])\n'
    assert engine_line in program
    monkeypatch.chdir(tmp_path)
    exec(compile(program.replace(engine_line, ""), "datasets.md", "exec"), {"llm": llm})
    said = re.findall(r"^(\w+)[ (](.*)$", capsys.readouterr().out, re.MULTILINE)
    told = dict(reversed(said))
    assert told["Activations"].startswith("'acts', 4 examples, complete: post_block.0, ")
    ids = [f"review/{i}" for i in range(4)]
    assert told["shard"] == f"torch.Size([4, {HIDDEN}]) torch.float32 {ids}"
    assert re.fullmatch(rf"torch.Size\(\[{HIDDEN}\]\) 0 \d+ 1", told["row"])
    assert told["features"] == f"(4, {HIDDEN}) [1 1 0 0]"
    assert [line for name, line in said if name == "line"] == [
        f"review/{i} {[end]}" for i, end in enumerate([".", "<unk>"] * 2)
    ]


def arguments(model: Path, *more: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    CaptureSubcommand().subparser_init(parser.add_subparsers())
    return parser.parse_args(["capture", "run", str(model), *more, *ENGINE_OPTIONS])


def run(model: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as ended:
        CaptureSubcommand.cmd(arguments(model, *more))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_what_the_command_refuses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each before the model is loaded."""
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"text"\n')
    data = ["--data", str(tmp_path / "d.jsonl")]
    hooks, out = ["--hooks", "post_block:all"], ["--out", str(tmp_path / "acts")]
    for asked, message in (
        ([*data, *out, *hooks], "d.jsonl:2: is not JSON"),
        ([*data, *out, "--hooks", "post_block"], "--hooks: 'post_block' is not POINT:LAYERS"),
        ([*data, *out, *hooks, "--positions", "[0,"], "--positions: '[0,' is no JSON"),
        ([*data, *out, *hooks, "--positions=last"], "--positions: 'last' is none of last_prompt, "),
        ([*data, *out, "--hooks", "post_blok:all"], "--hooks: unknown point 'post_blok'; points a"),
        ([*data, *hooks, "--out", "nosuch://a"], "cannot be opened"),
    ):
        assert run(model, *asked) == 1
        assert f"error: {message}" in capsys.readouterr().err.replace(f"{tmp_path}/", "").replace(
            "root: 'nosuch://a' ", ""
        )
    assert not (tmp_path / "acts").exists()


def test_the_command(
    llm: LLM,
    model: Path,
    data: dataset.DataFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Into a folder and an object store. The last: its engine ends that of the other tests."""
    positions = {"start": 0, "step": 3}
    reference = expected(llm, RECORDS, positions)
    asked = ["--data", data.path, "--hooks", "pre_attn:0", "post_block:all", "--yes"]
    asked += ["--positions", json.dumps(positions)]
    with s3_server("bucket") as server:
        # As fsspec's configuration file or FSSPEC_S3 would say it.
        monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
        for out in (str(tmp_path / "acts"), "s3://bucket/acts"):
            assert run(model, *asked, "--out", out) == 0
            said = capsys.readouterr().out
            assert "60 examples: about " in said and "60 examples, complete: pre_attn.0" in said
            need_rows(dataset.Activations(out), reference)
        stored = fsspec.filesystem("s3").ls("bucket/acts", detail=False, refresh=True)
        assert {Path(name).name for name in stored} == {
            each.name for each in (tmp_path / "acts").iterdir()
        } - {".lock"}
