# SPDX-License-Identifier: Apache-2.0
"""Device side of focus: what programs of requests do at each layer, and the layers' attention."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from vllm.model_executor.layers.attention.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.focus import FACTOR, MAX_FACTORS, MAX_RUNS, FocusOp
from vllm.v1.interventions.worker.attention.formula import LayerTable
from vllm.v1.interventions.worker.attention.keys import LayerReader, Queriers
from vllm.v1.interventions.worker.attention.pages import Sight, pages_of, sight_of, unreadable
from vllm.v1.interventions.worker.attention.reader import AttentionReader, queries_at_once
from vllm.v1.interventions.worker.focus.kernel import TOKENS, TokenTable, Workspace, focus_rows
from vllm.v1.interventions.worker.token_map import TokenMap

_LATER = np.iinfo(np.int32).max
"""Position at which unused runs begin and end: behind all keys."""


class FocusTable:
    """The programs of focused requests, one row of each layer's tables for each.

    Args:
        heads: of each layer of this worker that has attention, how many are here.
        size: how many programs there may be; row 0 does nothing.
        rank: the tensor-parallel one: its heads are this part of the model's.
    """

    def __init__(
        self, heads: Mapping[int, int], size: int, device: torch.device, rank: int = 0
    ) -> None:
        self._heads, self._device, self._rank = heads, device, rank
        self.at = {layer: _empty(size + 1, number, device) for layer, number in heads.items()}
        """Layer -> its table."""

    def forget(self) -> None:
        """Empty the tables: the device's memory was lost."""
        for layer, number in self._heads.items():
            table = self.at[layer]
            for there, empty in zip(table, _empty(len(table.forms), number), strict=True):
                there.copy_(empty)

    def write(self, placed: list[tuple[int, list[FocusOp]]]) -> None:
        """Write programs, each the operations that act together, to their rows."""
        rows = async_tensor_h2d(np.array([row for row, _ in placed]), self._device)
        for layer, number in self._heads.items():
            made = _empty(len(placed), number)
            here = range(self._rank * number, (self._rank + 1) * number)
            for i, (_, acting) in enumerate(placed):
                ops = [op for op in acting if layer in op.heads]
                _write(ops, layer, here, made.forms[i], made.runs[i], made.numbers[i])
            for there, values in zip(self.at[layer], made, strict=True):
                there[rows] = async_tensor_h2d(values, self._device)


def _empty(rows: int, heads: int, device: torch.device | None = None) -> LayerTable:
    runs = torch.full((rows, 3, MAX_RUNS), _LATER, dtype=torch.int32, device=device)
    runs[:, 2] = -1
    return LayerTable(
        torch.zeros(rows, 5, dtype=torch.int32, device=device),
        runs,
        torch.zeros(rows, heads, MAX_FACTORS, device=device),
    )


def _write(
    ops: Sequence[FocusOp],
    layer: int,
    here: range,
    form: torch.Tensor,
    runs: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """Write what operations do at a layer, to the model's heads `here`, of one program, on the
    host."""
    if not ops:
        return
    found = []
    for place, op in enumerate(ops):
        found += [(a, b, place) for a, b in zip(op.runs[::2], op.runs[1::2], strict=True)]
        with np.errstate(divide="ignore"):
            number = np.log(np.float64(op.number)) if op.rule == FACTOR else op.number
        heads = [here.index(head) for head in op.heads[layer] or here if head in here]
        numbers[heads, place] = float(number)
    found.sort()
    runs[:, : len(found)] = torch.tensor(found, dtype=torch.int32).T
    gains = all(op.rule != FACTOR or op.number >= 1 for op in ops)
    form[:] = torch.tensor([ops[0].rule, len(found), found[0][0], found[-1][1], gains])


class FocusedAttention:
    """The attention of one layer, where focused tokens get other rows.

    Args:
        module: whose pages can be read.
        block_table: int32 [requests, blocks] on the device, the runner's own of the layer's group.
        tokens: of this step.
        table: of the layer.
        workspace: on a GPU.
    """

    def __init__(
        self,
        module: Attention,
        block_table: torch.Tensor,
        tokens: TokenMap,
        table: LayerTable,
        workspace: Workspace | None,
    ) -> None:
        self._module, self._block_table = module, block_table
        self._tokens, self._table, self._workspace = tokens, table, workspace

    @cached_property
    def _sight(self) -> Sight:
        return sight_of(self._module)

    def attend(
        self, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Write the rows of focused tokens.

        Args:
            query: [tokens, heads, D], padding behind this step's.
            output: [tokens, heads, E], changed in place.
            lse: float32 [heads, tokens], what `HeadTaps.lse` is.
        """
        if not self._tokens.focuses or unreadable(self._module):
            return
        if self._workspace is None:
            self._attend_here(query, output)
        else:
            self._launch(query, output, lse, self._workspace)

    def warm(self, wants_lse: bool) -> None:
        """Compile, on a GPU, what steps of few and of many tokens need: the first request that is
        focused in one would have all others wait for it."""
        if self._workspace is None or unreadable(self._module):
            return
        module, keys = self._module, pages_of(self._module).keys
        for number in (1, min(TOKENS + 1, len(self._tokens.focus))):
            query = keys.new_zeros(number, module.num_heads, module.head_size)
            output = keys.new_zeros(number, module.num_heads, module.head_size_v)
            lse = self._table.numbers.new_zeros(module.num_heads, number)
            for sums in (None, lse) if wants_lse else (None,):
                self._launch(query, output, sums, self._workspace)

    def _launch(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        workspace: Workspace,
    ) -> None:
        focus_rows(
            query, output, pages_of(self._module), self._block_table, self._sight,
            TokenTable(self._tokens.focus, self._tokens.requests, self._tokens.positions),
            self._table, workspace, lse,
        )  # fmt: skip

    def _attend_here(self, query: torch.Tensor, output: torch.Tensor) -> None:
        """Write them in torch, on a CPU."""
        rows = self._tokens.focus[: len(query)]
        focused = rows.nonzero().squeeze(1)
        reader = LayerReader(self._module, self._block_table, focus=self._table)
        of_heads = AttentionReader({0: reader}, query.device)
        # Rows of one program are of one request.
        for program in rows[focused].unique().tolist():
            heads = self._table.numbers[program].any(1).nonzero().flatten().tolist()
            if not heads:
                continue
            own = focused[rows[focused] == program]
            request = int(self._tokens.requests[own[0]])
            rule = int(self._table.forms[program, 0])
            [sites] = of_heads.sites([(0, tuple(heads))])
            most = int(self._tokens.positions[own[-1]]) + 1
            for some in own.split(queries_at_once(4 * most * len(heads), focused=True)):
                queriers = Queriers.of([request], [len(some)], [()], query.device)
                queriers = queriers._replace(programs=rows[some[:1]], rule=rule)
                at = self._tokens.positions[some]
                asked = query[some][:, heads]
                stop = int(at[-1]) + 1
                weights, changed = sites.weights(asked.flatten(1), at, queriers, stop)
                made = reader.attended(weights[:, 0], request, heads).to(output.dtype)
                before = output[some]
                before[:, heads] = made.where(changed[:, 0, :, None], before[:, heads])
                output[some] = before
