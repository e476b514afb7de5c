# SPDX-License-Identifier: Apache-2.0
"""Device side of ops other than addition: terms, and the programs that list them."""

from collections.abc import Mapping
from itertools import groupby

import numpy as np
import torch

from vllm.config.operations import OPERATIONS
from vllm.config.steering import SteeringConfig
from vllm.model_executor.layers.steering_terms import TermTables
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.interventions.messages import PlacedProgram, PlacedTerm
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.worker.token_map import TokenMap
from vllm.v1.steering_formula import Scalars

_LANE = Scalars._fields.index("lane")


class TermTable:
    """The vectors and numbers of terms, which programs of all sites list: the fields of
    `TermTables` that all sites share."""

    def __init__(self, config: SteeringConfig, shape: TapShape, device: torch.device) -> None:
        rows, kind = config.max_steering_rows + 1, torch.float32
        lanes, columns = shape.lanes, len(Scalars._fields)
        self.vectors = torch.zeros(rows, lanes * shape.hidden_size, dtype=kind, device=device)
        self._scalars = torch.zeros(lanes, rows, columns, dtype=kind, device=device)
        self.scalars = self._scalars if lanes > 1 else self._scalars[0]
        self.probes = torch.zeros(rows, dtype=torch.int32, device=device)
        self.encoders = torch.zeros_like(self.probes)

    def write(self, placed: list[tuple[int, PlacedTerm]]) -> None:
        """Write new terms to their rows."""
        device, terms = self.vectors.device, [term for _, term in placed]
        rows = async_tensor_h2d(np.array([row for row, _ in placed], dtype=np.int64), device)
        vectors = np.stack([np.frombuffer(term.vector, np.float32) for term in terms])
        self.vectors.index_copy_(0, rows, async_tensor_h2d(vectors, device))
        scalars = np.array([term.scalars for term in terms], dtype=np.float32)
        # In a lane that it leaves alone a term's numbers are zeros, with which it does nothing.
        lane, lanes = scalars[:, _LANE, None], np.arange(len(self._scalars))[:, None, None]
        of_lanes = np.where((lane < 0) | (lane == lanes), scalars, np.float32(0))
        self._scalars.index_copy_(1, rows, async_tensor_h2d(of_lanes, device))
        read = np.array([(term.probe_row, term.encoder_row) for term in terms], dtype=np.int32)
        for table, values in zip((self.probes, self.encoders), read.T.copy(), strict=True):
            table.index_copy_(0, rows, async_tensor_h2d(values, device))

    def forget(self) -> None:
        """Zero the table: the device's memory was lost."""
        for table in (self.vectors, self._scalars, self.probes, self.encoders):
            table.zero_()


class ProgramTable:
    """The programs of all sites.

    Args:
        sites: those of this worker that may be steered.
        shape: of the model.
        terms: that the programs list.
        tokens: of a step.
        autoencoders: on the device, of each site whose rows may be made what they reconstruct.
    """

    def __init__(
        self,
        sites: list[Site],
        config: SteeringConfig,
        shape: TapShape,
        terms: TermTable,
        tokens: TokenMap,
        autoencoders: Mapping[Site, tuple[Autoencoder, ...]],
    ) -> None:
        self._index = {site: i for i, site in enumerate(sites)}
        rows, most = config.max_steering_rows + 1, config.max_steering_ops
        families, device = config.steering_families, tokens.program.device
        gated = "gate" in families
        self._gate_owners = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._programs = torch.zeros(len(sites), rows, most, dtype=torch.int32, device=device)
        ungated = torch.zeros(1, 1, 1, device=device)
        of_lanes = (shape.lanes,) if shape.lanes > 1 else ()
        kept = 1 + tokens.depth, rows, most
        self.at = {
            site: TermTables(
                program=tokens.program,
                runs=tokens.runs,
                programs=self._programs[i],
                vectors=terms.vectors,
                scalars=terms.scalars,
                probes=terms.probes,
                encoders=terms.encoders,
                gate_owners=self._gate_owners,
                gates=torch.zeros(*of_lanes, *kept, device=device) if gated else ungated,
                norms=any(o.of_norms for o in OPERATIONS.values() if o.name in families),
                gated=gated,
                encodes=any(o.reads for o in OPERATIONS.values() if o.name in families)
                or bool(autoencoders),
                autoencoders=autoencoders.get(site, ()),
            )
            for i, site in enumerate(sites)
        }
        """Site -> the tables that its tap reads."""

    def write(self, placed: list[tuple[int, PlacedProgram]]) -> None:
        """Write new programs to their rows."""
        shape = len(self._index), len(placed), self._programs.shape[2]
        listed, first = np.zeros(shape, dtype=np.int32), 0
        # Those of a request follow each other, and a request may have a thousand.
        for op_sites, programs in groupby((each for _, each in placed), lambda p: p.op_sites):
            terms = np.array([program.terms for program in programs], dtype=np.int32)
            for site, ops in op_sites:
                if site in self._index:
                    at = listed[self._index[site], first : first + len(terms)]
                    at[:, : len(ops)] = terms[:, ops]
            first += len(terms)
        device = self._programs.device
        rows = async_tensor_h2d(np.array([row for row, _ in placed], dtype=np.int64), device)
        self._programs.index_copy_(1, rows, async_tensor_h2d(listed, device))
        owners = [(each.gate_owner_row, each.latch_owner_row) for _, each in placed]
        gate_owners = np.array(owners, dtype=np.int32).T.copy()
        self._gate_owners.index_copy_(1, rows, async_tensor_h2d(gate_owners, device))

    def forget(self) -> None:
        """Zero the tables: the device's memory was lost."""
        self._programs.zero_()
        self._gate_owners.zero_()
