# SPDX-License-Identifier: Apache-2.0
"""docs/coming-from.md: every line that says "exact" is run here, against transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from examples.peers.transformer_lens import POINTS as POINTS_OF
from examples.peers.transformer_lens import HookedLLM, site_of
from tests import ROOT
from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE
from tests.http.server import save_model
from tests.peers.call import GENERATED, LAYER, LAYERS, PROMPT, Call, V, add, streams
from tests.peers.calls import CALLS, FILED
from tests.peers.named_calls import HEAD, NAMED, without_head
from tests.peers.packages import folder_of
from tests.peers.spec_calls import MODULES
from tests.support.serving import relative
from vllm import LLM, SamplingParams
from vllm.config.points import CAPTURE_POINTS, STEERING_POINTS
from vllm.config.steering import FAMILIES
from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\| (.+?) \| .* \| \*\*exact\*\*.* \|$", re.MULTILINE)

HEADLESS = {"op": "scale", "heads": [HEAD], "factor": 0.0}
PATTERN = "blocks.1.attn.hook_pattern"
THEIRS = """
import sys
import torch
from transformer_lens import TransformerBridge

model, folder = sys.argv[1:]
asked = torch.load(folder + "/asked.pt", weights_only=True)
bridge = TransformerBridge.boot_transformers(model, device="cpu", dtype=torch.float32)
ids = torch.tensor([asked["ids"]])

def add(rows, hook):
    return rows + asked["v"]

def zero(heads, hook):
    heads[:, :, 2] = 0
    return heads

made = {}
hooked = [(asked["at"], add), ("blocks.2.attn.hook_z", zero)]
for kind, hooks in (("plain", []), ("hooked", hooked)):
    with torch.no_grad(), bridge.hooks(fwd_hooks=hooks):
        _, cache = bridge.run_with_cache(ids)
    made[kind] = {name: cache[name].clone() for name in asked["names"]}
torch.save(made, folder + "/cache.pt")
"""
"""A program of TransformerLens's: a model, and a folder with what is asked and answered."""
EXACT = {**CALLS, **NAMED}
Pair = tuple[LLM, Any]


def exact_lines(page: str) -> list[tuple[str, str]]:
    """(section, first cell) of the lines that say that they are exact."""
    return [(name, cell) for name, body in _SECTION.findall(page) for cell in _LINE.findall(body)]


@pytest.mark.quick
def test_each_line_that_says_exact_is_run() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    assert exact_lines(page) == list(EXACT)
    assert page.count("**exact**") == len(EXACT) + 1  # and what the word means
    assert exact_lines("## A\n\n| `x` | `y` | **exact** |\n| `z` | `y` | differs |\n") == [
        ("A", "`x`")
    ]


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path = tiny_models.path("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        steering_points=list(STEERING_POINTS),
        steering_families=[family for family in FAMILIES if family != "focus"],
        capture_consumers=["inline"],
        capture_points=list(CAPTURE_POINTS),
        enable_prefix_caching=False,
        compat=["hotwire", "interp-engine"],
    )
    for name, module in MODULES.items():
        llm.steering.register_module(name, module)
    llm.steering.register_module("happy", {"post_block": {LAYER: V}})
    file = tmp_path_factory.mktemp("modules") / "filed.json"
    file.write_text(json.dumps(FILED))
    llm.steering.register_module("filed", str(file))
    yield llm, models.load(tiny_models.row("llama"), path).double()
    shut_down(llm)


def padded(weights: list[torch.Tensor]) -> torch.Tensor:
    """[queries, heads, keys] of the weights of each query, [heads, its keys]."""
    width = len(weights)
    return torch.stack([torch.nn.functional.pad(w, (0, width - w.shape[-1])) for w in weights])


@pytest.mark.parametrize("line", EXACT, ids=lambda line: f"{line[0]}: {line[1]}"[:60])
def test_exact(pair: Pair, line: tuple[str, str]) -> None:
    llm, model = pair
    for call in EXACT[line]:
        hooks = call.hooks or {call.point: call.layers}
        asked: dict[str, Any] = {"hooks": hooks, "positions": call.positions}
        if call.point == "attn":
            asked = {"attention": {"heads": "all", "queries": "all", "give": ["weights"]}}
        params = SamplingParams(
            temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False,
            capture={"inline": asked}, **call.ours,
        )  # fmt: skip
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params, use_tqdm=False)
        assert output.capture_results is not None
        result = output.capture_results["inline"]
        assert result.status == "ok"
        token_ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
        want, plain = streams(model, token_ids, call), streams(model, token_ids, Call())
        part = call.reads(len(token_ids))
        changed = [*call.does, *(layer for _, layer in call.inside)]
        tolerance = READ_TOLERANCE + (WRITE_TOLERANCE if changed else 0)
        assert result.payload and {point for point, _ in result.payload} == {call.point}
        for site, rows in result.payload.items():
            assert rows.positions.tolist() == list(range(len(token_ids)))[part]
            values = padded(rows.weights) if call.point == "attn" else rows.values
            assert values.shape == want[site][part].shape
            assert relative(values, want[site][part].float()) <= tolerance
            shifted = want[site].roll(1, 0)[part].float()
            assert relative(values, shifted) >= LEAST_MOVE  # the twin of what is read
        if changed:  # the twin: the same rows without it
            site = ("post_block", max(changed))
            moved = relative(result.payload[site].values, plain[site].float())
            assert moved >= LEAST_MOVE


def test_hooked_llm(pair: Pair) -> None:
    """`examples/peers/transformer_lens.py`: each name has the values of transformers."""
    llm, model = pair
    hooked = HookedLLM(llm)
    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    _, cache = hooked.run_with_cache(prompt)
    assert {*cache} == {*hooked.names()}
    assert len(cache) == LAYERS * len(POINTS_OF) + 1
    want = streams(model, PROMPT, Call())
    for name, values in cache.items():
        point, layer = site_of(name)
        rows = want[point, layer % LAYERS].float()
        rows = rows.transpose(0, 1) if point == "attn" else rows
        assert relative(values[0], rows) <= READ_TOLERANCE
        assert relative(values[0], rows.roll(1, -2 if point == "attn" else 0)) >= LEAST_MOVE
    at, last = f"blocks.{LAYER}.hook_resid_post", "blocks.3.hook_resid_post"
    hooks = [(at, {"op": "add", "vector": V}), (f"blocks.{LAYER}.attn.hook_z", HEADLESS)]
    output, changed = hooked.run_with_cache(prompt, last, hooks, temperature=0)
    assert output.finished and [*changed] == [last]
    call = Call(does={LAYER: add(1.0)}, inside={("z", LAYER): without_head})
    rows = streams(model, PROMPT, call)["post_block", 3].float()
    assert relative(changed[last][0], rows) <= READ_TOLERANCE + WRITE_TOLERANCE
    assert relative(changed[last][0], cache[last][0]) >= LEAST_MOVE
    _, some = hooked.run_with_cache(prompt, lambda name: name.endswith("hook_pattern"))
    assert len(some) == LAYERS and torch.equal(some[PATTERN], cache[PATTERN])
    assert hooked.run_with_hooks(prompt, hooks, max_tokens=2).finished
    for name in ("blocks.1.mlp.hook_post", "hook_embed", "blocks.1.attn.hook_q"):
        with pytest.raises(ValueError, match=f"^{name}: is not captured"):
            hooked.run_with_cache(prompt, [name])
    with pytest.raises(ValueError, match="hook is an operation here"):
        hooked.run_with_hooks(prompt, [(at, lambda rows, hook: rows)])


@pytest.mark.long
def test_transformer_lens_itself(pair: Pair, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Its own cache, plain and with two hooks of its own, beside that of `HookedLLM`."""
    llm, _ = pair
    hooked, prompt = HookedLLM(llm), TokensPrompt(prompt_token_ids=PROMPT)
    at = f"blocks.{LAYER}.hook_resid_post"
    names, out = hooked.names(), tmp_path / "cache.pt"
    torch.save({"names": names, "ids": PROMPT, "at": at, "v": V}, tmp_path / "asked.pt")
    done = subprocess.run(
        [sys.executable, "-c", THEIRS, str(save_model(tiny_models, tmp_path / "m")), str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder_of("transformer-lens"))},
        capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(out, weights_only=True)
    hooks = [
        (at, {"op": "add", "vector": V}),
        ("blocks.2.attn.hook_z", {"op": "scale", "heads": [HEAD], "factor": 0.0}),
    ]
    for kind, asked in (("plain", []), ("hooked", hooks)):
        _, cache = hooked.run_with_cache(prompt, None, asked)
        if asked:  # ours is what comes between two points, so what is added there is in it
            cache[f"blocks.{LAYER}.hook_mlp_out"] -= V
        for name in names:
            assert cache[name].shape == theirs[kind][name].shape
            error = relative(cache[name], theirs[kind][name])
            assert error <= READ_TOLERANCE + WRITE_TOLERANCE, name
    for name in ("blocks.2.attn.hook_z", "blocks.3.hook_resid_post", "ln_final.hook_out"):
        assert relative(theirs["plain"][name], theirs["hooked"][name]) >= LEAST_MOVE
