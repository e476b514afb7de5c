# SPDX-License-Identifier: Apache-2.0
"""Folders that pyreft saved, against what pyreft itself makes of rows.

`tests/support/reft_oracles.py` wrote tests/steering/pyreft with the package as shipped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import ROOT
from tests.steering.test_convert import command
from tests.support.op_reference import low_rank
from vllm.config.points import STREAM_POINTS
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.low_rank import low_rank_of
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.steering.files import load
from vllm.v1.steering.reft_files import module_of_reft, read_reft

pytestmark = pytest.mark.quick

FOLDERS = ROOT / "tests" / "steering" / "pyreft"
KINDS = ("loreft", "noreft", "consreft", "lobireft", "direft", "nodireft")
RANKS = {0: 4, 2: 1}
AT = 3
"""The position at which the written model had its intervention."""
TOLERANCE = 2e-5
"""Of float32; rows are of norm about 4, and move by 1 at least."""


def changed(op: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """float64 [rows, hidden], by the reference."""
    given = {key: op[key].double().numpy() for key in "ABc"}
    return torch.stack([torch.from_numpy(low_rank(row.double().numpy(), **given)) for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_interventions_are_what_pyreft_does(kind: str) -> None:
    wanted, ops = load_file(FOLDERS / kind / "rows.safetensors"), read_reft(FOLDERS / kind)
    assert [(op["point"], op["layers"], len(op["A"])) for op in ops] == [
        ("post_block", layer, rank) for layer, rank in RANKS.items()
    ]
    for op in ops:
        before, after = (wanted[f"{op['layers']}.{name}"].double() for name in ("before", "after"))
        assert float((changed(op, before) - after).abs().max()) < TOLERANCE
        assert float((before - after).norm(dim=1).min()) > 0.01
        twin = {**op, "c": op["c"] + 0.1}
        assert float((changed(twin, before) - after).abs().max()) > 1000 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_block_output_is_post_block(kind: str) -> None:
    """What a block returned without and with the intervention, in a model that pyreft ran."""
    wanted, (op, _) = load_file(FOLDERS / kind / "rows.safetensors"), read_reft(FOLDERS / kind)
    plain, steered = wanted["block.plain"].double(), wanted["block.steered"].double()
    moved = (plain != steered).any(dim=1)
    assert moved.tolist() == [i == AT for i in range(len(plain))]
    assert float((changed(op, plain[AT : AT + 1]) - steered[AT]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_becomes_a_module(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "v.safetensors"
    assert command(FOLDERS / kind, out) == 0
    layers = dict.fromkeys(range(3), LayerShape(STREAM_POINTS))
    module = load(out, TapShape(16, "float32", layers))
    for op, made in zip(read_reft(FOLDERS / kind), module.ops, strict=True):
        assert (made.name, made.sites) == ("low_rank", [("post_block", op["layers"])])
        again = low_rank_of(made.terms)
        for key in "ABc":
            assert torch.equal(torch.from_numpy(getattr(again, key)), op[key])
    assert command(FOLDERS / kind, out) == 2, "it is there already"


def edited(folder: Path, kind: str, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy whose config is edited."""
    shutil.copytree(FOLDERS / kind, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_other_names_of_places(tmp_path: Path) -> None:
    def name(config: dict[str, Any]) -> None:
        config["representations"][0][1] = "model.layers[1].output"
        config["representations"][1] = {"layer": 2, "component": "block_input"}

    places = [
        (op["point"], op["layers"]) for op in read_reft(edited(tmp_path / "a", "direft", name))
    ]
    assert places == [("post_block", 1), ("pre_attn", 2)]


def test_a_module_has_no_positions(tmp_path: Path) -> None:
    def twice(config: dict[str, Any]) -> None:
        config["representations"][1][0] = 0

    folder = edited(tmp_path / "a", "direft", twice)
    assert len(read_reft(folder)) == 2
    with pytest.raises(InterventionError, match="has several interventions at post_block of layer"):
        module_of_reft(folder)
