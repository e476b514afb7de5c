# SPDX-License-Identifier: Apache-2.0
"""Helpers of the serving tests: ask an engine for several things at once, judge each answer against
Hugging Face, and watch what the scheduler did.

An `Ask` is a prompt with what differs from greedy generation. `Judge` recomputes, from the ask
alone, which rows must come back and what must have been added where; it shares no code with the
engine's own resolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.completions import GREEDY
from tests.conformance.models import HIDDEN, VOCAB
from tests.conformance.reference import Site
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE, Reference
from tests.support.op_deltas import with_ops
from tests.support.rows import taps_of
from tests.support.selected import expected_positions
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config.points import STREAM_POINTS
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture import copies
from vllm.v1.capture.results import merged
from vllm.v1.engine.core_client import InprocClient

GENERATED = 6

_TIERS = {
    "steering_vectors": (True, True),
    "prefill_steering_vectors": (True, False),
    "decode_steering_vectors": (False, True),
}
"""Field of SamplingParams -> whether it acts on (prompt, generated) positions."""


@contextmanager
def by_threads() -> Iterator[None]:
    """Threads copy captured rows, in small pieces, however few there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "DIRECT_BYTES", 1)
        patch.setattr(copies, "PIECE_BYTES", 256)
        patch.setattr(copies, "UNDERWAY_BYTES", 4096)
        patch.setattr(copies, "THREADS", 4)
        yield


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steered(self) -> bool:
        return bool({*_TIERS, "steering"} & self.fields.keys())

    def params(self, log_probs: bool = True) -> SamplingParams:
        """Greedy, full-vocabulary log-probabilities of the generated tokens, changed by `fields`.

        Prompt log-probabilities would switch the prefix cache off, so they are not asked for.
        """
        settings: dict[str, Any] = {"max_tokens": GENERATED, **GREEDY}
        if log_probs:
            settings["logprobs"] = -1
        return SamplingParams(**{**settings, **self.fields})


def prompt_of(length: int, seed: int) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def vector(seed: int, norm: float = 24.0, width: int = HIDDEN) -> torch.Tensor:
    """A random direction, float32 [width]; the streams of the tiny models have norms near 10."""
    values = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return norm * values / values.norm()


def capture(
    positions: Any = "all", points: Sequence[str] = STREAM_POINTS, layers: Any = "all"
) -> dict[str, Any]:
    """The `capture` field for inline rows."""
    hooks = {point: layers for point in points}
    return {"capture": {"inline": {"hooks": hooks, "positions": positions}}}


def serve(llm: LLM, asks: Sequence[Ask], log_probs: bool = True) -> list[Any]:
    """Run all of `asks` as one `generate` call."""
    return llm.generate(
        [TokensPrompt(prompt_token_ids=ask.prompt) for ask in asks],
        [ask.params(log_probs) for ask in asks],
        use_tqdm=False,
    )


def streamed(llm: LLM, ask: Ask) -> Any:
    """What `inline` gives of a request whose outputs are deltas, put together; its rows came in
    several."""
    params = ask.params()
    params.output_kind = RequestOutputKind.DELTA
    llm.llm_engine.add_request("deltas", {"prompt_token_ids": ask.prompt}, params)
    together, parts = None, 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            assert isinstance(output, RequestOutput)
            new = output.outputs[0].capture_results
            assert new is not None
            parts += any(len(rows) for rows in new["inline"].payload.values())
            together = merged(together, new)
    assert parts > 3 and together is not None
    return together["inline"].payload


def log_probs(completion: Any) -> torch.Tensor:
    """float32 [generated, vocab] of one completion output."""
    return torch.tensor([[e[i].logprob for i in range(VOCAB)] for e in completion.logprobs])


def row_tensors(completion: Any) -> dict[Site, torch.Tensor]:
    """(point, layer) -> [n, ..., width] of the inline rows of one completion output."""
    payload = completion.capture_results["inline"].payload
    return {site: rows.values for site, rows in payload.items()}


def deltas_of(ask: Ask, length: int) -> dict[Site, torch.Tensor]:
    """(point, layer) -> float32 [length, HIDDEN]: what is added where, tiers summed."""
    in_prompt = torch.arange(length) < len(ask.prompt)
    total: dict[Site, torch.Tensor] = {}
    for name, (acts_on_prompt, acts_on_generated) in _TIERS.items():
        mask = (in_prompt & acts_on_prompt) | (~in_prompt & acts_on_generated)
        for point, entries in (ask.fields.get(name) or {}).items():
            for layer, entry in entries.items():
                scale, values = 1.0, entry
                if isinstance(entry, dict):
                    scale, values = entry.get("scale", 1.0), entry["vector"]
                delta = mask[:, None] * (scale * torch.as_tensor(values))[None, :]
                total[point, layer] = total.get((point, layer), torch.zeros(())) + delta
    return total


class Judge:
    """Compares what the engine returned with Hugging Face run once over the final sequence."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    def deltas(self, ask: Ask, sequence: list[int]) -> dict[Site, torch.Tensor]:
        """(point, layer) -> float32 [len(sequence), HIDDEN]: what tiers add and ops change."""
        added = deltas_of(ask, len(sequence))
        ops = ask.fields.get("steering")
        if ops is None:
            return added
        return with_ops(self.reference, ops, added, sequence, len(ask.prompt))

    def check(self, ask: Ask, output: Any, sample: int = 0) -> None:
        """All that can be said about one completion: its rows and its log-probabilities.

        Raises:
            AssertionError: a row is missing, doubled, out of order or not the model's; or the
                log-probabilities are not those of the steered model, or are so close to those of
                the plain one that the comparison means nothing.
        """
        completion = output.outputs[sample]
        if "capture" in ask.fields:
            self.check_rows(ask, completion)
        if completion.logprobs is not None:
            error, moved = self.log_prob_errors(ask, completion)
            assert error <= WRITE_TOLERANCE, f"log-probabilities off by {error}"
            assert not ask.steered or moved >= LEAST_MOVE, f"the steering moved only {moved}"

    def check_rows(self, ask: Ask, completion: Any, tolerance: float = READ_TOLERANCE) -> None:
        """The inline rows are those of the final sequence: right positions, tokens and values."""
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        result = completion.capture_results["inline"]
        assert result.status == "ok", result.error
        spec = ask.fields["capture"]["inline"]
        positions = expected_positions(
            spec["positions"], len(ask.prompt), len(completion.token_ids)
        )
        forward = self.reference.run(sequence, self.deltas(ask, sequence))
        expected = forward.rows | forward.heads | forward.others
        assert result.payload, "no site was captured"
        if spec.get("reduce") == "mean":
            self._check_means(result, expected, positions, sequence)
            return
        for site, rows in result.payload.items():
            assert rows.positions.tolist() == positions, site
            assert rows.token_ids.tolist() == [sequence[p] for p in positions], site
            want = expected[site][:, list(rows.heads)] if rows.heads else expected[site]
            error = worst_row(rows.values, want[positions])
            assert error <= tolerance, f"{site}: rows off by {error}"

    def check_weights(self, ask: Ask, completion: Any, name: str = "inline") -> float:
        """The attention weights of a completion's result are the model's; returns how far off the
        next head's would be."""
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        result = completion.capture_results[name]
        assert result.status == "ok", result.error
        want = self.reference.run(sequence, self.deltas(ask, sequence)).heads
        apart = 0.0
        for (point, layer), rows in result.payload.items():
            assert point == "attn" and len(rows.weights) == len(rows)
            assert rows.token_ids.tolist() == [sequence[t] for t in rows.positions]
            exact, chosen = want["attn", layer], list(rows.heads)
            for t, weights in zip(rows.positions.tolist(), rows.weights, strict=True):
                assert weights.shape == (len(chosen), t + 1)
                assert (weights - exact[t, chosen, : t + 1]).abs().max() <= READ_TOLERANCE
                other = exact.roll(1, 1)[t, chosen, : t + 1]
                apart = max(apart, float((weights - other).abs().max()))
        return apart

    @staticmethod
    def _check_means(
        result: Any, expected: dict[Site, torch.Tensor], positions: list[int], sequence: list[int]
    ) -> None:
        """One row a site, in float32: the mean of these positions and not of one fewer."""
        for site, rows in result.payload.items():
            assert rows.positions.tolist() == positions[-1:], site
            assert rows.token_ids.tolist() == [sequence[positions[-1]]], site
            assert rows.values.dtype == torch.float32
            error = worst_row(rows.values, expected[site][positions].mean(0, keepdim=True))
            assert error <= READ_TOLERANCE, f"{site}: mean off by {error}"
            if len(positions) > 1:
                fewer = expected[site][positions[:-1]].mean(0, keepdim=True)
                assert worst_row(rows.values, fewer) >= 100 * READ_TOLERANCE, f"{site}: no test"

    def log_prob_errors(self, ask: Ask, completion: Any) -> tuple[float, float]:
        """(worst relative error, how far the steering moved the reference) of the generated tokens'
        log-probabilities."""
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        first = len(ask.prompt) - 1
        steered = self.reference.run(sequence, self.deltas(ask, sequence))
        want = steered.logits[first:].log_softmax(-1)
        plain = self.reference.run(sequence).logits[first:].log_softmax(-1)
        return worst_row(log_probs(completion), want), relative(want, plain)


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative L2 error of a row; both [n, ..., width], n may be 0. NaN is infinite."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not len(got):
        return 0.0
    errors = (got.float() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(errors.nan_to_num(nan=torch.inf).max())


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance of two tensors of one shape."""
    return float((got - want).norm() / want.norm())


def same_completion(one: Any, other: Any) -> bool:
    """Whether tokens, log-probabilities and captured rows of two completions are bit-identical."""
    if list(one.token_ids) != list(other.token_ids):
        return False
    if not torch.equal(log_probs(one), log_probs(other)):
        return False
    if one.capture_results is None:
        return other.capture_results is None
    rows, others = row_tensors(one), row_tensors(other)
    return rows.keys() == others.keys() and all(torch.equal(rows[s], others[s]) for s in rows)


def core_of(llm: LLM) -> Any:
    """The engine core of an engine in this process."""
    client = llm.llm_engine.engine_core
    assert isinstance(client, InprocClient)
    return client.engine_core


def scheduler_of(llm: LLM) -> Any:
    """The scheduler of an engine in this process."""
    return core_of(llm).scheduler


@dataclass
class Steps:
    """What the scheduler decided, step by step."""

    outputs: list[Any] = field(default_factory=list)
    resumed: set[str] = field(default_factory=set)
    """Ids of requests of which a step computed several tokens at once, generated ones among them,
    though they were no drafts."""

    @property
    def ids(self) -> list[str]:
        """Request ids in the order in which `LLM.generate` was given the prompts."""
        scheduled = {i for o in self.outputs for i in o.num_scheduled_tokens}
        return sorted(scheduled, key=lambda i: int(i.split("-")[0]))

    def chunks(self, request: int) -> list[int]:
        """Scheduled tokens per step of the `request`-th prompt."""
        name = self.ids[request]
        return [n for o in self.outputs if (n := o.num_scheduled_tokens.get(name))]

    @property
    def recomputed(self) -> list[int]:
        """Which prompts came back from a preemption with generated tokens to compute again."""
        return sorted(self.ids.index(name) for name in self.resumed)

    @property
    def preempted(self) -> list[str]:
        """Request ids, once per preemption."""
        return [i for o in self.outputs for i in sorted(o.preempted_req_ids or ())]

    @property
    def drafted(self) -> int:
        """Draft tokens that were scheduled."""
        return sum(len(d) for o in self.outputs for d in o.scheduled_spec_decode_tokens.values())

    @property
    def largest_row_count(self) -> int:
        """Most captured (position, site) rows of one step, sites counted by `admitted`."""
        sites: dict[str, int] = {}
        worst = 0
        for o in self.outputs:
            if o.interventions is None:
                continue
            sites |= {i: len(taps_of(r)) for i, r in o.interventions.admitted.items()}
            rows = sum(len(np.asarray(r)) * sites[i] for i, r in o.interventions.rows.items())
            worst = max(worst, rows)
        return worst


@contextmanager
def watching(llm: LLM, most: int = 1000) -> Iterator[Steps]:
    """Record every non-empty step of an in-process engine.

    Raises:
        AssertionError: after `most` steps, empty ones included: somebody waits for ever.
    """
    scheduler, steps = scheduler_of(llm), Steps()
    schedule, calls = scheduler.schedule, count()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        assert next(calls) < most, f"not done after {most} steps"
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            steps.outputs.append(output)
        for name, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            past_prompt = request.num_computed_tokens - request.num_prompt_tokens
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            if tokens > 1 + len(drafts) and past_prompt > 1 + len(drafts):
                steps.resumed.add(name)
        return output

    scheduler.schedule = recorded
    try:
        yield steps
    finally:
        del scheduler.schedule
