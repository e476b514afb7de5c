# SPDX-License-Identifier: Apache-2.0
"""Modules in JSON files, as RhizoNymph/vllm has them: lists and packed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import HIDDEN, SHAPE
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.steering.files import load
from vllm.v1.steering.modules import parse_module
from vllm.v1.steering.unshaped import ANY_FAMILY

pytestmark = pytest.mark.quick

ROWS = np.random.default_rng(0).normal(size=(2, HIDDEN))
LAYERS = [1, 0]
DTYPES = ("float64", "float32", "float16", "bfloat16")


def packed(dtype: str = "float64", **more: Any) -> dict[str, Any]:
    values = torch.from_numpy(ROWS).to(getattr(torch, dtype))
    data = base64.b64encode(values.view(torch.uint8).numpy().tobytes()).decode()
    return {"dtype": dtype, "shape": [2, HIDDEN], "layer_indices": LAYERS, "data": data, **more}


def written(folder: Path, module: Any) -> Path:
    path = folder / "m.json"
    path.write_bytes(module if isinstance(module, bytes) else json.dumps(module).encode())
    return path


def digest(rows: Any, scale: float = 1.0, field: str = "vectors") -> str:
    entries = {
        n: {"vector": row, "scale": scale} for n, row in zip(LAYERS, rows.tolist(), strict=True)
    }
    return parse_module({field: {"post_block": entries}}, "m", SHAPE, ANY_FAMILY).digest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("field", ["vectors", "prefill_vectors", "decode_vectors"])
def test_packed_vectors_are_those_that_were_written(tmp_path: Path, dtype: str, field: str) -> None:
    rounded = torch.from_numpy(ROWS).to(getattr(torch, dtype)).double()
    for scale, more in ((1.0, {}), (1.0, {"scales": None}), (-0.5, {"scales": [-0.5, -0.5]})):
        module = {field: {"post_block": packed(dtype, **more)}, "clamps": None}
        got = load(written(tmp_path, module), SHAPE).digest
        assert got == digest(rounded, scale, field)
        assert got != digest(-rounded, scale, field)  # the twin
    if dtype == "bfloat16":  # the twin: what the dtype rounds off is seen
        assert got != digest(torch.from_numpy(ROWS), -0.5, field)


def test_lists_are_those_that_were_written(tmp_path: Path) -> None:
    listed = {str(n): row for n, row in zip(LAYERS, ROWS.tolist(), strict=True)}
    scaled = {n: {"vector": row, "scale": 2.0} for n, row in listed.items()}
    rows = torch.from_numpy(ROWS)
    assert load(written(tmp_path, {"vectors": {"post_block": listed}}), SHAPE).digest == digest(
        rows
    )
    assert load(written(tmp_path, {"post_block": listed}), SHAPE).digest == digest(rows)
    assert load(written(tmp_path, {"post_block": scaled}), SHAPE).digest == digest(rows, 2.0)


def at(**more: Any) -> dict[str, Any]:
    return {"vectors": {"post_block": packed(**more)}}


BROKEN: list[tuple[Any, str]] = [
    (b"{", "FILE: cannot be read as .json: "),
    (b"[1]", "FILE: cannot be read as .json: it is no object"),
    (b"[" * 60_000, "FILE: "),
    (b'{"a": 1, "a": 2}', "it has a twice"),
    (b'{"vectors": {"post_block": {"1": NaN}}}', "FILE.vectors.post_block.1: must be a list"),
    ({}, "FILE: has neither vectors nor operations"),
    ({"clamps": {"post_block": {}}, "vectors": {}}, "FILE: unknown keys ['clamps']"),
    ({"vectors": {"post_block": {"1": [1.0]}}}, "FILE.vectors.post_block.1: has 1 values"),
    ({"vectors": {"post_block": {"9": [1.0]}}}, "FILE.vectors.post_block.9: layer 9"),
    ({"vectors": {"nowhere": packed()}}, "FILE.vectors.nowhere: "),
    (at(dtype="int8"), "what is packed at post_block is of dtype 'int8'"),
    (at(shape=[3, HIDDEN]), "cannot be read as .json: shape"),
    (at(bounds=[[0, 1]]), "has the keys ['bounds', "),
    (at(layer_indices=[1, 1]), "what is packed at post_block names a layer twice"),
    (at(layer_indices=[1]), "FILE: cannot be read as .json: "),
    (at(layer_indices=[1, 99]), "layer 99 is out of range"),
    (at(scales=[1.0]), "FILE: cannot be read as .json: "),
    (at(scales=["x", 1.0]), "FILE.vectors.post_block.1.scale: must be a number"),
    (at(data="!" * 8), "FILE: cannot be read as .json: "),
    (at(data="AAAA"), "FILE: cannot be read as .json: "),
    (at(shape=[2, 10**12]), "FILE: cannot be read as .json: "),
]


@pytest.mark.parametrize(("module", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_errors_name_the_file_and_the_field(tmp_path: Path, module: Any, message: str) -> None:
    file = written(tmp_path, module)
    with pytest.raises(InterventionError) as caught:
        load(file, SHAPE)
    assert str(caught.value).startswith(str(file))
    assert message.replace("FILE", str(file)) in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 400
