# SPDX-License-Identifier: Apache-2.0
"""What travels with a request, from the frontend to the workers and back.

A `Plan` is made once, by the frontend (`vllm.v1.engine.interventions`), from what the user asked.
It is a field of its own on `EngineCoreRequest`, so no client can send a ready-made one.
"""

import msgspec
import numpy as np
import torch

Site = tuple[str, int]
"""(point, layer): layer is the global decoder layer index from 0."""

STEERING_FIELDS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
PLAN_FIELDS = (*STEERING_FIELDS, "capture")
"""The fields of `SamplingParams` that a plan carries in their place."""

UNSTEERED = ""
"""The digest of "nothing is added"."""


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name, "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class TapShape(msgspec.Struct, frozen=True):
    """What the loaded model offers, reported by the workers at start-up."""

    hidden_size: int
    dtype: str
    """Model dtype, torch's name without the prefix: "bfloat16"."""
    points: dict[int, tuple[str, ...]]
    """layer -> the points it has."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.torch_dtype.itemsize


class Content(msgspec.Struct, frozen=True):
    """What one slot of the steering table holds: a vector at each of some sites."""

    digest: str
    """Hex SHA-256 over dtype, hidden size, sites and data."""
    sites: list[Site]
    data: bytes
    """[sites, hidden] in the model's dtype, C order, native endian."""


class Selection(msgspec.Struct, frozen=True):
    """What one consumer gets of a request."""

    sites: list[Site]
    runs: list[int]
    """Positions: start, stop (exclusive) of each run, flattened; sorted, disjoint."""
    named: list[int] = []
    """The part of `runs` the user named outright: reported if the request ends before it."""
    last_generated: bool = False
    """Of the generated positions keep only those in `named` and the last (known at the end)."""


class CapturePlan(msgspec.Struct, frozen=True):
    """The union of the consumers' selections: the rows that leave the device."""

    sites: list[Site]
    runs: list[int]
    consumers: dict[str, Selection]
    hidden_size: int
    dtype: str
    """Of the rows, also when there are none."""


class Plan(msgspec.Struct, frozen=True):
    contents: list[Content] = []
    prefill: str = UNSTEERED
    """Digest of what prompt positions get."""
    decode: str = UNSTEERED
    """Digest of what generated positions get."""
    capture: CapturePlan | None = None


class CapturedChunk(msgspec.Struct, array_like=True):
    """Rows of one request, in position order."""

    positions: np.ndarray
    """int64 [n]."""
    values: torch.Tensor
    """[sites of the capture plan, n, hidden], model dtype, CPU."""


class WorkerRequest(msgspec.Struct, frozen=True):
    """What a worker keeps of a request from its admission to its end."""

    prefill_slot: int
    decode_slot: int
    num_prompt_tokens: int
    capture_sites: tuple[Site, ...]


class StepInterventions(msgspec.Struct):
    """The scheduler's decisions for one step."""

    contents: list[tuple[int, Content]]
    """(slot, content) to write into the table before this step's forward."""
    admitted: dict[str, WorkerRequest]
    rows: dict[str, np.ndarray]
    """Request id -> int32 offsets into the request's tokens of this step whose rows to capture."""
