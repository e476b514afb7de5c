# SPDX-License-Identifier: Apache-2.0
"""The documents are true: their links lead somewhere, and their programs run as printed.

The programs get a tiny random Llama with a tokenizer of single characters in place of MODEL. With
the README's nothing else is changed: a new Python, torch.compile, and the engine core in a process
of its own, as for a user. Those of pages run eagerly, and find vLLM imported
(tests/support/warm.py): tests/serving/test_compiled.py and test_steering_compiled.py compile.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from tests import ROOT
from tests.conformance import models
from tests.conformance.runner import worst_row
from tests.conformance.tiny import COMMON
from tests.docs.links import broken_links, named
from tests.support import warm
from tests.support.spelled import spell
from tools import docs_stats

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "docs" / "measurements" / "README.md",
    )
)
MODEL_LINE = 'MODEL = "/path/to/model"'

_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
        "`vllm/v1/core/sched/scheduler.py:Scheduler.no_such_method` `tools/nothing.py` "
        "`vllm/v1/nothing` [a](b.md) [c](README.md#no-such-heading) [d](#nor-this) [e](README.md)"
    )
    assert broken_links(text, ROOT) == [
        "vllm/v1/interventions/sites.py:need_nothing",
        "vllm/v1/no.py:need_point",
        "vllm/v1/core/sched/scheduler.py:Scheduler.no_such_method",
        "tools/nothing.py",
        "vllm/v1/nothing",
        "b.md",
        "README.md#no-such-heading",
        "#nor-this",
    ]


def test_the_tour_has_links() -> None:
    """An empty tour would have no broken ones."""
    assert len(list(named((ROOT / "docs" / "design.md").read_text()))) >= 12


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {
        target
        for line in (ROOT / document).read_text().splitlines()
        for code in (re.findall(r"`([^`]+)`", line) or [line] * line.startswith("    "))
        for target in re.findall(r"\bmake ([a-z-]+)", code)
    }
    assert asked <= targets


def programs(document: str = "README.md") -> list[str]:
    return _PROGRAM.findall((ROOT / document).read_text())


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with a tokenizer."""
    return spell(tiny_models.path("llama"), tmp_path_factory.mktemp("readme") / "model")


RECORDER = """
import runpy

import torch
from vllm import LLM

generate = LLM.generate


def recording(llm, prompts, params):
    if isinstance(params, list):
        torch.save([one.steering_vectors for one in params], "steered_by.pt")
    return generate(llm, prompts, params)


if __name__ == "__main__":
    LLM.generate = recording
    runpy.run_path("program.py", run_name="__main__")
"""
"""Runs the program next to it, and keeps what its requests are steered by."""

EAGERLY = """
import runpy
from functools import partialmethod

from vllm import LLM

LLM.__init__ = partialmethod(LLM.__init__, enforce_eager=True)
runpy.run_module("program", run_name="__main__", alter_sys=True)
"""
"""Runs the program next to it without torch.compile."""


def write(program: str, model: Path, folder: Path) -> Path:
    """Write `program` with this model's folder into the script that it returns."""
    assert program.count(MODEL_LINE) == 1, f"the reader replaces one line, {MODEL_LINE}"
    script = folder / "program.py"
    script.write_text(program.replace("/path/to/model", str(model)))
    return script


def run(program: str, model: Path, folder: Path, *, multiprocess: bool = False) -> str:
    """What `program` printed, run eagerly in `folder`."""
    write(program, model, folder)
    (folder / "eagerly.py").write_text(EAGERLY)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = warm.run("eagerly", env=environment, folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_as_a_user(program: str, model: Path, folder: Path) -> str:
    """What `program` printed in a new Python; `RECORDER` keeps what it steers by."""
    write(program, model, folder)
    (folder / "started.py").write_text(RECORDER)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
    }
    done = subprocess.run(
        [sys.executable, str(folder / "started.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def said_by_scale(printed: str) -> dict[str, str]:
    """Scale -> text, of the lines that the README's program prints."""
    return dict(re.findall(r"^([+-]\d\.\d) (.+)$", printed, re.MULTILINE))


def clones_own(program: str) -> set[str]:
    """Return the folders of this repository, without `vllm`, from which a program imports."""
    names = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    roots = {name.partition(".")[0] for name in names} - {"vllm"}
    return {root for root in roots if (ROOT / root).is_dir()}


NEED_A_CLONE = {"docs/cookbook.md": [{"examples"}]}
"""Page -> what its programs that say that they need a clone import of it: fifty lines that train an
autoencoder are no part of the package, and the page does not repeat them."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_programs_need_no_clone(document: str) -> None:
    """They import what an installed wheel has, or say that they need a clone."""
    found = [clones_own(program) for program in programs(document) if clones_own(program)]
    assert found == NEED_A_CLONE.get(document, [])
    assert not found or "needs a clone" in (ROOT / document).read_text()


def test_the_demo_of_the_wheel_needs_no_clone() -> None:
    """But for a comparison with the tests of a clone, which it leaves out elsewhere."""
    texts = {path.name: path.read_text() for path in (ROOT / "demo").glob("*.py")}
    assert [name for name, text in texts.items() if clones_own(text) - {"demo"}] == ["proof.py"]


def test_programs_that_need_a_clone_are_found() -> None:
    """The twin."""
    program = "import json, tools.svg\nfrom demo.corpus import PLACES\nfrom vllm import LLM\n"
    assert clones_own(program) == {"demo", "tools"}


def test_readme_has_one_program_and_its_output() -> None:
    (program,) = programs()
    scales = re.search(r"scales = (\[.*\])", program)
    assert scales is not None
    (printed,) = re.findall(r"^```text\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    said = said_by_scale(printed)
    assert list(said) == [f"{scale:+.1f}" for scale in ast.literal_eval(scales[1])]
    assert len(said) == len(printed.splitlines()) == len(set(said.values()))


def test_pages_keep_their_budgets_of_words() -> None:
    """`make docs-stats` prints them. Each page has a budget, or a reason for none. With a twin."""
    found = docs_stats.counted()
    assert [page for page, count in found.items() if count > docs_stats.BUDGETS[page]] == []
    pages = {page for page in DOCUMENTS if "/measurements/" not in page}
    assert pages == docs_stats.BUDGETS.keys() | docs_stats.WITHOUT
    text = (ROOT / "README.md").read_text()
    assert docs_stats.words(text + "one two\n| three |\n```\nfour\n```\n") == found["README.md"] + 2


def costs_not_on(page: str, readme: str) -> list[str]:
    """Return the cells of the README's table of costs that a page's headlines do not have."""
    table = readme.split("## What it costs")[1].split("\n## ")[0]
    lines = [line for line in page.splitlines() if line.startswith("| time per token")]
    missing = []
    for line in (line for line in table.splitlines() if line.startswith("| every")):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        words = set(re.findall(r"\w+", name))
        [shown] = [each for each in lines if words <= set(re.findall(r"\w+", each))]
        batches = zip(cells, (1, 32, 256), strict=True)
        missing += [f"{name}: {c}" for c, n in batches if f"{c} (batch {n})" not in shown]
    [(ours, stock)] = re.findall(r"^\| one prompt .*\| (\d+) ms, stock (\d+) ms \|", table, re.M)
    if f"{ours} ms, where stock takes {stock} " not in page:
        missing.append(f"one prompt: {ours} and {stock} ms")
    return missing


def test_readme_costs_are_on_the_page_that_it_links() -> None:
    """That page is generated, so no number of the README is stale. With a twin."""
    readme, page = ((ROOT / p).read_text() for p in ("README.md", "docs/performance.md"))
    assert costs_not_on(page, readme) == []
    for true, stale in (("| 1.08 |", "| 1.16 |"), ("stock 27 ms", "stock 28 ms")):
        assert len(costs_not_on(page, readme.replace(true, stale))) == 1
    architectures = re.search(r"(\d+) architectures", readme)
    assert architectures is not None
    assert architectures[1] in (ROOT / "docs" / "models.md").read_text()


@pytest.mark.full
def test_readme_program(model: Path) -> None:
    """One line for each scale, and it matters; the direction is the one that transformers finds."""
    (program,), folder = programs(), model.parent
    printed = run_as_a_user(program, model, folder)
    said = said_by_scale(printed)
    scales = [-1.0, 0.0, 1.0]
    assert list(said) == [f"{scale:+.1f}" for scale in scales]
    assert said["-1.0"] != said["+0.0"] != said["+1.0"]

    used = torch.load(folder / "steered_by.pt")
    layer = 3 * models.LAYERS // 5
    vectors = [one["post_block"][layer]["vector"] for one in used]
    assert [one["post_block"][layer]["scale"] for one in used] == scales
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)

    def prompts(name: str) -> list[str]:
        found = re.search(rf"{name} = mean_row\((\[.*?\])\)", program)
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
    assert worst_row(vectors[0][None], want[None]) < 0.1
    other = mean(prompts("happy"))
    assert worst_row(vectors[0][None], other[None]) > 0.3


@pytest.mark.full
def test_steering_page(model: Path, tmp_path: Path) -> None:
    """Its blocks are one program; each way of steering it shows has an effect."""
    printed = run("".join(programs("docs/steering.md")), model, tmp_path)
    said = dict(re.findall(r"^([a-z]+) (.*)$", printed, re.MULTILINE))
    ways = {"all", "prompt", "answer", "word", "two", "late", "gated", "patched", "module"}
    assert {way for way in ways if said[way] != said["plain"]} == ways
    assert said["prompt"] != said["all"] != said["answer"]
    assert said["ablated"].endswith(" ['ablate']") and said["plain"] not in said["ablated"]
    assert said["global"] == said["answer"]  # both act on generated positions
    before, after = map(float, said["along"].split())
    assert abs(before) > 1
    assert abs(after) < 0.01 * abs(before)  # rows are bfloat16
    assert sorted(path.name for path in tmp_path.glob("happy.*")) == [
        "happy.gguf",
        "happy.safetensors",
    ]


@pytest.mark.full
def test_capture_page(model: Path, tmp_path: Path) -> None:
    """Its blocks but the last are one program; the last is one of its own."""
    *guide, consumer = programs("docs/capture.md")
    printed = run("".join(guide), model, tmp_path)
    said = dict(re.findall(r"^([a-z0-9]+) (.*)$", printed, re.MULTILINE))
    prompt, layers, hidden = len("Today I went"), models.LAYERS, models.HIDDEN
    assert said["status"] == "ok None"
    assert said["rows"].endswith(f"torch.Size([{prompt + 4}, {hidden}]) torch.bfloat16")
    assert said["float32"] == f"float32 torch.Size([{hidden}])"
    assert said["predicting"] == "[ 6 11 12 13 14]"
    assert said["looked"].startswith("5 [(")
    assert said["stacked"] == f"torch.Size([3, {layers}, {hidden}])"
    assert said["projected"] == f"torch.Size([{prompt + 4}, {layers}])"
    tokens = ast.literal_eval(said["tokens"])
    assert tokens[0] == "t" and len(tokens) == 5
    assert said["several"] == "['inline[0]', 'inline[1]']"
    assert said["whole"] == f"torch.Size([1, {layers}, {hidden}])"
    assert said["means"] == said["stacked"]
    assert said["norms"] == f"torch.Size([{prompt + 4}, 1])"
    doses = ast.literal_eval(said["doses"])
    assert sorted(doses) == list(range(layers)) and doses[1] > 0 == doses[0]
    assert said["lens"] == "torch.Size([5, 5]) torch.Size([5, 1]) torch.Size([5])"
    likeliest, answer = said["said"].split("] [")
    assert likeliest.strip("[") == answer.strip("]"), "the last layer says what was sampled"
    assert said["cached"] == "32 rows 52"
    assert said["ended"] == f"torch.Size([{prompt}, {hidden}])" and said["answer"].endswith("[]")
    assert said["logged"].startswith(f"{prompt + 4} rows of post_block 0 |h|=")
    assert said["read"] == f"torch.Size([{prompt + 4}, {hidden}])"
    assert abs(float(said["probe"])) > 1e-3
    written = ast.literal_eval(said["written"])
    assert all((tmp_path / "captures" / name).is_file() for name in written)

    printed = run(consumer, model, tmp_path, multiprocess=True)
    norms = [ast.literal_eval(found) for found in re.findall(r"^norms (.*)$", printed, re.M)]
    assert [len(found) for found in norms] == [prompt - 2, len("home") - 2]
    assert float(printed.split("greatest ")[1]) == max(map(max, norms)) > 0
    assert layers > 1


@pytest.mark.full
def test_attention_page(model: Path, tmp_path: Path) -> None:
    """Its blocks are one program, which computes z from q, k and v."""
    printed = run("".join(programs("docs/attention.md")), model, tmp_path)
    said = dict(re.findall(r"^([a-z]+) (torch.*)$", printed, re.MULTILINE))
    rows, heads = len("Today I went") + 4, COMMON["num_attention_heads"]
    keys, width = COMMON["num_key_value_heads"], COMMON["head_dim"]
    assert said["q"] == f"torch.Size([{rows}, 2, {width}]) (0, {heads - 1})"
    assert said["k"] == f"torch.Size([{rows}, {keys}, {width}]) {tuple(range(keys))}"
    assert said["stream"] == f"torch.Size([{rows}, {models.HIDDEN}]) ()"
    errors = dict(re.findall(r"^head (\d): off by (.*)$", printed, re.MULTILINE))
    assert list(errors) == ["0", str(heads - 1)]
    assert max(map(float, errors.values())) < 1e-5
    moves = re.findall(r"^(?:without head \d:|doubled) moved (.*)$", printed, re.MULTILINE)
    assert len(moves) == heads + 1 and min(map(float, moves)) > 0.01
    [apart] = re.findall(r"^doubled or added: (.*) apart$", printed, re.MULTILINE)
    assert float(apart) < 1e-5
    errors = dict(re.findall(r"^weights (\d): off by (.*)$", printed, re.MULTILINE))
    assert list(errors) == ["0", str(heads - 1)]
    assert max(map(float, errors.values())) < 1e-5
    assert said["mass"] == f"torch.Size([1, {heads}, 2]) ('today', 'rest')"
    assert said["top"] == f"torch.Size([1, {heads}, 3]) torch.Size([1, {heads}, 3])"
