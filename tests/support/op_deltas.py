# SPDX-License-Identifier: Apache-2.0
"""What operations do to a Hugging Face model, as vectors to add.

An operation on a stream h is the addition of f(h) - h once h is known, and h at a site depends on
the sites before it only. So the reference runs once for each site with operations, in the order of
the stream, and needs no hooks of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.conformance.reference import Site
from tests.conformance.runner import Reference
from tests.support.op_reference import apply_site
from tests.support.selected import expected_positions

_ORDER = ("pre_attn", "post_attn", "post_block")


def with_ops(
    reference: Reference,
    ops: Sequence[Mapping[str, Any]],
    added: Mapping[Site, torch.Tensor],
    sequence: Sequence[int],
    num_prompt: int,
) -> dict[Site, torch.Tensor]:
    """(point, layer) -> float32 [len(sequence), hidden]: tiers and operations together.

    Args:
        ops: as a request gives them; `layers` an int or a list of ints.
        added: what the additive tiers add.
        sequence: prompt and generated tokens, without the last.
    """
    generated = len(sequence) + 1 - num_prompt
    at_site: dict[Site, list[dict[str, Any]]] = {}
    for op in ops:
        layers = op["layers"] if isinstance(op["layers"], list) else [op["layers"]]
        for layer in layers:
            resolved = _resolved(op, num_prompt, generated)
            at_site.setdefault((op["point"], layer), []).append(resolved)
    total = dict(added)
    for site in sorted(at_site, key=lambda site: (site[1], _ORDER.index(site[0]))):
        others = {other: delta for other, delta in total.items() if other != site}
        arrived = reference.run(sequence, others).rows[site].double()
        tiers = added.get(site, torch.zeros(())).double().expand_as(arrived)
        changed = apply_site(arrived.numpy(), tiers.numpy(), at_site[site], num_prompt)
        total[site] = (torch.from_numpy(changed) - arrived).float()
    return total


def _resolved(op: Mapping[str, Any], prompt: int, generated: int) -> dict[str, Any]:
    """The operation as `apply_site` takes it."""
    fields = {name: _array(value) for name, value in op.items()}
    if "gate" in op:
        fields["gate"] = {name: _array(value) for name, value in op["gate"].items()}
    if "positions" in op:
        given = op["positions"]
        in_order = isinstance(given, list) and all(isinstance(p, int) for p in given)
        fields["positions"] = (
            [p if p >= 0 else prompt + p for p in given]  # the order of the rows of `replace`
            if in_order
            else expected_positions(given, prompt, generated)
        )
    return fields


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double().numpy()
    return value.astype(np.float64) if isinstance(value, np.ndarray) else value
