# SPDX-License-Identifier: Apache-2.0
"""What `vllm steering convert` refuses of files of vectors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.errors.case import Case, path
from vllm.entrypoints.cli.steering.vectors import convert_reft, convert_vectors

ROW = torch.ones(4)


def converting(
    name: str, write: Callable[[Path], object], *, out: str = "out.safetensors", **asked: Any
) -> Callable[[], object]:
    def do() -> object:
        with tempfile.TemporaryDirectory(prefix="convert") as folder:
            write(Path(folder) / name)
            return convert_vectors(Path(folder) / name, Path(folder) / out, **asked)

    return do


def tensors(content: Any, **asked: Any) -> Callable[[], object]:
    """Convert a file of torch's, at a point."""
    asked = {"point": "post_block", **asked}
    return converting("v.pt", lambda path: torch.save(content, path), **asked)


def text(name: str, content: str) -> Callable[[], object]:
    return converting(name, lambda path: path.write_text(content))


def sparse_file(path: Path) -> None:
    path.touch()
    os.truncate(path, (1 << 30) + 1)


def sparse_reft(path: Path) -> None:
    os.truncate(path, (1 << 28) + 1)


def reft(
    edit: Callable[[dict[str, Any]], object] = lambda config: None,
    more: dict[str, Callable[[Path], object]] | None = None,
) -> Callable[[], object]:
    """Convert a folder of pyreft with one intervention of LoReFT, after an edit of its config."""
    config: dict[str, Any] = {
        "sorted_keys": ["a"],
        "intervention_types": ["<class 'pyreft.interventions.LoreftIntervention'>"],
        "representations": [[1, "block_output"]],
    }
    edit(config)

    def do() -> object:
        with tempfile.TemporaryDirectory(prefix="reft") as made:
            folder = Path(made)
            (folder / "config.json").write_text(json.dumps(config))
            torch.save({"rotate_layer": ROW[:, None], "weight": ROW[None]}, folder / "intkey_a.bin")
            for name, write in (more or {}).items():
                write(folder / name)
            return convert_reft(folder, folder / "out.safetensors")

    return do


def reft_of(content: Any) -> Callable[[], object]:
    return reft(more={"intkey_a.bin": lambda path: torch.save(content, path)})


CONVERTING = [
    Case({}, do=tensors(ROW, out="v.pt")),
    Case({"given": ".gguf, .pt, .pth, .npz, .json, .svec"}, do=text("v.bin", "")),
    Case({"given": str((1 << 30) + 1)}, do=converting("v.pt", sparse_file)),
    Case({"format": ".svec"}, do=text("v.svec", "[]")),
    Case({"format": ".json"}, do=text("v.json", '{"directions": {"1": [], "1": []}}')),
    Case({}, do=text("v.gguf", "GGUF")),
    Case({"format": ".npz"}, do=text("v.npz", "PK")),
    Case({}, do=tensors(np.ones(4))),
    Case({"format": ".pt"}, do=tensors(torch.ones(1).expand(1 << 29))),
    Case(
        {"format": ".npz"},
        do=converting("v.npz", lambda path: np.savez(path, a=np.array([{}])), point="pre_attn"),
    ),
    Case({}, do=tensors(ROW, point=None)),
    Case({}, do=tensors(ROW)),
    Case({}, do=tensors({"J": ROW, "source_layers": [1], "d_model": 4})),
    Case({}, do=tensors({})),
    Case({}, do=tensors(torch.ones(0, 4))),
    Case({"given": "1025"}, do=tensors(torch.ones(1025, 1))),
    Case({"given": "'x'"}, do=tensors("x")),
    Case({"given": "5"}, do=tensors(5)),
    Case({}, do=tensors({"happy": ROW, "sad": ROW})),
    Case({}, do=tensors({True: ROW})),
    Case({}, do=tensors({10**5000: ROW, 1: ROW})),
    Case({"layer": "1"}, do=tensors({1: ROW, "layer.1": ROW})),
    Case({"given": "dict"}, do=tensors({1: {"vector": ROW}})),
    Case({"given": "shape [4, 4]"}, do=tensors(torch.ones(2, 4, 4))),
    Case({"given": "shape []"}, do=tensors(torch.tensor(1.0), layers=["1"])),
    Case({"given": "3", "allowed": "4"}, do=tensors({1: ROW, 2: ROW[1:]})),
    Case({"layer": "7", "given": "0, 1"}, do=tensors(torch.ones(2, 4), layers=["1", "7"])),
    Case(path("--layers", "'all'"), do=tensors(ROW, layers=["all"])),
    Case(path("--layers", "'7-4'"), do=tensors(ROW, layers=["7-4"])),
    Case(path("--layers", "'1024'"), do=tensors(ROW, layers=["1024"])),
    Case({}, do=reft(lambda config: config.pop("sorted_keys"))),
    Case({}, do=reft(lambda config: config["sorted_keys"].pop())),
    Case({"given": str((1 << 28) + 1)}, do=reft(more={"config.json": sparse_reft})),
    Case({"given": "'mine'"}, do=reft(lambda config: config.update(intervention_types=["mine"]))),
    Case({"given": "'../a'"}, do=reft(lambda config: config.update(sorted_keys=["../a"]))),
    Case(
        {"given": "'mlp_output'", "layer": "2"},
        do=reft(lambda config: config.update(representations=[[2, "mlp_output"]])),
    ),
    Case(
        {"given": "'block_output'", "layer": "-1"},
        do=reft(lambda config: config.update(representations=[[-1, "block_output"]])),
    ),
    Case(
        {"given": "post_block", "layer": "1"},
        do=reft(lambda config: config.update({key: value * 2 for key, value in config.items()})),
    ),
    Case({}, do=reft_of(5)),
    Case({}, do=reft_of({"weight": 5})),
    Case({"given": "'rotate_layer' of two dimensions"}, do=reft_of({"weight": ROW[None]})),
    Case({"given": "'weight'"}, do=reft_of({"rotate_layer": ROW[:, None]})),
    Case(
        {"given": "[1, 3]", "allowed": "[1, 4]"},
        do=reft_of({"rotate_layer": ROW[:, None], "weight": ROW[None, :3]}),
    ),
    Case({}, do=reft_of({"rotate_layer": ROW[:, None] * float("nan"), "weight": ROW[None]})),
    Case({}, do=reft(more={"intkey_a.bin": lambda path: path.write_text("x")})),
]
