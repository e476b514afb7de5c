# SPDX-License-Identifier: Apache-2.0
"""Random inputs of the native ops, and what torch says they come to, on CPU and GPU alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOTS = 5


@dataclass(frozen=True)
class Case:
    """One step at one site."""

    stream: torch.Tensor
    addend: torch.Tensor | None
    table: torch.Tensor
    slots: torch.Tensor
    arena: torch.Tensor
    dest: torch.Tensor

    def steered(self) -> torch.Tensor:
        return self.stream + self.table[self.slots[: self.stream.shape[0]].long()]

    def captured(self, stream: torch.Tensor) -> torch.Tensor:
        """The arena after the step; row by row, so that nothing is shared with the op's code."""
        arena = self.arena.clone()
        for token, row in enumerate(self.dest[: stream.shape[0]].tolist()):
            if row >= 0:
                whole = stream[token] if self.addend is None else self.addend[token] + stream[token]
                arena[row] = whole
        return arena

    def other(self) -> Case:
        """A twin that must come out differently: each token has another one's slot and place."""
        return replace(self, slots=self.slots.roll(1), dest=self.dest.roll(1))


def rows(
    tokens: int, hidden: int, dtype: torch.dtype, device: str, layout: str, seed: torch.Generator
) -> torch.Tensor:
    """[tokens, hidden]: `dense`, `strided` rows of a wider tensor, `odd` ones that are not aligned
    to 16 bytes, or `transposed`."""
    shape = {
        "dense": (tokens, hidden),
        "strided": (tokens, hidden + 64),
        "odd": (tokens, hidden + 1),
        "transposed": (hidden, tokens),
    }[layout]
    whole = torch.randn(shape, generator=seed).to(device, dtype)
    if layout == "transposed":
        return whole.t()
    return whole[:, 1:] if layout == "odd" else whole[:, :hidden]


def cases(device: str) -> Iterator[tuple[str, Case]]:
    """Every layout and dtype, sizes around the kernels' own limits, random slots and places."""
    seed = torch.Generator().manual_seed(7)
    for dtype in DTYPES:
        for tokens, hidden in ((2, 8), (7, 64), (33, 1000), (5, 8192), (1025, 96), (2, 20000)):
            for layout in ("dense", "strided", "odd", "transposed"):
                for deferred in (False, True):
                    make = (tokens, hidden, dtype, device, layout, seed)
                    table = torch.randn(SLOTS, hidden, generator=seed)
                    table[0] = 0.0
                    slots = (torch.arange(tokens + 3) + tokens) % SLOTS  # all differ from the next
                    dest = torch.randperm(tokens + 3, generator=seed)
                    dest[torch.rand(tokens + 3, generator=seed) < 0.5] = -1
                    dest[0], dest[1] = -1, tokens + 3
                    yield (
                        f"{dtype} {tokens} x {hidden} {layout} deferred={deferred}",
                        Case(
                            rows(*make),
                            rows(*make) if deferred else None,
                            table.to(device, dtype),
                            slots.to(device, torch.int32),
                            torch.randn(tokens + 4, hidden, generator=seed).to(device, dtype),
                            dest.to(device, torch.int32),
                        ),
                    )


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, signs of zeros included."""
    bits = {4: torch.int32, 2: torch.int16}[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def wrong(case: Case) -> list[str]:
    """What the native ops do differently from torch; nothing, if all is well."""
    ops = torch.ops.pilot
    steered = case.steered()
    want = {
        "capture": case.captured(case.stream),
        "steer": steered,
        "steer of both": steered,
        "capture of both": case.captured(steered),
    }
    captured, both = case.arena.clone(), case.arena.clone()
    ops.capture_rows(case.stream, case.addend, captured, case.dest)
    got = {
        "capture": captured,
        "steer": ops.add_rows(case.stream, case.table, case.slots),
        "steer of both": ops.add_and_capture_rows(
            case.stream, case.addend, case.table, case.slots, both, case.dest
        ),
        "capture of both": both,
    }
    return [name for name in want if not equal(got[name], want[name])]


def unnoticed(case: Case) -> list[str]:
    """What `wrong` cannot see of a twin's results: nothing, or it proves nothing."""
    twin = case.other()
    kept = {
        "steer": equal(case.steered(), twin.steered()),
        "capture": equal(case.captured(case.stream), twin.captured(twin.stream)),
        "capture of both": equal(case.captured(case.steered()), twin.captured(twin.steered())),
    }
    return [name for name, same in kept.items() if same]
