# SPDX-License-Identifier: Apache-2.0
"""What was learned in transformers is what the engine serves: rows and log-probabilities."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import ROOT
from tests.pilot.test_train_command import run, save
from tests.support.letters import letter_pairs
from tests.support.spelled import spell
from vllm.entrypoints.cli.steering import train as command
from vllm.pilot import EngineBench, patch_sweep
from vllm.pilot.learn import TorchModel, attribute, highlight, learn, save_learned
from vllm.pilot.learn.highlighting import EMBEDDING, scaled

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from vllm import LLM

pytestmark = pytest.mark.full

CLOSE = 2e-4
"""Of rows relative, and in nats: float32 in another order."""
TEXT = "abcdefXYZpq"
LAYERS = [1, 2]


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell(tiny_models.path("llama"), tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> TorchModel:
    return TorchModel.load(str(folder))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    from tests.conformance.engine import engine

    options = {"enable_steering": True, "capture_consumers": ["inline"]}
    families = ["add", "low_rank", "replace"]
    with engine(folder, skip_tokenizer_init=False, steering_families=families, **options) as made:
        yield made


def served(llm: LLM, **fields: Any) -> tuple[dict[int, torch.Tensor], list[float]]:
    """The rows after each block, and log P of the text's tokens."""
    from vllm import SamplingParams

    read = {"inline": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, capture=read, **fields)
    (output,) = llm.generate([TEXT], params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.capture_results and output.prompt_logprobs
    payload = answer.capture_results["inline"].payload
    rows = {layer: payload["post_block", layer].values.float() for layer in range(4)}
    listed = zip(output.prompt_token_ids or (), output.prompt_logprobs, strict=True)
    return rows, [entry[token].logprob for token, entry in listed if entry]


def trained(model: TorchModel, edits: Any) -> tuple[dict[int, torch.Tensor], list[float]]:
    """The same in transformers."""
    rows: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def change(stream: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            edit = edits.get(("post_block", layer))
            made: torch.Tensor = stream if edit is None else edit(stream, real)
            rows[layer] = made[0]
            return made

        return change

    ids = model.encode(TEXT)
    changes = {**edits, **{("post_block", i): keep(i) for i in range(4)}}
    with torch.no_grad():
        table = model.log_probs([ids], changes)[0]
    return rows, [float(table[i, token]) for i, token in enumerate(ids[1:])]


def apart(ours: Any, others: Any) -> float:
    """The largest difference, of rows relative to the row."""
    rows = [
        float(((ours[0][i] - others[0][i]).norm(dim=-1) / others[0][i].norm(dim=-1)).max())
        for i in range(4)
    ]
    return max(*rows, *(abs(a - b) for a, b in zip(ours[1], others[1], strict=True)))


@pytest.mark.parametrize("method", ["gradient", "reft", "reft-r1", "bipo"])
def test_served_is_what_was_learned(
    model: TorchModel, llm: LLM, method: str, tmp_path: Path
) -> None:
    learned = learn(model, letter_pairs(), method=method, layers=LAYERS, epochs=4)
    assert learned.evidence.held, learned
    save_learned(learned, tmp_path / "made")
    llm.steering.register_module(method, str(tmp_path / "made" / "made.safetensors"))
    plain, ours = served(llm), served(llm, steering_modules=[method])
    theirs = trained(model, learned.edits)
    assert apart(plain, trained(model, {})) < CLOSE
    assert apart(ours, theirs) < CLOSE
    # The twins: without it, with half of the edits, and with twice the scale.
    assert apart(plain, theirs) > 100 * CLOSE
    assert apart(ours, trained(model, dict([*learned.edits.items()][:1]))) > 100 * CLOSE
    twice = served(llm, steering_modules=[(method, 2.0)])
    for edit in learned.edits.values():
        edit.strength *= 2
    assert apart(twice, trained(model, learned.edits)) < CLOSE
    assert apart(twice, theirs) > 100 * CLOSE
    assert 'steering_modules": [["made", 1.0]]' in (tmp_path / "made" / "README.md").read_text()


def test_soft_removal_is_served(model: TorchModel, llm: LLM) -> None:
    """Tokens that are highlighted are scaled at the embedding, by rows and log-probabilities."""
    found = highlight(model, TEXT, factor=0.3)
    assert 0 < len(found.chosen) < len(TEXT)
    ours = served(llm, steering=found.operations())
    assert apart(ours, trained(model, {EMBEDDING: scaled(found.chosen, 0.3)})) < CLOSE
    # The twins: another factor, and other tokens.
    assert apart(ours, trained(model, {EMBEDDING: scaled(found.chosen, 0.5)})) > 100 * CLOSE
    others = [at for at in found.counted if at not in found.chosen][: len(found.chosen)]
    assert apart(ours, trained(model, {EMBEDDING: scaled(others, 0.3)})) > 100 * CLOSE


def test_estimates_beside_a_sweep(model: TorchModel, llm: LLM, tmp_path: Path) -> None:
    """At the last row of the last layer integrated gradients are what the engine's patch does."""
    asked: dict[str, Any] = {"answer": "Y", "other": "q"}
    sweep = patch_sweep(llm, "abcdefgh", "abXdefgh", **asked)
    found = attribute(model, "abcdefgh", "abXdefgh", steps=64, **asked)
    assert sweep.clean == pytest.approx(found.clean, abs=CLOSE)
    assert sweep.corrupt == pytest.approx(found.corrupt, abs=CLOSE)
    changes = sweep.values - sweep.corrupt
    assert found.values[0, 3, 7] == pytest.approx(changes[0, 3, 7], abs=CLOSE)
    assert abs(found.values[0, 2, 7] - changes[0, 3, 7]) > 100 * CLOSE
    assert -1.0 <= found.correlation(sweep) <= 1.0
    found.draw(tmp_path / "beside.svg", sweep)
    assert (tmp_path / "beside.svg").stat().st_size > 10_000


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = save(letter_pairs(), tmp_path / "pairs.jsonl")
    asked = ("train", str(folder), f"--data={data}", "--method=bipo", "--layers=1,-2")
    assert run(*asked, f"--out={tmp_path / 'glad'}", "--epochs=4", "--seed=3") == 0
    said = capsys.readouterr().out
    assert "pass 4: loss " in said and "README.md, glad.safetensors, report.json" in said
    numbers = json.loads((tmp_path / "glad" / "report.json").read_text())
    assert numbers["held"] and numbers["settings"]["layers"] == [1, 2]
    assert len(numbers["losses"]["choose"]) == 4 and numbers["settings"]["seed"] == 3
    assert numbers["evidence"]["cases"] == 6 and len(numbers["data"]["sha256"]) == 64


ENGINE = re.compile(r"^llm = LLM\(\n.*?^\)\n", re.MULTILINE | re.DOTALL)
JUDGE = """
def grades(concept, instruction, text):
    return 2 * sum(letter in "XYZ" for letter in text) / max(len(text), 1), 2, 1
"""


@pytest.fixture
def page(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """docs/learning.md and its data, in the working directory; commands take the engine."""
    monkeypatch.setattr(command, "start_bench", lambda _: EngineBench(llm))
    monkeypatch.setattr(command, "end_bench", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    save(letter_pairs(), tmp_path / "pairs.jsonl")
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "texts.txt").write_text("abc\nbcd\ncde\ndef\n")
    return (ROOT / "docs" / "learning.md").read_text(), tmp_path


def test_the_pages_program(
    page: tuple[str, Path], llm: LLM, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page[0], re.MULTILINE | re.DOTALL)
    program = "".join(blocks).replace("/path/to/model", str(folder))
    assert len(blocks) == 3 and len(ENGINE.findall(program)) == 1
    exec(compile(ENGINE.sub("", program), "learning.md", "exec"), {"llm": llm})
    said = capsys.readouterr().out
    assert "held True Learned(" in said and said.count("\ncorrelation ") == 2
    plain, reft = re.findall(r"^wrote (.*)$", said, re.MULTILINE)
    assert plain != reft and set(reft) & set("XYZ")
    assert (page[1] / "estimate.png").is_file() and (page[1] / "tokens.png").is_file()


def test_the_pages_commands(page: tuple[str, Path], llm: LLM, folder: Path) -> None:
    lines = re.findall(r"^    vllm steering (.+)$", page[0], re.MULTILINE)
    train, bench = (shlex.split(line.replace("MODEL", str(folder), 1)) for line in lines)
    assert run(*train) == 0
    llm.steering.register_module("reft", "glad/glad.safetensors")
    [line] = re.findall(r"^```json\n(.*?)\n```$", page[0], re.MULTILINE | re.DOTALL)
    entry = json.loads(line)
    entry["ways"]["feature"]["op"]["vector"] *= 960
    entry["ways"]["feature"]["op"]["vector"] = entry["ways"]["feature"]["op"]["vector"][:96]
    (page[1] / "concepts.jsonl").write_text(json.dumps(entry))
    assert run(*bench) == 0
    report = json.loads((page[1] / "compared" / "report.json").read_text())
    results = {result["way"]: result for result in report["results"]}
    assert set(results) == {"plain", "prompt", "reft", "feature"}
    assert results["reft"]["concept"] > results["plain"]["concept"] + 0.3
    assert results["reft"]["answers"] == 2


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--url=there"], "--url: method 'gradient' does not read it; leave it out"),
        (["--scales", "1"], "--scales: method 'gradient' does not read it"),
        (["--method=mean", "--rank=2"], "--rank: method 'mean' does not read it"),
        (["--rank=2"], "rank: method 'gradient' has none; leave it out, or take 'reft'"),
        (["--epochs=0"], "epochs: 0; at least 1 is needed"),
        (["--rate=0"], "rate, kl: a rate above 0 and a weight of 0 or more are needed"),
        (["--point=post_attn"], "point: 'post_attn' has no gradients here; take pre_attn or"),
        (["--data={tmp}/bare.jsonl"], "pairs with a prompt are needed, of which the completion"),
        (["--dtype=half"], ""),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = "it was loaded"

    def load(*_: object) -> None:
        raise ValueError(loaded)

    monkeypatch.setattr(TorchModel, "load", load)
    save(letter_pairs(), tmp_path / "pairs.jsonl")
    (tmp_path / "bare.jsonl").write_text('{"positive": "a", "negative": "b"}\n')
    asked = ["model", f"--data={tmp_path}/pairs.jsonl", f"--out={tmp_path}/out"]
    asked += ["--method=gradient", *(a.replace("{tmp}", str(tmp_path)) for a in arguments)]
    assert run("train", *asked) == 2
    assert (said or loaded) in capsys.readouterr().err
