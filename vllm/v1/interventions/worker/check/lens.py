# SPDX-License-Identifier: Apache-2.0
"""Start-up proof of lenses: which module is the norm between the last layer and the head.

No name says it for all models. So a drawn token is driven through the model, in the code and graphs
that will serve, and the norm is the one that makes of the last layer's captured row what the model
hands to its head. A model of which none does is refused.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from vllm.config.capture import LOGIT, CaptureConfig
from vllm.config.points import STREAM_POINTS
from vllm.model_executor.models.interfaces_base import is_text_generation_model
from vllm.v1.interventions.worker.check.attention import ROUNDED, TOLERANCE
from vllm.v1.interventions.worker.making.lens import LensReader, Norm

if TYPE_CHECKING:
    from vllm.v1.interventions.worker.runner import WorkerInterventions

DRAWS = 16
"""Number of tokens that are tried: some may have a row of zeros, of which any norm makes zeros."""


def prove_lenses(
    interventions: "WorkerInterventions",
    config: CaptureConfig,
    model: nn.Module,
    run: Callable[[int], torch.Tensor],
) -> None:
    """Find the norm, and have lenses read by it.

    Args:
        run: runs dummy tokens of a draw; gives what goes to the head, [>= 1, hidden].

    Raises:
        RuntimeError: the last layer's rows are not captured, no norm is the one, or no token says.
    """
    shape, capture = interventions.shape, interventions.capture
    assert shape is not None and capture is not None
    last = "post_block", max(shape.layers)
    if not interventions.captures(last):
        raise RuntimeError(
            f"capture_lens needs post_block of layer {last[1]}, the last one, to find the norm "
            "before the head: have post_block among capture_points, or start without capture_lens"
        )
    with interventions.probing(last, None):
        for draw in range(DRAWS):
            wanted = run(draw)[:1].float()
            row = capture.arena[:1].clone()
            if 0 < float(wanted.norm()) < float("inf"):
                break
        else:
            raise RuntimeError(
                f"what goes to the head of {type(model).__name__} is zero or not finite for each "
                f"of {DRAWS} random tokens, so that the norm before it cannot be found; check the "
                "weights, or start without capture_lens"
            )
    limit, closest = TOLERANCE.get(shape.torch_dtype, ROUNDED), float("inf")
    for norm in _norms(model, interventions.layers[last[1]]):
        closest = min(closest, off := float((norm(row).float() - wanted).norm() / wanted.norm()))
        if off <= limit and is_text_generation_model(model):
            break
    else:
        raise RuntimeError(
            f"no norm of {type(model).__name__} gives, of the last layer's stream, what goes to "
            f"its head (the closest is off by {closest:.1e}, allowed is {limit:g}); start without "
            "capture_lens"
        )
    logits = model.compute_logits(wanted.to(row.dtype))
    assert logits is not None
    vocab_size = logits.shape[1]
    sites = [(point, layer) for point, layer in interventions.sites if point in STREAM_POINTS]
    lenses = {LOGIT: sites} if LOGIT in config.capture_lens else {}
    for name, lens in capture.lenses.items():
        lenses[name] = [("post_block", layer) for layer in lens.layers]
    budget = config.capture_buffer_bytes // shape.row_bytes
    shape = msgspec.structs.replace(
        shape,
        lenses=lenses,
        vocab_size=vocab_size,
        lens_rows=-(-budget // config.capture_lens_rows),
    )
    reader = LensReader(model, norm, vocab_size, capture.lenses, capture.arena.device)
    interventions.read_lenses(reader, shape)


def _norms(model: nn.Module, layer: nn.Module) -> Iterator[Norm]:
    """Yield no norm, for a head that norms by itself, then the norms beside the layers and outside
    them."""
    yield lambda rows: rows
    names = next(name for name, each in model.named_modules() if each is layer).split(".")
    for depth in range(len(names)):
        beside = model.get_submodule(".".join(names[:depth])).children()
        yield from (partial(_normed, child) for child in beside if "Norm" in type(child).__name__)


def _normed(norm: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Rows after a norm; some return a residual beside them, whether or not they got one."""
    made = norm(rows)
    return made[0] if isinstance(made, tuple) else made
