# SPDX-License-Identifier: Apache-2.0
"""Vectors, and files of modules as others write them."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

from tests.support.plans import HIDDEN


def rows(seed: int = 0, count: int = 1, width: int = HIDDEN) -> np.ndarray:
    """float32 [count, width], with numbers that no shorter type holds."""
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def archive(members: dict[str, bytes], **options: Any) -> bytes:
    opened = io.BytesIO()
    with zipfile.ZipFile(opened, "w", **options) as written:
        for name, data in members.items():
            written.writestr(name, data)
    return opened.getvalue()


def npy(array: np.ndarray, **options: Any) -> bytes:
    opened = io.BytesIO()
    np.lib.format.write_array(opened, array, **options)
    return opened.getvalue()


def tensors(*named: tuple[str, Any], **metadata: str) -> bytes:
    return safetensors.torch.save({n: torch.as_tensor(v) for n, v in named}, metadata or None)


def directions(*named: tuple[str, Any], kind: str = "controlvector", **keys: Any) -> bytes:
    """A GGUF file."""
    with tempfile.NamedTemporaryFile() as file:
        writer = gguf.GGUFWriter(file.name, kind)
        for key, words in keys.items():
            writer.add_array(key, words)
        for name, vector in named:
            writer.add_tensor(name, np.asarray(vector))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(file.name).read_bytes()


GOOD = rows()[0]
