# SPDX-License-Identifier: Apache-2.0
"""Focus on an engine beside transformers, of any architecture: its blocks get other masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.support.focus import Focusing, Unmasked, masked

from .completions import GENERATED, Engine, complete, log_probs_of
from .proof import FocusErrors
from .runner import Reference, worst_row

RUNS = 40
"""The most keys of a span: an engine takes 64 runs."""


def focus_errors(
    llm: Engine, reference: Reference, token_prompts: Sequence[list[int]], heads: Mapping[int, int]
) -> FocusErrors | None:
    """Log-probabilities while the weights of keys all over the sequence are raised at all heads,
    and taken away at every second one.

    Args:
        heads: how many each layer that may be focused has.

    Returns:
        None where there is no such layer, or where a block of the reference gets no mask to change.
    """
    if not heads:
        return None
    every = {layer: list(range(number)) for layer, number in heads.items()}
    some = {n: [h for h in own if (h + n) % 2 == 0] or [0] for n, own in every.items()}
    cases = []
    for prompt in token_prompts:
        step = max(3, -(-len(prompt) // RUNS))
        # A sliding window never sees a span alone, nor none of it.
        span = range(1, len(prompt) + GENERATED - 1, step)
        cases.append((prompt, Focusing(every, span, factor=64.0)))
        cases.append((prompt, Focusing(some, span, factor=0.0)))
    fields = [
        (p, {"steering": [focusing.request(len(p) + GENERATED - 2)]}) for p, focusing in cases
    ]
    blocks = list(reference.model.get_submodule(reference.row.adapter.blocks).children())
    errors, moves = [], []
    for (_, focusing), completion in zip(cases, complete(llm, fields), strict=True):
        try:
            with masked(blocks, [focusing], heads):
                want = reference.run(completion.token_ids).logits.log_softmax(-1)
        except Unmasked:
            return None
        plain = reference.run(completion.token_ids).logits.log_softmax(-1)
        errors.append(worst_row(log_probs_of(completion), want))
        moves.append(float((want - plain).norm() / plain.norm()))
    return FocusErrors(max(errors), min(moves))
