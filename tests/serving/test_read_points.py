# SPDX-License-Identifier: Apache-2.0
"""embed, final and branches behind an engine, beside other rows, steered and plain requests: in
chunks, behind cached prefixes, as scores and means, streamed and in files.

The reference is Hugging Face, run once over the final sequence: what its first block takes, what
its head takes, and what its modules return before that is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, Reference
from tests.conformance.tiny import INNER
from tests.support import serving
from tests.support.serving import Ask, Judge, prompt_of, relative, serve, vector, worst_row
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.steering.points import list_points
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.capture.reader import open as open_captures

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

LAST = models.LAYERS - 1
ROWS_OF_ARENA = 80
ENDS = {"embed": "all", "final": "all"}
BRANCHES = {"attn_out": "all", "mlp_out": "all"}


@dataclass
class Running:
    """An engine with a small arena, its judge, and where its files are."""

    llm: LLM
    judge: Judge
    root: Path


@pytest.fixture(scope="module")
def running(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    root = tmp_path_factory.mktemp("acts")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline", f"filesystem:root={root}"],
        capture_buffer_bytes=ROWS_OF_ARENA * models.HIDDEN * 4,
        max_num_batched_tokens=24,
    )
    yield Running(llm, Judge(Reference(row, models.load(row, path))), root)
    shut_down(llm)


def reading(hooks: dict[str, Any], positions: Any = "all", **more: Any) -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": hooks, "positions": positions, **more}}}


def test_beside_others(running: Running) -> None:
    """In one batch, in chunks that the arena's rows allow; steering at a point is in all that is
    made of it."""
    everywhere = {"post_attn": {1: vector(150)}, "pre_attn": {0: vector(151)}}
    everything = {**ENDS, **BRANCHES, "pre_attn": [0, 2], "post_block": "2-3"}
    asks = [
        Ask(prompt_of(41, 150), reading(everything)),
        Ask(prompt_of(17, 151), {"steering_vectors": everywhere, **reading(everything)}),
        Ask(prompt_of(5, 152), reading({"final": -1}, "predicting")),
        Ask(prompt_of(5, 153), reading({"embed": 0, "mlp_out": [1, 3]}, [0, 3])),
        Ask(prompt_of(5, 154), reading({"post_attn": "all"})),
        Ask(prompt_of(5, 155)),
    ]
    with serving.watching(running.llm) as steps:
        outputs = serve(running.llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        running.judge.check(ask, output)
    assert len(steps.chunks(0)) > 41 // 24 + 6
    payload = outputs[0].capture_results["inline"].payload
    assert list(payload["embed"]) == [0] and list(payload["final"]) == [LAST]
    assert len(payload["attn_out"]) == len(payload["mlp_out"]) == models.LAYERS
    assert torch.equal(payload["embed", 0].values, payload["pre_attn", 0].values)


def test_no_other_rows_would_pass(running: Running) -> None:
    hooks = {**ENDS, **BRANCHES, "pre_attn": [1], "post_attn": [0], "post_block": [0, LAST]}
    [output] = serve(running.llm, [Ask(prompt_of(17, 156), reading(hooks))])
    payload = output.capture_results["inline"].payload
    rows = {site: rows.values for site, rows in payload.items()}
    others = {
        ("embed", 0): ("pre_attn", 1),
        ("final", LAST): ("post_block", LAST),
        ("attn_out", 0): ("post_attn", 0),
        ("attn_out", 1): ("attn_out", 2),
        ("mlp_out", 0): ("attn_out", 0),
        ("mlp_out", LAST): ("post_block", LAST),
    }
    for site, other in others.items():
        assert relative(rows[site], rows[other]) > LEAST_MOVE, site
        assert worst_row(rows[site].roll(1, 0), rows[site]) > LEAST_MOVE, site


def test_branches_are_differences_in_float32(running: Running) -> None:
    hooks = {**BRANCHES, "pre_attn": 2, "post_attn": 2, "post_block": 2}
    [output] = serve(running.llm, [Ask(prompt_of(17, 157), reading(hooks))])
    rows = output.capture_results["inline"].payload
    pre, post, block = (rows[point, 2].values.float() for point in STREAM_POINTS)
    assert torch.equal(rows["attn_out", 2].values, post - pre)
    assert torch.equal(rows["mlp_out", 2].values, block - post)
    assert rows["mlp_out", 2].values.dtype == torch.float32


@pytest.mark.parametrize("hooks", [ENDS, BRANCHES], ids=["ends", "branches"])
def test_scores_and_means(running: Running, hooks: dict[str, Any]) -> None:
    """Of the rows of the same request, under a matrix for all sites and under one for each."""
    matrix = torch.randn(2 * len(hooks), models.HIDDEN, generator=torch.Generator().manual_seed(1))
    one, *each = matrix[:2], *matrix.view(len(hooks), 2, -1)
    by_point = {point: {"all": part} for point, part in zip(hooks, each, strict=True)}
    captures = [
        {"hooks": hooks, "positions": "all_prompt"},
        {"hooks": hooks, "positions": "all_prompt", "project": one},
        {"hooks": hooks, "positions": "all_prompt", "project": by_point},
        {"hooks": hooks, "positions": "all_prompt", "reduce": "mean"},
    ]
    ask = Ask(prompt_of(41, 158), {"capture": {"inline": captures}})
    [output] = serve(running.llm, [ask])
    parts = [output.capture_results[f"inline[{i}]"].payload for i in range(len(captures))]
    rows, alike, apart, means = ({s: r.values for s, r in part.items()} for part in parts)
    for site, values in rows.items():
        own = torch.as_tensor(by_point[site[0]]["all"])
        for got, want, other in (
            (alike[site], values @ one.T, values.roll(1, 0) @ one.T),
            (apart[site], values @ own.T, values @ own.flip(0).T),
            (means[site], values.mean(0)[None], values[:-1].mean(0)[None]),
        ):
            assert got.dtype == torch.float32
            assert relative(got, want) <= READ_TOLERANCE < 0.005 < relative(got, other)


def test_files(running: Running) -> None:
    """They give back what inline does: rows of both ends, and branches as float32."""
    for tag, hooks in (("ends", ENDS), ("branches", BRANCHES)):
        ask = Ask(prompt_of(9, 159), reading(hooks))
        ask.fields["capture"]["filesystem"] = {
            "hooks": hooks, "positions": "all", "tag": tag, "request_id": "one",
        }  # fmt: skip
        [output] = serve(running.llm, [ask])
        running.judge.check(ask, output)
        inline = output.capture_results["inline"].payload
        assert output.capture_results["filesystem"].status == "ok"
        [stored] = [r for r in open_captures(str(running.root)) if tag in str(r.path)]
        assert set(stored.sites) == set(inline)
        for point, layer in stored.sites:
            assert torch.equal(stored.rows(point, layer).values, inline[point, layer].values)


def test_streamed(running: Running) -> None:
    ask = Ask(prompt_of(5, 160), reading({**ENDS, **BRANCHES}))
    [output] = serve(running.llm, [ask])
    whole = output.capture_results["inline"].payload
    streamed = serving.streamed(running.llm, ask)
    assert streamed.keys() == whole.keys()
    for site, rows in streamed.items():
        assert rows.positions.tolist() == whole[site].positions.tolist()
        assert relative(rows.values, whole[site].values) <= READ_TOLERANCE


def test_cached_prefixes(running: Running) -> None:
    """What is read at the last prompt token keeps the whole hit."""
    prompt, hits = prompt_of(70, 161), []
    for positions in ("last_prompt", "last_prompt", "all"):
        ask = Ask(prompt, reading({**ENDS, "mlp_out": -1}, positions))
        [output] = serve(running.llm, [ask])
        running.judge.check(ask, output)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 64, 0]


@pytest.mark.parametrize(
    ("name", "layers", "captured", "heads"),
    [
        (
            "llama",
            "pre_attn, post_attn, post_block, attn_out, mlp_out",
            "embed at layer 0, final at layer 3, attn_out, mlp_out",
            "layers 0-3, where --capture-points has them: q 4 x 32, k 2 x 32, v 2 x 32, z 4 x 32",
        ),
        (
            "gemma4",
            "pre_attn, post_attn, post_block, attn_out",
            "embed at layer 0, final at layer 3, attn_out",
            "layer 3, where --capture-points has them: q 4 x 64, k 2 x 64, v 2 x 64, z 4 x 64",
        ),
        (
            "gptj",
            "pre_attn, post_block",
            "embed at layer 0, final at layer 3",
            "layers 0-3, where --capture-points has them: q 3 x 32, k 3 x 32, v 3 x 32, z 3 x 32",
        ),
    ],
)
def test_listed_by_the_command(
    name: str,
    layers: str,
    captured: str,
    heads: str,
    tiny_models: TinyModels,
    capsys: pytest.CaptureFixture,
) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    list_points(parser.parse_args(["--model", str(tiny_models.path(name))]))
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith(f"  layers 0-3: {layers}  (")
    assert f"  captured, not steered: {captured}" in said
    last = [f"  heads of {heads}"]
    within = "within branches of layers 0-3, where --capture-points has them"
    last.append(f"  {within}: mlp_act {INNER}")
    if name != "gemma4":
        named = "--capture-points or --steering-points"
        last.append(f"  read by branches in layers 0-3, where {named} has it: mlp_in")
    assert said[-len(last) :] == last
