# SPDX-License-Identifier: Apache-2.0
"""A capture consumer of its own distribution: what is the stream like at each point?

    pip install --no-deps examples/capture_consumers/site_statistics
    vllm serve MODEL --capture-consumers site_statistics:path=statistics.safetensors

    capture={"site_statistics": {"hooks": {"post_block": "all"}, "positions": "all"}}

It keeps two numbers for each component of each site, however many tokens are served, and writes
them when the engine stops.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    ConsumerContext,
    RequestEnd,
    RequestInfo,
    RowBatch,
)

Site = tuple[str, int]


@dataclass
class Moments:
    """Of rows [n, hidden], in float64. Two of them add up exactly as their rows would (Chan et al.
    1979), so no row is kept and the order of the requests does not matter."""

    count: int
    mean: torch.Tensor
    """[hidden]."""
    squares: torch.Tensor
    """[hidden]: the sum of squared deviations from the mean."""

    @classmethod
    def of(cls, rows: torch.Tensor) -> Moments:
        rows = rows.double()
        mean = rows.mean(dim=0)
        return cls(len(rows), mean, (rows - mean).square().sum(dim=0))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = apart.square() * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + between)

    @property
    def variance(self) -> torch.Tensor:
        return self.squares / self.count


class SiteStatistics(CaptureConsumer):
    # Rows are used where they arrive, instead of being sent to the process that serves.
    location = "engine"

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)  # a wrong path is an error at the start
        self._moments: dict[Site, Moments] = {}
        self._lock = threading.Lock()  # sessions run in several threads
        self._model = ""

    @classmethod
    def check_request(cls, fields: Mapping[str, Any], path: str) -> dict[str, Any]:
        if "project" in fields:
            raise ValueError(f"{path}.project: statistics are of whole rows")
        return super().check_request(fields, path)

    def start(self, context: ConsumerContext) -> None:
        self._model = context.model
        if context.engine_index:  # one file for each data-parallel engine
            self.path = self.path.with_stem(f"{self.path.stem}-{context.engine_index}")

    def open(self, request: RequestInfo) -> CaptureSession:
        return _Session(self, request)

    def merge(self, moments: Mapping[Site, Moments]) -> None:
        with self._lock:
            for site, new in moments.items():
                old = self._moments.get(site)
                self._moments[site] = new if old is None else old + new

    def shutdown(self) -> None:
        if not self._moments:
            return
        tensors = {}
        for (point, layer), moments in self._moments.items():
            tensors[f"{point}.{layer}.count"] = torch.tensor(moments.count)
            tensors[f"{point}.{layer}.mean"] = moments.mean
            tensors[f"{point}.{layer}.variance"] = moments.variance
        unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        save_file(tensors, unfinished, {"model": self._model})
        os.replace(unfinished, self.path)  # under its name only when it is whole


class _Session(CaptureSession):
    """One completion. Its rows count when it is over, so one that failed has left nothing."""

    def __init__(self, consumer: SiteStatistics, request: RequestInfo) -> None:
        self._consumer = consumer
        self._sites = request.sites
        self._moments: dict[Site, Moments] = {}
        self._rows = 0

    def rows(self, batch: RowBatch) -> None:
        for site, values in zip(self._sites, batch.values, strict=True):
            new = Moments.of(values)
            self._moments[site] = self._moments[site] + new if site in self._moments else new
        self._rows += len(batch.positions)

    def done(self, end: RequestEnd) -> dict[str, int]:
        self._consumer.merge(self._moments)
        return {"rows": self._rows}  # `CaptureResult.payload`: plain data, it crosses processes


def load(path: str | Path) -> dict[Site, Moments]:
    """What an engine wrote."""
    tensors = load_file(path)
    found = {}
    for name in tensors:
        point, layer, what = name.split(".")
        if what == "mean":
            count = int(tensors[f"{point}.{layer}.count"])
            squares = tensors[f"{point}.{layer}.variance"] * count
            found[point, int(layer)] = Moments(count, tensors[name], squares)
    return found
