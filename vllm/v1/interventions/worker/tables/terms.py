# SPDX-License-Identifier: Apache-2.0
"""Device side of ops other than addition: terms, and the programs that list them."""

import numpy as np
import torch

from vllm.config.steering import SteeringConfig
from vllm.model_executor.layers.steering_terms import TermTables
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.messages import PlacedTerm, StepInterventions
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.terms import Scalars

_LANE = Scalars._fields.index("lane")


class TermTable:
    """The tables that `TermTables` of all sites refer to.

    Args:
        sites: those of this worker that may be steered.
        shape: of the model.
        program: int32 [max tokens], the program of each token of a step.
    """

    def __init__(
        self,
        sites: list[Site],
        config: SteeringConfig,
        shape: TapShape,
        program: torch.Tensor,
    ) -> None:
        device = program.device
        self._index = {site: i for i, site in enumerate(sites)}
        rows, terms = config.max_steering_rows + 1, config.max_steering_ops
        gated = "gate" in config.steering_families

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        hidden, lanes = shape.hidden_size, shape.lanes
        self._vectors = zeros(rows, lanes * hidden, dtype=torch.float32)
        self._scalars = zeros(lanes, rows, len(Scalars._fields), dtype=torch.float32)
        self._probes = zeros(rows, dtype=torch.int32)
        self._gate_owners = zeros(rows, dtype=torch.int32)
        self._programs = zeros(len(sites), rows, terms, dtype=torch.int32)
        ungated = zeros(1, 1, dtype=torch.float32)
        of_lanes = (lanes,) if lanes > 1 else ()
        self.at = {
            site: TermTables(
                program=program,
                programs=self._programs[i],
                vectors=self._vectors,
                scalars=self._scalars if of_lanes else self._scalars[0],
                probes=self._probes,
                gate_owners=self._gate_owners,
                gates=zeros(*of_lanes, rows, terms, dtype=torch.float32) if gated else ungated,
                norms=bool({"norm_match", "normalize"} & set(config.steering_families)),
                gated=gated,
            )
            for i, site in enumerate(sites)
        }

    def apply(self, step: StepInterventions) -> None:
        """Take over new terms and programs."""
        if step.terms:
            self._put_terms(step.terms)
        if step.programs:
            counts = [len(placed.rows) for placed in step.programs]
            shape = len(self._index), sum(counts), self._programs.shape[2]
            listed, first = np.zeros(shape, dtype=np.int32), 0
            for placed, count in zip(step.programs, counts, strict=True):
                for site, ops in placed.op_sites:
                    if site in self._index:
                        at = listed[self._index[site], first : first + count]
                        at[:, : len(ops)] = placed.terms[:, ops]
                first += count
            rows = self._on_device(np.concatenate([placed.rows for placed in step.programs]))
            self._programs.index_copy_(1, rows, self._on_device(listed))
            gate_owners = np.array([p.gate_owner_row for p in step.programs], dtype=np.int32)
            self._gate_owners.index_copy_(0, rows, self._on_device(gate_owners.repeat(counts)))

    def forget(self) -> None:
        """Zero the tables: the device's memory was lost."""
        for table in (
            self._vectors,
            self._scalars,
            self._probes,
            self._gate_owners,
            self._programs,
        ):
            table.zero_()

    def _put_terms(self, placed: list[PlacedTerm]) -> None:
        rows = self._on_device(np.array([p.row for p in placed], dtype=np.int64))
        vectors = np.stack([np.frombuffer(p.term.vector, np.float32) for p in placed])
        self._vectors.index_copy_(0, rows, self._on_device(vectors))
        scalars = np.array([p.term.scalars for p in placed], dtype=np.float32)
        # In a lane that it leaves alone a term's numbers are zeros, with which it does nothing.
        lane, lanes = scalars[:, _LANE, None], np.arange(len(self._scalars))[:, None, None]
        of_lanes = np.where((lane < 0) | (lane == lanes), scalars, np.float32(0))
        self._scalars.index_copy_(1, rows, self._on_device(of_lanes))
        probe_rows = np.array([p.probe_row for p in placed], dtype=np.int32)
        self._probes.index_copy_(0, rows, self._on_device(probe_rows))
        gated = [p for p in placed if p.probe_row]
        if gated:
            rows = self._on_device(np.array([p.probe_row for p in gated], dtype=np.int64))
            probes = np.stack([np.frombuffer(p.term.probe, np.float32) for p in gated])
            self._vectors.index_copy_(0, rows, self._on_device(probes))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, self._vectors.device)
