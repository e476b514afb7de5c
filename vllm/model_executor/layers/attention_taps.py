# SPDX-License-Identifier: Apache-2.0
"""Taps of an attention layer: where the rows of its heads are read, and what they return written.

`Attention` and `MLAAttention` have the class attribute `taps = UnboundHeadTaps()` and call `enter`
first and `leave` last. The worker replaces `taps` on each *instance* that it binds, in engines that
capture or steer at one of these points. What residual_taps.py says of traced code holds here too.
"""

from typing import Protocol

import torch

from vllm.distributed import tensor_model_parallel_all_gather
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.residual_taps import rows_of
from vllm.model_executor.layers.row_capture import capture_rows
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)


class UnboundHeadTaps:
    """Taps that do nothing and trace to nothing."""

    wants_lse = False
    """True if FlashAttention is to leave `lse` here."""
    lse: torch.Tensor | None = None
    """float32 [heads, tokens]: the log of the sum of each row's weights before they were
    normalised, from attention to the focus behind it."""

    def enter(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
    ) -> None:
        """Capture nothing."""
        return None

    def leave(self, output: torch.Tensor, query: torch.Tensor | None = None) -> torch.Tensor:
        """Hand on what attention returns."""
        return output


class Focused(Protocol):
    """The worker's object that writes the output rows of focused tokens."""

    def attend(
        self, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Change `output` [tokens, heads, E] of `query` [tokens, heads, D] in place."""


class HeadTap:
    """One of q, k, v and z of one layer.

    Args:
        arena: [rows, hidden] in the model's dtype, where captured rows go; a token's heads take as
            many neighbouring rows as they need.
        dest: int32 [max tokens], the first arena row of each token, -1 for none.
        switch: bool [] in the host's memory, whether this step captures here.
        width: of all heads together, of all ranks.
        gathers: whether tensor-parallel ranks have the heads in parts.
        replicas: how many ranks in a row have the same heads.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        dest: torch.Tensor,
        switch: torch.Tensor,
        width: int,
        gathers: bool = False,
        replicas: int = 1,
    ) -> None:
        self.arena = arena
        self.dest = dest
        self.switch = switch
        self.width = width
        self.gathers = gathers
        self.replicas = replicas

    def read(self, rows: torch.Tensor) -> None:
        """Capture rows, [tokens, this rank's heads * width] or [tokens, heads, width]."""
        rows = rows.flatten(1)
        if self.gathers:
            mine = rows.shape[1]
            rows = tensor_model_parallel_all_gather(rows.contiguous())
            if self.replicas > 1:
                rows = rows.unflatten(1, (-1, self.replicas, mine))[:, :, 0].flatten(1)
        assert rows.shape[1] == self.width, "more would lie on rows of others"
        capture_rows(rows, self.arena, self.dest, self.switch)


class InnerTap(HeadTap):
    """Tap of rows within a branch, which count as one head: a router's logits, an MLP's neurons."""

    def read(self, rows: torch.Tensor) -> None:
        """Capture rows, [tokens, this rank's width]; the Transformers backend has them in one
        batch, [1, tokens, this rank's width]."""
        super().read(rows.flatten(0, -2))


class HeadSteering:
    """Factors that multiply the heads of one layer and vectors that are added to them, for the
    requests of this step.

    Args:
        table: [rows, this rank's heads * width] in the model's dtype, row 0 zeros.
        factors: float32, of the same shape, row 0 ones; None when the engine scales no heads.
        slots: int32 [max tokens], the row of each token; shared by all sites.
    """

    def __init__(
        self, table: torch.Tensor, factors: torch.Tensor | None, slots: torch.Tensor
    ) -> None:
        self.table = table
        self.factors = factors
        self.slots = slots

    def steer(self, output: torch.Tensor) -> torch.Tensor:
        """`output`, [tokens, heads, width] or [tokens, heads * width], times factor plus vector:
        computed in float32 where there are factors and rounded once."""
        rows, flat = self.slots[: output.shape[0]], output.flatten(1)
        added = rows_of(self.table, rows)
        if self.factors is None:
            return (flat + added).view_as(output)
        factor = rows_of(self.factors, rows)
        # A factor of 0 leaves a head out, also where a huge row makes it infinite.
        kept = torch.where(factor != 0, factor * flat.float(), 0.0)
        return (kept + added.float()).to(output.dtype).view_as(output)


class HeadTaps(UnboundHeadTaps):
    """The taps of one attention layer of the target model; None where nothing is captured, and
    where the layer's heads are not steered.

    Args:
        focuses: the layer's name in the forward context, if requests may focus it.
    """

    def __init__(
        self,
        q: HeadTap | None,
        k: HeadTap | None,
        v: HeadTap | None,
        z: HeadTap | None,
        steering: HeadSteering | None = None,
        focuses: str | None = None,
    ) -> None:
        self.q, self.k, self.v, self.z = q, k, v, z
        self.steering = steering
        self.focuses = focuses
        self.focused: Focused | None = None
        """Object that focuses the layer; None until there is a KV cache."""

    def enter(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
    ) -> None:
        """Capture what attention gets."""
        if self.q is not None:
            self.q.read(query)
        if self.k is not None and key is not None:
            self.k.read(key)
        if self.v is not None and value is not None:
            self.v.read(value)

    def leave(self, output: torch.Tensor, query: torch.Tensor | None = None) -> torch.Tensor:
        """Focus and steer what attention returns, [tokens, heads, width] or [tokens, heads *
        width], and capture it; returns it in the same shape.

        Args:
            query: what attention got, [tokens, heads, D]; None where it is not focused.
        """
        if self.focuses is not None and query is not None:
            torch.ops.vllm.focus_attention(query, output, _encode_layer_name(self.focuses))
        if self.steering is not None:
            output = self.steering.steer(output)
        if self.z is not None:
            self.z.read(output)
        return output


def focus_attention(query: torch.Tensor, output: torch.Tensor, layer_name: LayerNameType) -> None:
    """Focus what a layer's attention returned, [tokens, heads, E], in place. An op, because it
    reads the pages of the KV cache, which are not there yet when code is traced."""
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    taps = layer.taps
    # Taken, so that it is of this step or none, and its memory is free again.
    lse, taps.lse = taps.lse, None
    if taps.focused is not None:
        taps.focused.attend(query, output, lse)


def _focus_attention_fake(
    query: torch.Tensor, output: torch.Tensor, layer_name: LayerNameType
) -> None:
    return None


FOCUS_OP = "vllm::focus_attention"

direct_register_custom_op(
    op_name="focus_attention",
    op_func=focus_attention,
    mutates_args=["output"],
    fake_impl=_focus_attention_fake,
    dispatch_key=current_platform.dispatch_key,
)
