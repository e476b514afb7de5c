# SPDX-License-Identifier: Apache-2.0
"""The layout `ehs`, read by upstream's own loader and by our reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.stored import SITES, WIDTH, publish, request, same, started, whole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.v1.capture import reader
from vllm.v1.capture.consumer import RowBatch

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_upstreams_loader_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    info = request(dtype=dtype, request_id="one", layout="ehs")
    with started(str(tmp_path)) as consumer:
        payload, batches = publish(consumer, info)
    path, lock = (str(tmp_path / name) for name in payload["paths"])
    assert (path + ".lock", os.path.getsize(lock)) == (lock, 0)
    found = load_hidden_states(path)
    rows = [whole(batches, site) for site in range(len(SITES))]
    states = found["hidden_states"]
    assert states.shape == (3, len(SITES), WIDTH) and states.dtype == dtype
    assert found["token_ids"].tolist() == rows[0].token_ids.tolist()
    for site, each in enumerate(rows):
        assert torch.equal(states[:, site].view(torch.uint8), each.values.view(torch.uint8))
    assert not torch.equal(states[:, 0].view(torch.uint8), states[:, 1].view(torch.uint8))
    [stored] = reader.open(str(tmp_path))
    assert (stored.layout, stored.sites, stored.complete) == ("packed", SITES, True)
    for (point, layer), each in zip(SITES, rows, strict=True):
        assert same(stored.rows(point, layer), each)
    cleanup_hidden_states(path)
    assert not list(reader.open(str(tmp_path)))
    assert not list((tmp_path / "default").iterdir())


def is_last_site(states: torch.Tensor, batches: list[RowBatch]) -> bool:
    last = whole(batches, len(SITES) - 1).values
    return torch.equal(states[:, -1].view(torch.uint8), last.view(torch.uint8))


@pytest.mark.parametrize("taken", ["error", "overwrite", "suffix"])
def test_a_name_that_is_taken(tmp_path: Path, taken: Any) -> None:
    info = request(request_id="one", layout="ehs")
    with started(str(tmp_path), on_collision=taken) as consumer:
        first, old = publish(consumer, info)
        if taken == "error":
            with pytest.raises(FileExistsError, match="one exists already"):
                publish(consumer, info, seed=1)
        else:
            second, new = publish(consumer, info, seed=1)
            found = load_hidden_states(str(tmp_path / second["paths"][0]))["hidden_states"]
            assert is_last_site(found, new)
    found = load_hidden_states(str(tmp_path / first["paths"][0]))["hidden_states"]
    assert is_last_site(found, old) == (taken != "overwrite")


def test_what_fails_later_leaves_nothing(tmp_path: Path) -> None:
    with started(str(tmp_path), layout="ehs") as consumer:
        payload, _ = publish(consumer, request(request_id="one"))
        assert len(list((tmp_path / "default").iterdir())) == 2
        consumer.withdraw(payload["paths"])
        assert not list((tmp_path / "default").iterdir())


def test_what_fails_later_leaves_a_neighbour_alone(tmp_path: Path) -> None:
    """A name may end like a lock."""
    with started(str(tmp_path), layout="per_file") as consumer:
        publish(consumer, request(request_id="one"))
        publish(consumer, request(request_id="one.lock"))
        consumer.withdraw(["default/one"])
        assert [path.name for path in (tmp_path / "default").iterdir()] == ["one.lock"]
