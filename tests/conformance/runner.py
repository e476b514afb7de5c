# SPDX-License-Identifier: Apache-2.0
"""Compares an engine with the reference: plain, reading, writing, and reading while writing.

Every comparison is teacher-forced on the engine's own tokens: the engine generates, the reference
then runs once over prompt + generated - 1 tokens, and the rows are compared; of logits, the
log-probabilities. `completions.py` asks the engine. Used by the tests and by the demo.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm.config.points import POINTS, Rows
from vllm.v1.interventions.shape import LayerShape, TapShape

from . import reference as ref
from .cases import SteeringCase, phase_mask, steering_cases
from .completions import Completion, Engine, complete, log_probs_of
from .models import VOCAB, TinyModel
from .pictures import Shown
from .proof import HeadErrors
from .reference import Forward, Site

READ_TOLERANCE = 1e-4
WRITE_TOLERANCE = 1e-3
LEAST_MOVE = 0.05
LEAST_BRANCH_MOVE = 0.02
"""Of heads and of focus: some blocks have gates behind attention, some no attention at all."""


class TwoWay(list[int]):
    """A prompt whose tokens see each other both ways."""

    def inputs(self, length: int) -> dict[str, Any]:
        """What tells a model of transformers so, of `length` tokens in all."""
        types = torch.arange(length) < len(self)
        return {"token_type_ids": types.long()[None]}


@dataclass(frozen=True)
class Reference:
    """One architecture and its model as transformers runs it."""

    row: TinyModel
    model: nn.Module
    shown: Sequence[Shown | TwoWay] = ()
    """The prompts, where the model takes more than their tokens: what runs begins with one."""

    def run(
        self, token_ids: Sequence[int], deltas: Mapping[Site, torch.Tensor] | None = None
    ) -> Forward:
        inputs = None
        if self.shown:
            begun = next(p for p in self.shown if list(token_ids[: len(p)]) == p)
            inputs = begun.inputs(len(token_ids))
        return ref.run(self.model, self.row.adapter, token_ids, deltas, inputs)


@dataclass(frozen=True)
class Measurement:
    """One comparison with the reference; errors are relative L2 of the worst row."""

    architecture: str
    check: str
    """plain, read, write or steered read."""
    point: str
    """A point, `logits` where nothing is read or written, or `every` for all sites at once."""
    layer: int
    """-1 where it is not one layer."""
    phase: str
    """Which positions were steered: all, prompt, generated, or none."""
    error: float
    moved: float | None = None
    """Relative L2 by which the steering moved the log-probabilities of the steered rows."""


def prompts(seed: int = 1, lengths: Sequence[int] = (41, 17, 5)) -> list[list[int]]:
    """Random prompts: longer than a block and a sliding window, and shorter than either."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative L2 error of a row; both [n, ..., width]. Not-a-number counts as infinite.

    Raises:
        AssertionError: the shapes differ.
    """
    if got.shape != want.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    return float(errors.nan_to_num(nan=torch.inf).max())


def plain_errors(
    llm: Engine, reference: Reference, token_prompts: Sequence[list[int]]
) -> list[Measurement]:
    """How far the engine is from the reference with nothing steered or captured."""
    worst = max(
        worst_row(log_probs_of(c), reference.run(c.token_ids).logits.log_softmax(-1))
        for c in complete(llm, [(prompt, {}) for prompt in token_prompts])
    )
    return [Measurement(reference.row.name, "plain", "logits", -1, "none", worst)]


def read_errors(
    llm: Engine, reference: Reference, token_prompts: Sequence[list[int]]
) -> list[Measurement]:
    """Every point of every layer at every position, captured without steering."""
    cases: list[tuple[list[int], Mapping[str, Any]]] = [(prompt, {}) for prompt in token_prompts]
    completions = complete(llm, cases, log_probs=False, capture=everything(reference.row))
    worst: dict[Site, float] = {}
    for completion in completions:
        expected = reference.run(completion.token_ids).rows
        for site, error in _row_errors(completion, expected).items():
            worst[site] = max(error, worst.get(site, 0.0))
    name = reference.row.name
    return [Measurement(name, "read", *site, "none", error) for site, error in worst.items()]


def head_errors(
    llm: Engine,
    reference: Reference,
    token_prompts: Sequence[list[int]],
    points: Mapping[int, Sequence[str]],
    unread: Iterable[int] = (),
) -> dict[str, HeadErrors]:
    """Every head of every layer at all positions, and the weights of its attention, "attn"; empty
    if transformers does not show its heads.

    Args:
        points: layer -> its points of attention, as the engine has them.
        unread: layers whose weights cannot be read.
    """
    hooks: dict[str, list[int]] = {}
    for layer, names in points.items():
        for point in names:
            hooks.setdefault(point, []).append(layer)
    errors: dict[str, HeadErrors] = {}
    if not hooks:
        return errors
    completions = complete(
        llm,
        [(prompt, {}) for prompt in token_prompts],
        log_probs=False,
        capture={"hooks": hooks, "positions": "all"},
    )
    if layers := sorted(set(points) - set(unread)):
        attention = {"heads": layers, "queries": "all", "give": ["weights"]}
        weights = complete(
            llm,
            [(prompt, {}) for prompt in token_prompts],
            log_probs=False,
            capture={"attention": attention},
        )
        for completion, same in zip(completions, weights, strict=True):
            completion.rows.update(same.rows)
    for completion in completions:
        expected = reference.run(completion.token_ids).heads
        if expected and {layer for _, layer in expected} != set(points):
            raise AssertionError(f"attention in layers {sorted(points)}, of {sorted(expected)}")
        for site in completion.rows.keys() & expected.keys():
            point, _ = site
            want, got = expected[site], completion.rows[site]
            want = want if point == "attn" else reference.row.heads(point, want)
            rolled = got.roll(1, 1 if got.shape[1] > 1 else 0)
            new = HeadErrors(worst_row(got, want), worst_row(rolled, want))
            old = errors.setdefault(point, new)
            errors[point] = HeadErrors(max(old.read, new.read), min(old.apart, new.apart))
    return errors


def other_errors(
    llm: Engine, reference: Reference, token_prompts: Sequence[list[int]], points: Sequence[str]
) -> dict[str, HeadErrors]:
    """Rows of embed, final, branches, what the MLP reads and points within a branch, where the
    engine offers them, at all positions.

    Errors of branches are relative to the stream, which is what they are as precise as; how far
    apart they are is said of each position's row and its neighbour's.

    Args:
        points: those that are offered.
    """
    capture = {"hooks": dict.fromkeys(points, "all"), "positions": "all"}
    cases: list[tuple[list[int], Mapping[str, Any]]] = [(prompt, {}) for prompt in token_prompts]
    errors: dict[str, HeadErrors] = {}
    for completion in complete(llm, cases, log_probs=False, capture=capture):
        forward = reference.run(completion.token_ids)
        for (point, layer), got in completion.rows.items():
            want = forward.others[point, layer]
            summed = POINTS[point].rows is Rows.BRANCH and "post_block" in reference.row.points
            stream = forward.rows["post_block", layer] if summed else want
            read = float(((got - want).norm(dim=-1) / stream.norm(dim=-1)).max())
            apart = worst_row(got.roll(1, 0), want) if want.any() else 1.0  # a layer may lack one
            old = errors.setdefault(point, HeadErrors(read, apart))
            errors[point] = HeadErrors(max(old.read, read), min(old.apart, apart))
    return errors


def offered_others(shape: TapShape) -> list[str]:
    """Those of embed, final, branches and what the MLP reads that an engine offers."""
    layers = shape.layers.values()
    branches = {name: None for layer in layers for name in (*layer.branches, *layer.inputs)}
    final = any(layer.final for layer in layers)
    return [*["embed"] * (shape.lanes == 1), *branches, *["final"] * final]


def with_heads(shape: TapShape) -> dict[int, LayerShape]:
    """The layers whose heads can be captured."""
    return {n: layer for n, layer in shape.layers.items() if layer.heads}


def unread(shape: TapShape) -> dict[int, str]:
    """Layer -> why its attention weights cannot be read, of those."""
    return {n: layer.unread for n, layer in shape.layers.items() if layer.unread}


def head_write_errors(
    llm: Engine, reference: Reference, prompt: list[int], layers: Sequence[int]
) -> tuple[float, float]:
    """Log-probabilities while z is written: at the first, a middle and the last of these layers a
    vector added to every head, and all heads turned round. The worst error and the least move.

    Args:
        layers: those that have heads.
    """
    sites = [("z", n) for n in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1]))]
    plain = reference.run(prompt).heads
    generator = torch.Generator().manual_seed(11)
    vectors: dict[Site, torch.Tensor] = {}
    for site in sites:
        vector = torch.randn(plain[site].shape[1:], generator=generator)
        vectors[site] = vector * (3 * plain[site].norm(dim=(1, 2)).mean() / vector.norm())
    cases: list[tuple[list[int], Mapping[str, Any]]] = []
    for site in sites:
        row = reference.row.heads("z", vectors[site][None])[0].flatten()
        cases.append((prompt, {"steering_vectors": {"z": {site[1]: row}}}))
        turned = {"op": "scale", "point": "z", "layers": site[1], "factor": -2.0}
        cases.append((prompt, {"steering": [turned]}))
    errors, moves = [], []
    for i, completion in enumerate(complete(llm, cases)):
        site = sites[i // 2]
        unsteered = reference.run(completion.token_ids)
        rows = unsteered.heads[site]
        delta = (vectors[site].expand_as(rows) if i % 2 == 0 else -3.0 * rows).flatten(1)
        want = reference.run(completion.token_ids, {site: delta}).logits.log_softmax(-1)
        logits = unsteered.logits.log_softmax(-1)
        errors.append(worst_row(log_probs_of(completion), want))
        moves.append(float((want - logits).norm() / logits.norm()))
    return max(errors), min(moves)


def input_write_errors(
    llm: Engine, reference: Reference, prompt: list[int], layers: Sequence[int]
) -> tuple[float, float]:
    """Log-probabilities while a vector is added to what the MLP reads, at the first, a middle and
    the last of these layers. The worst error and the least move."""
    generator = torch.Generator().manual_seed(13)
    rows = reference.run(prompt).others
    cases: list[tuple[list[int], Mapping[str, Any]]] = []
    sites = [
        ("mlp_in", n) for n in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1]))
    ]
    vectors: list[torch.Tensor] = []
    for site in sites:
        vector = torch.randn(rows[site].shape[1], generator=generator)
        vectors.append(vector * (3 * rows[site].norm(dim=1).mean() / vector.norm()))
        cases.append((prompt, {"steering_vectors": {"mlp_in": {site[1]: vectors[-1]}}}))
    errors, moves = [], []
    for completion, site, vector in zip(complete(llm, cases), sites, vectors, strict=True):
        logits = reference.run(completion.token_ids).logits.log_softmax(-1)
        delta = vector.expand(len(completion.token_ids), -1)
        want = reference.run(completion.token_ids, {site: delta}).logits.log_softmax(-1)
        errors.append(worst_row(log_probs_of(completion), want))
        moves.append(float((want - logits).norm() / logits.norm()))
    return max(errors), min(moves)


def write_errors(
    llm: Engine, reference: Reference, token_prompts: Sequence[list[int]]
) -> list[Measurement]:
    """The logits of every case of `steering_cases`; all cases are neighbours in one batch."""
    cases = _dealt(reference, token_prompts)
    completions = complete(llm, [(prompt, case.fields) for prompt, case in cases])
    results = []
    for (_, case), completion in zip(cases, completions, strict=True):
        size = len(completion.token_ids), completion.num_prompt
        steered = reference.run(completion.token_ids, case.deltas(*size))
        want = steered.logits.log_softmax(-1)
        plain = reference.run(completion.token_ids).logits.log_softmax(-1)
        mask = phase_mask(case.phase, *size)
        moved = float((want - plain)[mask].norm() / plain[mask].norm())
        error = worst_row(log_probs_of(completion), want)
        results.append(_measurement(reference, "write", case, error, moved))
    return results


def steered_read_errors(
    llm: Engine, reference: Reference, token_prompts: Sequence[list[int]]
) -> list[Measurement]:
    """The rows of every site while the cases of `steering_cases` act, the worst of them a case."""
    cases = _dealt(reference, token_prompts)
    completions = complete(
        llm,
        [(prompt, case.fields) for prompt, case in cases],
        log_probs=False,
        capture=everything(reference.row),
    )
    results = []
    for (_, case), completion in zip(cases, completions, strict=True):
        deltas = case.deltas(len(completion.token_ids), completion.num_prompt)
        expected = reference.run(completion.token_ids, deltas).rows
        error = max(_row_errors(completion, expected).values())
        results.append(_measurement(reference, "steered read", case, error))
    return results


def _dealt(
    reference: Reference, token_prompts: Sequence[list[int]]
) -> list[tuple[list[int], SteeringCase]]:
    adapter = reference.row.adapter
    cases = steering_cases(reference.run(token_prompts[0]), adapter.points, adapter.lanes)
    return [(token_prompts[i % len(token_prompts)], case) for i, case in enumerate(cases)]


def _measurement(
    reference: Reference, check: str, case: SteeringCase, error: float, moved: float | None = None
) -> Measurement:
    name = reference.row.name
    return Measurement(name, check, case.point, case.layer, case.phase, error, moved)


def everything(row: TinyModel) -> dict[str, Any]:
    """A capture request for all positions of all layers at every point the architecture has."""
    return {"hooks": {point: "all" for point in row.points}, "positions": "all"}


def _row_errors(completion: Completion, expected: Mapping[Site, torch.Tensor]) -> dict[Site, float]:
    if set(completion.rows) != set(expected):
        differing = sorted(set(completion.rows) ^ set(expected))
        raise AssertionError(f"captured sites are not those of the model; differing: {differing}")
    return {site: worst_row(completion.rows[site], rows) for site, rows in expected.items()}
