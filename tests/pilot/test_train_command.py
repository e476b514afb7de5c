# SPDX-License-Identifier: Apache-2.0
"""`vllm steering train` and `points`: options, exit statuses, and what is wrong beforehand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.numpy

from tests.pilot.test_training import make_pairs, shuffled
from tests.support.disks import largest_file
from vllm.entrypoints.cli.capture.main import CaptureSubcommand
from vllm.entrypoints.cli.steering import train as command
from vllm.entrypoints.cli.steering.main import SteeringSubcommand
from vllm.entrypoints.cli.steering.points import runs
from vllm.entrypoints.serve.steering.client import SteeringError
from vllm.pilot import EngineBench, Pairs, report
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.pilot.pairs import Example

pytestmark = pytest.mark.full


def parse(*arguments: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    SteeringSubcommand().subparser_init(parser.add_subparsers())
    return parser.parse_args(["steering", *arguments])


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        SteeringSubcommand.cmd(parse(*arguments))
    return int(ended.value.code or 0)


def save(pairs: Pairs, path: Path) -> str:
    def line(ours: Example, others: Example) -> str:
        entry = {"prompt": ours.prompt, "positive": ours.text, "negative": others.text}
        return json.dumps(entry)

    both = zip(pairs.positive, pairs.negative, strict=True)
    path.write_text("\n".join(line(*pair) for pair in both))
    return str(path)


@pytest.fixture
def running(bench: EngineBench, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options with which the command takes the engine that is there, and leaves it running."""
    monkeypatch.setattr(command, "start_bench", lambda _: bench)
    return ("model", "--url=there", "--scales", "1", "2", "--candidates=2", "--max-kl=0.5")


def test_exit_statuses(running: tuple[str, ...], tmp_path: Path) -> None:
    data = save(make_pairs(), tmp_path / "pairs.jsonl")
    asked = ("train", *running, f"--data={data}", "--cases=4", "--layers=1-3", "--read=-1")
    assert run(*asked, f"--out={tmp_path / 'good'}") == 0
    numbers = json.loads((tmp_path / "good" / "report.json").read_text())
    assert numbers["settings"]["layers"] == [1, 2, 3] and numbers["settings"]["read"] == -1
    assert numbers["evidence"]["cases"] == 4 and len(numbers["data"]["sha256"]) == 64
    assert (tmp_path / "good" / "good.safetensors").exists()
    # A second time into the same folder is refused, and labels that say nothing are no result.
    assert run(*asked, f"--out={tmp_path / 'good'}") == 2
    noise = save(shuffled(make_pairs()), tmp_path / "noise.jsonl")
    assert run("train", *running, f"--data={noise}", f"--out={tmp_path / 'bad'}") == 3
    assert not list((tmp_path / "bad").glob("*.safetensors"))


def test_a_background(running: tuple[str, ...], tmp_path: Path) -> None:
    """mean-centred finds the concept against texts of no class, which are a file's."""
    pairs = make_pairs()
    data = save(pairs, tmp_path / "pairs.jsonl")
    texts = [f"{e.prompt}{e.text}" for e in (*pairs.positive[::2], *pairs.negative[1::2])]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    asked = ("--method=mean-centred", f"--background={tmp_path}/texts.txt", "--cases=4")
    assert run("train", *running, f"--data={data}", *asked, f"--out={tmp_path / 'centred'}") == 0
    numbers = json.loads((tmp_path / "centred" / "report.json").read_text())
    assert numbers["settings"]["method"] == "mean-centred"
    assert "mean-centred" in (tmp_path / "centred" / "README.md").read_text()


def test_a_score_by_name(running: tuple[str, ...], tmp_path: Path) -> None:
    data = save(make_pairs(), tmp_path / "pairs.jsonl")
    asked = ("train", *running, f"--data={data}", "--score=demo.subject:grammar_mood")
    status = run(*asked, "--guard=written", f"--out={tmp_path / 'scored'}")
    numbers = json.loads((tmp_path / "scored" / "report.json").read_text())
    assert status == (0 if numbers["held"] else 3)
    assert numbers["evidence"]["unit"] == "demo.subject:grammar_mood"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--data={tmp}/none.jsonl"], "No such file"),
        (["--data={tmp}/broken.jsonl"], "broken.jsonl:2: is not JSON"),
        (["--data={tmp}/few.jsonl"], "split 'report' has no positive"),
        (["--score=demo.subject:nothing"], "is no module:function"),
        (["--score=demo.subject:grammar_mood", "--prompts={tmp}/one.txt"], "two prompts"),
        (["--method=mean-centred"], "--background"),
        (["--guard=written"], "--guard: 'written' needs --score"),
        (["--read=answer_mean"], "read: 'answer_mean' is none of last, answer-mean, "),
        (["--scales", "1", "0"], "scales: positive numbers"),
        (["--candidates=0"], "candidates: 0; at least 1"),
        (["--layers=all-4"], "argument --layers: 'all-4' is not all, nor such as 4-11 or 3,7,-1"),
        (["--out={tmp}"], "there is something in it"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "start_bench", lambda _: pytest.fail("it was loaded"))
    save(make_pairs(), tmp_path / "pairs.jsonl")
    save(make_pairs(2), tmp_path / "few.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"positive": "a", "negative": "b"}\n{')
    (tmp_path / "one.txt").write_text("one")
    asked = ["model", f"--data={tmp_path}/pairs.jsonl", f"--out={tmp_path}/out"]
    asked += [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert run("train", *asked) == 2
    assert said in capsys.readouterr().err


def test_a_server_or_an_engine_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not run: that is not the status of a result that is none."""
    data = save(make_pairs(), tmp_path / "pairs.jsonl")
    (tmp_path / "no-model").mkdir()
    asked = ["train", str(tmp_path / "no-model"), f"--data={data}", f"--out={tmp_path}/out"]
    assert run(*asked, "--url=http://127.0.0.1:9") == 2
    assert "error: http://127.0.0.1:9: ConnectError(" in capsys.readouterr().err
    assert run(*asked) == 2
    assert "error: the engine did not start, nothing was written: " in capsys.readouterr().err
    for error in (SteeringError(403, "no key", None), EngineDeadError()):

        def fail(_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(command, "start_bench", fail)
        assert run(*asked, "--url=there") == 2
        assert f"error: {error}" in capsys.readouterr().err


def test_a_full_disk_at_the_end(
    running: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The vectors are written before the page, and what is there is whole and said to be."""
    save_all = report.save_trained

    def on_a_small_disk(*given: Any) -> Path:
        with largest_file(20_000):
            return save_all(*given)

    monkeypatch.setattr(report, "save_trained", on_a_small_disk)
    data = save(make_pairs(), tmp_path / "pairs.jsonl")
    assert run("train", *running, f"--data={data}", f"--out={tmp_path / 'happy'}") == 2
    files = ["all_layers.safetensors", "happy.gguf", "happy.safetensors", "report.json"]
    assert sorted(path.name for path in (tmp_path / "happy").iterdir()) == files
    assert f"; whole in {tmp_path / 'happy'}: {', '.join(files)}" in capsys.readouterr().err
    layer = json.loads((tmp_path / "happy" / "report.json").read_text())["choice"]["layer"]
    [name] = safetensors.numpy.load_file(tmp_path / "happy" / "happy.safetensors")
    assert name == f"base.post_block.{layer}"


def test_layers_and_positions_as_people_write_them() -> None:
    asked = ("train", "model", "--data=a", "--out=b")
    assert parse(*asked).layers == "all" and parse(*asked).read is None
    assert parse(*asked, "--layers=3,5-7,-1").layers == [3, 5, 6, 7, -1]
    assert parse(*asked, "--read=answer-mean").read == "answer-mean"
    assert parse(*asked, '--read={"start": -3}').read == {"start": -3}


@pytest.mark.parametrize(
    "command, own",
    [
        ("steering train", ("--data FILE", "--score MODULE:FUNCTION", "--max-kl NATS")),
        ("steering check", ("--hf, --no-hf", "--json")),
        ("steering points", ()),
        ("steering probe train", ("--sites SITES", "--pool POOL", "--memory GIB")),
        ("capture run", ("--data DATA", "--positions POSITIONS", "-y, --yes")),
    ],
)
def test_help_lists_what_is_a_commands_own(
    command: str, own: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The options of `vllm serve` are hundreds, and stay behind `--help=all`."""
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers()
    for subcommand in (SteeringSubcommand(), CaptureSubcommand()):
        subcommand.subparser_init(subparsers)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"vllm {command} --help=all" in said
    assert all(option in said for option in own), said
    assert "--kv-cache-memory-bytes" not in said and "ModelConfig" in said


def test_points_of_a_model(demo_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("points", str(demo_model), "--dtype=float32") == 0
    said = capfd.readouterr().out
    assert "LlamaForCausalLM: 5 layers of 128, float32, 512 B a row" in said
    assert "layers 0-4: pre_attn, post_attn, post_block, attn_out, mlp_out  (LlamaDec" in said
    heads = json.loads((demo_model / "config.json").read_text())
    query, key = heads["num_attention_heads"], heads["num_key_value_heads"]
    width = heads["hidden_size"] // query
    sizes = f"q {query} x {width}, k {key} x {width}, v {key} x {width}, z {query} x {width}"
    assert f"heads of layers 0-4, where --capture-points has them: {sizes}\n" in said
    both = ("pre_attn", "post_block")
    assert runs({0: both, 1: both, 2: ("pre_attn",), 4: both}) == [
        (0, 1, both),
        (2, 2, ("pre_attn",)),
        (4, 4, both),
    ]


def test_points_of_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("points", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith("error: ")
