# SPDX-License-Identifier: Apache-2.0
"""What is refused of module files, read or written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.errors.case import Case, path
from tests.errors.steering_calls import steering
from tests.support.plans import LANES, SHAPE, VECTOR, config_of
from vllm.config.steering import FAMILIES, SteeringConfig
from vllm.v1.interventions.global_state import startup_state
from vllm.v1.interventions.shape import TapShape
from vllm.v1.steering.files import (
    export_gguf,
    load,
    save,
)
from vllm.v1.steering.modules import parse_module
from vllm.v1.steering.startup_files import need_startup_files

FOLDER = Path(tempfile.gettempdir())
GOOD = np.array(VECTOR, np.float32)
OPS = [{"op": "normalize", "point": "pre_attn", "layers": [0]}]


def loading(name: str, data: bytes) -> Callable[[], object]:
    """Load a file of that name, in a folder of its own that is gone afterwards."""

    def do() -> object:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(data)
            return load(Path(folder) / name, SHAPE)

    return do


def folder() -> object:
    """Load what is no file."""
    with tempfile.TemporaryDirectory(suffix=".npz") as path:
        return load(path, SHAPE)


def tensor(name: str, vector: np.ndarray = GOOD) -> Callable[[], object]:
    return loading("m.safetensors", safetensors.numpy.save({name: vector}))


def direction(name: str) -> Callable[[], object]:
    def do() -> object:
        import gguf

        with tempfile.TemporaryDirectory() as folder:
            writer = gguf.GGUFWriter(Path(folder) / "m.gguf", "controlvector")
            writer.add_tensor(name, GOOD)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            return load(Path(folder) / "m.gguf", SHAPE)

    return do


def writing(
    write: Callable[..., None], source: Any, shape: TapShape = SHAPE
) -> Callable[[], object]:
    def do() -> object:
        config = config_of(steering_families=list(FAMILIES)).steering_config
        write(FOLDER / "m", parse_module(source, "source", shape, config))
        return None

    return do


ONLY_POST_BLOCK: dict[str, Any] = {
    "steering_families": list(FAMILIES),
    "steering_points": ["post_block"],
}


def starting() -> object:
    """Start with a file that has a vector at a point that cannot be steered."""
    with tempfile.TemporaryDirectory() as folder:
        safetensors.numpy.save_file({"base.pre_attn.1": GOOD}, Path(folder) / "m.safetensors")
        modules = [f"calm={folder}/m.safetensors"]
        return startup_state(config_of(steering_modules=modules, **ONLY_POST_BLOCK))


def missing() -> object:
    """Start with a file that is not there."""
    need_startup_files(SteeringConfig(True, steering_modules=["calm=/nowhere/m.npz"]))
    return None


FILES = [
    Case(
        path("steering_modules.calm", "[Errno 2] No such file or directory: '/nowhere/m.npz'"),
        do=missing,
    ),
    Case(path("steering_modules.calm.pre_attn", allowed="['post_block']"), do=starting),
    Case(
        path("source.pre_attn", allowed="['post_block']"),
        do=lambda: steering(config_of(**ONLY_POST_BLOCK)).register_module("calm", {"ops": OPS}),
    ),
    Case({"allowed": ".safetensors, .gguf, .npz, .json"}, do=loading("m.bin", b"")),
    Case({}, do=folder),
    Case({"given": "2000000"}, do=loading("m.npz", bytes(2_000_000))),
    Case({"format": ".npz", "given": "File is not a zip file"}, do=loading("m.npz", b"PK")),
    Case({"given": "header too small"}, do=loading("m.safetensors", b"")),
    Case({"format": ".gguf", "given": "GGUF magic invalid"}, do=loading("m.gguf", b"GGML")),
    Case({}, do=tensor("post_block.1")),
    Case({"given": "'all'", "allowed": "base, prefill, decode"}, do=tensor("all.post_block.1")),
    Case({"given": "9", "allowed": "0-3"}, do=tensor("base.post_block.9")),
    Case({"given": "[3]", "allowed": "[4]"}, do=tensor("base.post_block.1", GOOD[:3].copy())),
    Case(
        {"given": "1"},
        do=tensor("base.post_block.1", np.where([False, True, False, False], np.nan, GOOD)),
    ),
    Case({"allowed": "float32"}, do=tensor("base.post_block.1", np.full(4, 1e300))),
    Case({}, do=direction("blk.1")),
    Case(path(str(FOLDER / "m"), "normalize"), do=writing(export_gguf, {"ops": OPS})),
    Case(
        path(str(FOLDER / "m"), "normalize"),
        do=writing(save, {"ops": [{**OPS[0], "lane": 1}]}, LANES),
    ),
    Case(
        path("source.vectors.post_block.all", "'all'"),
        do=lambda: save(FOLDER / "m", {"post_block": {"all": VECTOR}}),
    ),
    Case(
        path(str(FOLDER / "m"), "decode"),
        do=writing(export_gguf, {"decode_vectors": {"post_block": {1: VECTOR}}}),
    ),
    Case(
        path(str(FOLDER / "m"), "pre_attn"),
        do=writing(export_gguf, {"pre_attn": {1: VECTOR}, "post_block": {1: VECTOR}}),
    ),
]
