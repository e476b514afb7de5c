# SPDX-License-Identifier: Apache-2.0
"""Effect of focus on weights of attention, in torch: the reference of the kernel, what runs on a
CPU, and what captured weights are made by."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.v1.interventions.focus import FACTOR, RATIO


def normalised(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of logits [..., heads, keys], -inf for keys that are not seen.

    Args:
        sinks: logits that join each head's denominator, [..., heads, 1].
    """
    if sinks is None:
        return logits.softmax(-1)
    largest = logits.amax(-1, keepdim=True).maximum(sinks)
    weights = (logits - largest).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - largest).exp())


class LayerTable(NamedTuple):
    """Focus at one layer: views of the worker's table, P programs, of which the first is empty."""

    forms: torch.Tensor
    """int32 [P, 5]: the rule, how many runs, the first key of all runs and one past the last, and
    whether keys of the span only gain weight."""
    runs: torch.Tensor
    """int32 [P, 3, MAX_RUNS]: starts of runs, sorted, their stops, and the place of each."""
    numbers: torch.Tensor
    """float32 [P, heads, MAX_FACTORS]: at each place the log of a factor; a share at the first."""


class Focus(NamedTuple):
    """Effect of the programs of n queries on some heads of one layer; of one program, its effect at
    any number of queries."""

    rules: torch.Tensor
    """int32 [n, 1]; 0 for none."""
    places: torch.Tensor
    """int64 [n, keys]: which of a program's operations each key is in the span of, 0 for none and
    from 1 on."""
    numbers: torch.Tensor
    """float32 [n, heads, 1 + MAX_FACTORS]: the first is 0, the others as in `LayerTable`."""
    rule: int = 0
    """Value of all `rules`, where the host knows that they have one; else 0."""

    @staticmethod
    def of(table: LayerTable, programs: torch.Tensor, keys: int, heads: Sequence[int]) -> "Focus":
        """Look up what programs do.

        Args:
            programs: int [n], 0 for none.
            keys: how many there are.
            heads: which the queries are of.
        """
        rows = programs.long()
        starts, stops, places = table.runs[rows].unbind(1)
        every = torch.arange(keys, dtype=starts.dtype, device=rows.device)
        every = every.expand(len(rows), -1).contiguous()
        run = (torch.searchsorted(starts.contiguous(), every, right=True) - 1).clamp_min(0)
        inside = (every >= starts.gather(1, run)) & (every < stops.gather(1, run))
        numbers = table.numbers[rows][:, list(heads)]
        return Focus(
            table.forms[rows, :1],
            (places.gather(1, run).long() + 1).where(inside, 0),
            torch.cat([torch.zeros_like(numbers[..., :1]), numbers], dim=2),
        )

    def apply(
        self, logits: torch.Tensor, weights: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the weights of rows that are others with the programs.

        Args:
            logits: float32 [n, heads, keys], -inf for keys that are not seen.
            weights: those without, changed in place.
            sinks: float32 [heads, 1].

        Returns:
            bool [n, heads]: which rows were written.
        """
        if not self.rules.numel():
            return self.rules.bool()
        seen = logits[:, :1] > -torch.inf
        if self.rule == FACTOR:
            made, changed = self._by_factors(logits, seen, sinks)
        elif self.rule:
            made, changed = self._by_share(logits, sinks)
        else:
            made, changed = self._by_share(logits, sinks)
            of_factors, by_factors = self._by_factors(logits, seen, sinks)
            factors = self.rules == FACTOR
            made = torch.where(factors[..., None], of_factors, made)
            changed = torch.where(factors, by_factors, changed & (self.rules > FACTOR))
        weights.copy_(torch.where(changed[..., None], made, weights))
        return changed

    def _by_factors(
        self, logits: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights that factors make, and which rows they change.

        Args:
            seen: bool [n, 1, keys].
        """
        at = self.places[:, None]
        bias = self.numbers.gather(2, at.expand(-1, self.numbers.shape[1], -1))
        places = range(self.numbers.shape[2])
        there = torch.stack([(seen & (at == place)).any(-1) for place in places], -1)
        most = self.numbers.where(there, -torch.inf).amax(-1)
        changed = most > self.numbers.where(there, torch.inf).amin(-1)
        if sinks is not None:
            changed |= most != 0
        return normalised(logits + bias, sinks), changed

    def _by_share(
        self, logits: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights that a share makes, and which rows it changes."""
        inside = self.places[:, None] == 1
        span = logits.where(inside, -torch.inf).logsumexp(-1)
        rest = logits.where(~inside, -torch.inf).logsumexp(-1)
        if sinks is not None:
            rest = torch.logaddexp(rest, sinks[:, 0])
        mass, share = torch.sigmoid(span - rest), self.numbers[..., 1]
        raised = (mass < share) & (span > -torch.inf) & (rest > -torch.inf)
        share = torch.where(self.rules == RATIO, share / (share + 1 - mass), share)
        # Logits of each side of the span, beside the log of what all of it is to have.
        span, rest = span - share.log(), rest - (1 - share).log()
        shift = torch.where(inside, span[..., None], rest[..., None])
        return (logits - shift).exp_(), raised
