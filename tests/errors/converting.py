# SPDX-License-Identifier: Apache-2.0
"""What `vllm steering convert` refuses of files of vectors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.errors.case import Case, path
from vllm.entrypoints.cli.steering.vectors import convert_vectors

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
]
