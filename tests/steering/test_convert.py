# SPDX-License-Identifier: Apache-2.0
"""`vllm steering convert` makes of each format the module that its vectors mean."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import SHAPE
from vllm.entrypoints.cli.steering.main import SteeringSubcommand
from vllm.v1.interventions.vectors import vectors_of
from vllm.v1.steering.files import export_gguf, load

pytestmark = pytest.mark.quick

WIDTH = SHAPE.hidden_size
ROWS = np.random.default_rng(3).standard_normal((4, WIDTH)).astype(np.float32)
BY_LAYER = {layer: ROWS[layer] for layer in (1, 2)}


def command(*argv: object) -> int:
    """The exit status of `vllm steering convert`."""
    parser = argparse.ArgumentParser()
    SteeringSubcommand().subparser_init(parser.add_subparsers())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        SteeringSubcommand.cmd(parser.parse_args(["steering", "convert", *map(str, argv)]))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def write_torch(content: Any, **more: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path, **more)


def write_cast(path: Path) -> None:
    directions = {str(layer): row.tolist() for layer, row in BY_LAYER.items()}
    said = {"model_type": "llama", "directions": directions, "explained_variances": {"1": 0.5}}
    path.write_text(json.dumps(said))


TENSORS = {layer: torch.from_numpy(row) for layer, row in BY_LAYER.items()}
MATRIX = torch.from_numpy(ROWS)
ONE, TWO = {"pre_attn": {1: ROWS[1]}}, {"pre_attn": BY_LAYER}
AT = ("--point", "pre_attn")
CASES: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...], Any]] = {
    "repeng": (
        "v.gguf",
        lambda path: export_gguf(path, {"post_block": BY_LAYER}, "llama"),
        (),
        {"post_block": BY_LAYER},
    ),
    "at another point": (
        "v.gguf",
        lambda path: export_gguf(path, {"post_block": BY_LAYER}, "llama"),
        (*AT, "--layers", "2"),
        {"pre_attn": {2: ROWS[2]}},
    ),
    "CAST": ("v.svec", write_cast, (), {"post_block": BY_LAYER}),
    "CAST, as JSON": ("v.json", write_cast, ("--layers", "1"), {"post_block": {1: ROWS[1]}}),
    "matrix": ("v.pt", write_torch(MATRIX), (*AT, "--layers", "1-2"), TWO),
    "all rows": ("v.pt", write_torch(MATRIX), AT, {"pre_attn": dict(enumerate(ROWS))}),
    "persona vector": (
        "v.pt",
        write_torch(MATRIX),
        (*AT, "--first-layer", "-1"),
        {"pre_attn": dict(enumerate(ROWS[1:]))},
    ),
    "from a layer on": (
        "v.pt",
        write_torch(MATRIX[1:3]),
        (*AT, "--first-layer", "1"),
        TWO,
    ),
    "old format": (
        "v.pth",
        write_torch(MATRIX, _use_new_zipfile_serialization=False),
        (*AT, "--layers", "2", "1"),
        TWO,
    ),
    "list": ("v.pt", write_torch(list(MATRIX)), (*AT, "--layers", "1"), ONE),
    "by layer": ("v.pt", write_torch(TENSORS), AT, TWO),
    "by name": ("v.pt", write_torch({f"layer_{n}": t for n, t in TENSORS.items()}), AT, TWO),
    "rows as matrices": ("v.pt", write_torch({n: t[None] for n, t in TENSORS.items()}), AT, TWO),
    "in its dtype": (
        "v.pt",
        write_torch(MATRIX[1].bfloat16().requires_grad_()),
        (*AT, "--layers", "1"),
        {"pre_attn": {1: MATRIX[1].bfloat16().float().numpy()}},
    ),
    "wrapped": (
        "v.pt",
        write_torch({"vector": MATRIX[1], "model": "m"}),
        (*AT, "--layers", "1"),
        ONE,
    ),
    "parameter": ("v.pt", write_torch(torch.nn.Parameter(MATRIX)), (*AT, "--layers", "1"), ONE),
    "npz, by layer": (
        "v.npz",
        lambda path: np.savez(path, **{str(n): row for n, row in BY_LAYER.items()}),
        AT,
        TWO,
    ),
    "npz, matrix": (
        "v.npz",
        lambda path: np.savez_compressed(path, directions=ROWS.astype(np.float64)),
        (*AT, "--layers", "1"),
        ONE,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_format(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, write, options, expected = CASES[case]
    source, out = tmp_path / name, tmp_path / "out.safetensors"
    write(source)
    assert command(source, out, *options) == 0
    module = load(out, SHAPE)
    assert module.tiers.keys() == {"base"} and not module.ops
    found = vectors_of(module.tiers["base"])
    wanted = {(point, n): row for point, rows in expected.items() for n, row in rows.items()}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[site], row) for site, row in wanted.items())
    layers = ", ".join(str(layer) for _, layer in wanted)
    assert capsys.readouterr().out == f"{out}: vectors of layers {layers}\n"


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (MATRIX, (), "is no mapping; vectors need --point"),
        ({"J": MATRIX}, AT, "is a lens, not vectors"),
        (TENSORS | {2: MATRIX[2][:-1]}, AT, f"[2]: has {WIDTH - 1} values"),
        (MATRIX * torch.tensor([[1], [1], [float("nan")], [1]]), AT, "[2]: is not finite"),
        (np.ones(WIDTH), AT, "is not tensors alone"),
    ],
)
def test_refused(
    content: Any,
    options: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By file and tensor, with nothing written; each message: tests/errors/converting.py."""
    torch.save(content, tmp_path / "v.pt")
    assert command(tmp_path / "v.pt", tmp_path / "out.safetensors", *options) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'v.pt'}") and says in said
    assert sorted(tmp_path.iterdir()) == [tmp_path / "v.pt"]
