# SPDX-License-Identifier: Apache-2.0
"""examples/peers/on_capture.py: one call a site, with all of its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.peers.on_capture import Key, OnCapture
from tests.support.consumers import SITES, WIDTH, batch_of, request_of
from vllm.v1.capture.consumer import RequestEnd

pytestmark = pytest.mark.quick


class Seen(OnCapture):
    def __init__(self) -> None:
        self.calls: list[tuple[Key, torch.Tensor, dict[str, Any]]] = []

    def on_capture(self, key: Key, tensor: torch.Tensor, sidecar: dict[str, Any]) -> None:
        self.calls.append((key, tensor, sidecar))


def test_each_site_once_at_the_end() -> None:
    consumer = Seen()
    session = consumer.open(request_of("mine"))
    session.rows(batch_of(0, 1))
    session.rows(batch_of(3))
    assert not consumer.calls
    assert session.done(RequestEnd(num_tokens=5, error="stopped")) == len(SITES)
    assert [key for key, _, _ in consumer.calls] == [("mine", n, point) for point, n in SITES]
    for _, rows, sidecar in consumer.calls:
        assert rows.shape == (3, WIDTH) and rows[:, 0].tolist() == [0.0, 1.0, 3.0]
        assert sidecar["positions"] == [0, 1, 3] and sidecar["token_ids"] == [100, 101, 103]
        assert (sidecar["num_tokens"], sidecar["error"]) == (5, "stopped")


def test_a_request_without_rows_has_empty_ones() -> None:
    consumer = Seen()
    consumer.open(request_of("mine")).done(RequestEnd(num_tokens=4))
    assert [rows.shape for _, rows, _ in consumer.calls] == [(0, WIDTH)] * len(SITES)
