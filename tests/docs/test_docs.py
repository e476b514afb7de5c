# SPDX-License-Identifier: Apache-2.0
"""The documents are true: their links lead somewhere, and the README's programs run as printed.

The programs get a tiny random Llama with a tokenizer of single characters in place of MODEL, and
nothing else is changed: engine defaults, so torch.compile is on. The first runs with the engine
core in a process of its own, as it does for a user.
"""

from __future__ import annotations

import ast
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

import vllm
from tests import ROOT
from tests.conformance import models
from tests.conformance.runner import worst_row

if TYPE_CHECKING:
    from tests.conftest import TinyModels

TREE = Path(vllm.__file__).parents[1]
"""The assembled fork: upstream's files and ours."""

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
)
MODEL_LINE = 'MODEL = "/path/to/model"'

_NAME = re.compile(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`")
_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|md|patch|toml|txt))`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def find(path: str) -> Path | None:
    """A file of this repository or of the assembled fork."""
    return next((base / path for base in (ROOT, TREE) if (base / path).is_file()), None)


def names(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """What a module's or a class's body defines: name and, for a class, its own body."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, []
            # Attributes that a constructor sets belong to the class.
            if node.name == "__init__":
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        yield inner.attr, []
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, []
        elif isinstance(node, ast.Assign):
            yield from ((t.id, []) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.If):
            yield from names([*node.body, *node.orelse])


def defines(file: Path, dotted: str) -> bool:
    """Whether `file` defines `dotted`, "function" or "Class.member"."""
    body = ast.parse(file.read_text()).body
    for part in dotted.split("."):
        found = [inner for name, inner in names(body) if name == part]
        if not found:
            return False
        body = found[0]
    return True


def broken_links(text: str, folder: Path) -> list[str]:
    """Links of a document in `folder` that lead nowhere."""
    broken = []
    for path, name in _NAME.findall(text):
        file = find(path)
        if file is None or not defines(file, name):
            broken.append(f"{path}:{name}")
    broken += [path for path in _FILE.findall(text) if find(path) is None]
    broken += [path for path in _LINK.findall(text) if not (folder / path).exists()]
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    assert broken_links(path.read_text(), path.parent) == []


def test_links_that_lead_nowhere_are_found() -> None:
    """The twin: one broken link of each kind."""
    text = (
        "`vllm/v1/interventions/sites.py:need_point` `vllm/v1/interventions/sites.py:need_nothing` "
        "`vllm/v1/no.py:need_point` "
        "`vllm/v1/core/sched/scheduler.py:Scheduler.schedule` "
        "`vllm/v1/core/sched/scheduler.py:Scheduler.no_such_method` `tools/nothing.py` [a](b.md)"
    )
    assert broken_links(text, ROOT) == [
        "vllm/v1/interventions/sites.py:need_nothing",
        "vllm/v1/no.py:need_point",
        "vllm/v1/core/sched/scheduler.py:Scheduler.no_such_method",
        "tools/nothing.py",
        "b.md",
    ]


def test_the_tour_has_links() -> None:
    """An empty tour would have no broken ones."""
    assert len(_NAME.findall((ROOT / "docs" / "design.md").read_text())) >= 12


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for line in (ROOT / document).read_text().splitlines()
        for code in (re.findall(r"`([^`]+)`", line) or [line] * line.startswith("    "))
        for target in re.findall(r"\bmake ([a-z]+)", code)
    }
    assert named <= targets


def programs(document: str = "README.md") -> list[str]:
    return _PROGRAM.findall((ROOT / document).read_text())


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with a tokenizer."""
    folder = tmp_path_factory.mktemp("readme") / "model"
    folder.mkdir()
    for file in tiny_models.path("llama").iterdir():
        (folder / file.name).symlink_to(file)
    vocabulary = {character: i for i, character in enumerate(string.printable[:95])}
    tokenizer = Tokenizer(WordLevel({**vocabulary, "<unk>": len(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def run(program: str, model: Path, folder: Path, *, multiprocess: bool) -> str:
    """What `program` printed, run as a script in `folder`."""
    assert program.count(MODEL_LINE) == 1, f"the reader replaces one line, {MODEL_LINE}"
    script = folder / "program.py"
    script.write_text(program.replace("/path/to/model", str(model)))
    # VLLM_CPU_KVCACHE_SPACE is what the README says to set. Nothing here changes the engine's work.
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_readme_has_two_programs() -> None:
    assert len(programs()) == 2


@pytest.fixture(scope="module")
def captured(model: Path) -> tuple[Path, str]:
    """Where the README's first program ran, and what it printed."""
    return model.parent, run(programs()[0], model, model.parent, multiprocess=True)


def test_readme_capture_program(captured: tuple[Path, str], model: Path) -> None:
    """The direction that it saves is the one that transformers finds."""
    folder, printed = captured
    saved = torch.load(folder / "happy.pt")
    layer = models.LAYERS // 2
    assert saved["layer"] == layer
    assert f"torch.Size([1, {models.HIDDEN}])" in printed

    def prompts(name: str) -> list[str]:
        found = re.search(rf"{name} = llm\.generate\((\[.*?\]), read\)", programs()[0])
        assert found is not None
        texts: list[str] = ast.literal_eval(found[1])
        return texts

    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def mean(texts: list[str]) -> torch.Tensor:
        rows = []
        with torch.no_grad():
            for text in texts:
                ids = tokenizer(text, return_tensors="pt").input_ids
                out = reference(ids, output_hidden_states=True)
                rows.append(out.hidden_states[layer + 1][0, -1])
        return torch.stack(rows).mean(dim=0)

    want = mean(prompts("happy")) - mean(prompts("sad"))
    # The engine runs in bfloat16 by default, and this is a difference of close numbers.
    assert worst_row(saved["vector"][None], want[None]) < 0.1
    other = mean(prompts("happy"))
    assert worst_row(saved["vector"][None], other[None]) > 0.3


def test_readme_steering_program(captured: tuple[Path, str], model: Path) -> None:
    """One line for each scale, and the scale matters."""
    printed = run(programs()[1], model, captured[0], multiprocess=False)
    lines = re.findall(r"^([+-]\d\.\d) (.+)$", printed, re.MULTILINE)
    assert [scale for scale, _ in lines] == ["-2.0", "-1.0", "+0.0", "+1.0", "+2.0"]
    plain = dict(lines)["+0.0"]
    assert all(text != plain for scale, text in lines if scale in ("-2.0", "+2.0"))


def test_steering_page(model: Path, tmp_path: Path) -> None:
    """Its blocks are one program; each way of steering it shows has an effect."""
    printed = run("".join(programs("docs/steering.md")), model, tmp_path, multiprocess=False)
    said = dict(re.findall(r"^([a-z]+) (.*)$", printed, re.MULTILINE))
    ways = {"all", "prompt", "answer", "word", "two", "late", "gated", "patched", "module"}
    assert {way for way in ways if said[way] != said["plain"]} == ways
    assert said["prompt"] != said["all"] != said["answer"]
    assert said["global"] == said["answer"]  # both act on generated positions
    before, after = map(float, said["along"].split())
    assert abs(before) > 1
    assert abs(after) < 0.01 * abs(before)  # rows are bfloat16
    assert sorted(path.name for path in tmp_path.glob("happy.*")) == [
        "happy.gguf",
        "happy.safetensors",
    ]


def test_capture_page(model: Path, tmp_path: Path) -> None:
    """Its blocks but the last are one program; the last is one of its own."""
    *guide, consumer = programs("docs/capture.md")
    printed = run("".join(guide), model, tmp_path, multiprocess=False)
    said = dict(re.findall(r"^([a-z0-9]+) (.*)$", printed, re.MULTILINE))
    prompt, layers, hidden = len("Today I went"), models.LAYERS, models.HIDDEN
    assert said["status"] == "ok None"
    assert said["rows"].endswith(f"torch.Size([{prompt + 4}, {hidden}]) torch.bfloat16")
    assert said["float32"] == f"float32 torch.Size([{hidden}])"
    assert said["predicting"] == "[ 6 11 12 13 14]"
    assert said["looked"].startswith("5 [(")
    assert said["stacked"] == f"torch.Size([3, 2, {hidden}])"
    assert said["projected"] == f"torch.Size([{prompt + 4}, 2])"
    assert said["logged"].startswith(f"{prompt + 4} rows of post_block 0 |h|=")
    assert said["read"] == f"torch.Size([{prompt + 4}, {hidden}])"
    written = ast.literal_eval(said["written"])
    assert all((tmp_path / "captures" / name).is_file() for name in written)

    printed = run(consumer, model, tmp_path, multiprocess=True)
    norms = [ast.literal_eval(found) for found in re.findall(r"^norms (.*)$", printed, re.M)]
    assert [len(found) for found in norms] == [prompt - 2, len("home") - 2]
    assert float(printed.split("greatest ")[1]) == max(map(max, norms)) > 0
    assert layers > 1
