# SPDX-License-Identifier: Apache-2.0
"""Reconstructions of rows by sparse autoencoders: one opaque op at a site that has some,
`torch.ops.vllm.reconstruct_rows`.

It is dense: on a GPU each step multiplies all its rows with both matrices, whoever asks, as a
recorded graph can do nothing else. A CPU takes the rows that ask.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.features.autoencoder import TENSORS, Autoencoder
from vllm.v1.features.places import Place
from vllm.v1.features.scaling import SCALINGS
from vllm.v1.steering_formula import Scalars

ACTIVATION_BYTES = 64 << 20
"""Device memory that activations may take as float32, at a time."""

_RECONSTRUCTS = Scalars._fields.index("reconstructs")
_SCALINGS = ("", *SCALINGS)
_OF_PLACE = -1
"""Number in place of a scaling, for a place: its last tensor says which it is."""
_UNSAID: dict[str, Any] = {"transcodes": False, "skip": None, "source": ""}
"""Fields that a reconstruction does not depend on."""


def flat(autoencoders: Sequence[Autoencoder]) -> tuple[list[torch.Tensor], list[int]]:
    """Return the tensors of autoencoders, and their other numbers, as an op takes them."""
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    for each in autoencoders:  # this is traced
        tensors.extend([getattr(each, name) for name in TENSORS])
        if isinstance(each, Place):
            tensors.append(each.chosen)
            numbers.extend([each.k, _OF_PLACE])
        else:
            numbers.extend([each.k, _SCALINGS.index(each.scaling)])
    return tensors, numbers


def _unflat(tensors: list[torch.Tensor], numbers: list[int]) -> list[Autoencoder]:
    parts, made = iter(tensors), list[Autoencoder]()
    for k, scaling in zip(numbers[::2], numbers[1::2], strict=True):
        own: dict[str, Any] = dict(zip(TENSORS, islice(parts, len(TENSORS)), strict=True))
        if scaling == _OF_PLACE:
            made.append(Place(**own, **_UNSAID, k=k, scaling="", chosen=next(parts)))
        else:
            made.append(Autoencoder(**own, **_UNSAID, k=k, scaling=_SCALINGS[scaling]))
    return made


def reconstruct_rows(
    h: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    program: torch.Tensor,
    programs: torch.Tensor,
    scalars: torch.Tensor,
    tensors: list[torch.Tensor],
    numbers: list[int],
) -> torch.Tensor:
    """Return what is to be added to each row, with its vectors from `table`, so that it becomes
    what an autoencoder reconstructs of it: zeros where no term of its program says so.

    Args:
        h: [tokens, hidden]; the following five as in `TermTables`.
        tensors: `flat` of the site's autoencoders, with `numbers`.

    Returns:
        float32 [tokens, hidden].
    """
    count = h.shape[0]
    listed = programs[program[:count].long()].long()
    asked = scalars[:, _RECONSTRUCTS][listed].amax(dim=1)
    shift = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    for i, autoencoder in enumerate(_unflat(tensors, numbers)):
        asks = asked == i + 1
        rows = torch.arange(count, device=h.device) if h.is_cuda else asks.nonzero().squeeze(1)
        for some in rows.split(max(ACTIVATION_BYTES // (4 * autoencoder.num_features), 1)):
            x = h[some].float() + table[slots[some].long()].float()
            change = autoencoder.reconstruct(x) - x
            # Those that do not ask may be anything.
            shift[some] = torch.where(asks[some, None], change, shift[some])
    return shift


def _reconstruct_rows_fake(
    h: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    program: torch.Tensor,
    programs: torch.Tensor,
    scalars: torch.Tensor,
    tensors: list[torch.Tensor],
    numbers: list[int],
) -> torch.Tensor:
    return torch.empty(h.shape, dtype=torch.float32, device=h.device)


direct_register_custom_op(
    op_name="reconstruct_rows",
    op_func=reconstruct_rows,
    fake_impl=_reconstruct_rows_fake,
    dispatch_key=current_platform.dispatch_key,
)
