# SPDX-License-Identifier: Apache-2.0
"""Rows of a byte a value: how far they are off, and who reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from tests.support.stored import LAYOUTS, SITES, WIDTH, batch, finish, publish, request, started
from vllm.v1.capture import reader
from vllm.v1.capture.file_format import tensor_name
from vllm.v1.capture.small_rows import FORMS, SCALE, SmallDtype

pytestmark = pytest.mark.quick

SMALL: list[SmallDtype] = ["int8", "float8"]


def rows_of(kind: str, n: int = 200, width: int = 512) -> torch.Tensor:
    """Rows as random numbers; "outliers" have a dimension that is 300 times as large."""
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(5))
    rows[:, 7] *= 300 if kind == "outliers" else 1
    return rows


@pytest.mark.parametrize("kind", ["alike", "outliers"])
@pytest.mark.parametrize("dtype", SMALL)
def test_no_value_is_off_by_more_than_docs_say(dtype: SmallDtype, kind: str) -> None:
    rows, form = rows_of(kind), FORMS[dtype]
    codes, scales = form.pack(rows)
    assert codes.itemsize == 1 and scales.shape == rows.shape[:1]
    errors = (form.unpack(codes, scales) - rows).abs()
    most = rows.abs().amax(dim=-1, keepdim=True)
    bounds = {"int8": most / 254, "float8": torch.maximum(rows.abs() / 16, most / 458_752)}
    assert (errors <= bounds[dtype] * 1.0001).all()
    assert not (errors <= bounds[dtype] / 2).all()
    off = errors.norm(dim=-1) / rows.norm(dim=-1)
    assert off.mean() < {"int8": 0.2 if kind == "outliers" else 0.01, "float8": 0.03}[dtype]


@pytest.mark.parametrize("dtype", SMALL)
def test_rows_that_no_scale_fits(dtype: SmallDtype) -> None:
    """Zeros stay; what is not finite is NaN throughout, and touches no other row."""
    rows = rows_of("alike", n=6, width=8)
    rows[0], rows[1, 2], rows[2, 2], rows[3] = 0, torch.inf, torch.nan, 1e-44
    form = FORMS[dtype]
    read = form.unpack(*form.pack(rows))
    assert (read[0] == 0).all() and read[1:3].isnan().all() and (read[3].abs() < 1e-40).all()
    assert torch.equal(read[4:], form.unpack(*form.pack(rows[4:]))) and read[4:].isfinite().all()
    assert form.pack(rows[:0])[1].shape == (0,)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", SMALL)
def test_files_are_read_back(tmp_path: Path, layout: str, dtype: SmallDtype) -> None:
    """By the reader, and by numpy alone as docs/capture-files.md has it."""
    with started(str(tmp_path), layout=layout, dtype=dtype) as consumer:
        payload, batches = publish(consumer, request(request_id="small"))
    form, captures = FORMS[dtype], reader.open(str(tmp_path))
    prefix = "small/" if layout == "sharded" else ""
    found: dict[str, np.ndarray] = {}
    for path in payload["paths"]:
        found |= safetensors.numpy.load_file(tmp_path / path)
    assert payload["bytes"] == sum(found[name].nbytes for name in found if prefix in name)
    for i, site in enumerate(SITES):
        rows = torch.cat([each.values[i] for each in batches])
        expected = form.unpack(*form.pack(rows))
        read = captures.find("small").rows(*site).values
        assert read.dtype == torch.float32
        assert torch.equal(read.nan_to_num(), expected.nan_to_num())
        name = prefix + tensor_name(site)
        codes = found[name]
        numbers = found[f"{prefix}float8"][codes] if dtype == "float8" else codes
        alone = numbers * found[name + SCALE][:, None]
        assert np.array_equal(alone, expected.numpy(), equal_nan=True)
    assert captures.find("small").record.stored == dtype


def test_what_is_no_row_of_the_model_stays_as_it_is(tmp_path: Path) -> None:
    """Scores, and the layout that upstream's programs read."""
    with started(str(tmp_path), dtype="int8") as consumer:
        publish(consumer, request(request_id="scores", dtype=torch.float32))
        publish(consumer, request(request_id="ehs", layout="ehs"))
        publish(consumer, request(request_id="rows"))
    stored = {each.name: each.record.stored for each in reader.open(str(tmp_path))}
    assert stored == {"scores": "", "ehs": "", "rows": "int8"}


def test_a_request_chooses(tmp_path: Path) -> None:
    with started(str(tmp_path)) as consumer:
        for dtype in (None, *SMALL):
            info = request(request_id=f"of-{dtype}".lower())
            info = replace(info, fields={**info.fields, **({"dtype": dtype} if dtype else {})})
            session = consumer.open(info)
            session.rows(batch(info, [0, 1]))
            finish(session)
    sizes = {
        each.name: (tmp_path / each.path).stat().st_size for each in reader.open(str(tmp_path))
    }
    assert sizes["of-int8"] < sizes["of-none"] + 3 * (4 * 2 - WIDTH * 2) + 300
    stored = {each.name: each.record.stored for each in reader.open(str(tmp_path))}
    assert stored == {"of-none": "", "of-int8": "int8", "of-float8": "float8"}
