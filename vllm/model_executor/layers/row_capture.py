# SPDX-License-Identifier: Apache-2.0
"""The op with which a tap captures: it copies the rows that are wanted to the arena.

It is opaque to torch.compile. Where the switch is off it launches nothing, so a CUDA graph that is
recorded then has nothing of it. Where it is on, each of its programs reads one index, and ends if
that is -1. A forward that runs no graph of it tells the `Written` of its engine what is there.
"""

from typing import Protocol

import torch

from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

WRITTEN = "captured rows"
"""Under this name an engine has a `Written` among the layers that its ops find by name."""


class Written(Protocol):
    """A listener that is told when a forward has left rows in the arena."""

    def wrote(self, dest: torch.Tensor) -> None:
        """Hear that the launch is under way which writes the rows of the site with this `dest`."""


def capture_rows(
    h: torch.Tensor, arena: torch.Tensor, dest: torch.Tensor, switch: torch.Tensor
) -> None:
    """Copy wanted rows: h[i] to the numbers of the arena from row dest[i] on, if that is not -1.

    Args:
        h: [tokens, width]; a width beyond `hidden` goes on in the arena rows that follow, of which
            the last keeps what it had behind the row's end.
        arena: [rows, hidden], contiguous, changed in place.
        dest: int32 [>= tokens], where not negative far enough apart that no two rows meet.
        switch: bool [], in the host's memory: whether anything is wanted here in this step. Off,
            `dest` is not read.
    """
    torch.ops.vllm.capture_rows(h, arena, dest, switch)


def _capture_rows(
    h: torch.Tensor, arena: torch.Tensor, dest: torch.Tensor, switch: torch.Tensor
) -> None:
    if not switch.item():
        return
    if h.is_cuda:
        _capture_rows_triton(h, arena, dest)
    else:
        _capture_rows_cpu(h, arena, dest)
    if is_forward_context_available():
        written: Written | None = get_forward_context().no_compile_layers.get(WRITTEN)
        if written is not None:
            written.wrote(dest)


def _capture_rows_cpu(h: torch.Tensor, arena: torch.Tensor, dest: torch.Tensor) -> None:
    wanted = dest[: h.shape[0]]
    tokens = (wanted >= 0).nonzero().squeeze(1)
    if not tokens.numel():
        return
    places, rows, hidden = wanted[tokens].long(), h[tokens].to(arena.dtype), arena.shape[1]
    for n, part in enumerate(rows.split(hidden, dim=1)):
        arena[:, : part.shape[1]][places + n] = part


def _capture_rows_fake(
    h: torch.Tensor, arena: torch.Tensor, dest: torch.Tensor, switch: torch.Tensor
) -> None:
    return None


if HAS_TRITON:

    @triton.jit
    def _capture_rows_kernel(h, arena, dest, h_stride, arena_stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0).to(tl.int64)
        row = tl.load(dest + token).to(tl.int64)
        if row < 0:
            return
        for start in range(0, width, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            mask = cols < width
            value = tl.load(h + token * h_stride + cols, mask=mask)
            tl.store(arena + row * arena_stride + cols, value, mask=mask)

    def _capture_rows_triton(h: torch.Tensor, arena: torch.Tensor, dest: torch.Tensor) -> None:
        if h.stride(1) != 1:
            h = h.contiguous()
        width = h.shape[1]
        block = min(2048, triton.next_power_of_2(width))
        _capture_rows_kernel[(h.shape[0],)](
            h, arena, dest, h.stride(0), arena.stride(0), width, BLOCK=block
        )


direct_register_custom_op(
    op_name="capture_rows",
    op_func=_capture_rows,
    mutates_args=["arena"],
    fake_impl=_capture_rows_fake,
    dispatch_key=current_platform.dispatch_key,
)
