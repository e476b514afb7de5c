# SPDX-License-Identifier: Apache-2.0
"""Activations of sparse autoencoders' features, made of captured rows after the forward.

In plain PyTorch, a bounded number of activations at a time: on the stream of the forward, outside
all graphs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.features.autoencoder import TENSORS, Autoencoder, product
from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.makings import Features
from vllm.v1.interventions.step_rows import Block
from vllm.v1.interventions.worker.making.maker import Captured, Maker, Material
from vllm.v1.interventions.worker.making.shards import Shards

logger = init_logger(__name__)

ACTIVATION_BYTES = 64 << 20
"""Device memory that activations may take as float32, at a time."""
ID_LISTS = 256
"""Number of lists of features that stay on the device."""


def on_device(
    name: str,
    autoencoder: Autoencoder,
    device: torch.device,
    dtype: torch.dtype,
    copy: bool = False,
) -> Autoencoder:
    """Return an autoencoder with its tensors on a device.

    Args:
        dtype: of the model.
        copy: whether none may be the file's own, which somebody may write to.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """
    dtype = matrix_dtype(device, dtype)
    made = replace(
        autoencoder,
        encoder=autoencoder.encoder.to(device, dtype, copy=copy),
        decoder=autoencoder.decoder.to(device, dtype, copy=copy),
        gain=autoencoder.gain.to(device),
        decoder_gain=autoencoder.decoder_gain.to(device),
        bias=autoencoder.bias.to(device),
        decoder_bias=autoencoder.decoder_bias.to(device),
        threshold=autoencoder.threshold.to(device),
        skip=None,  # no row is decoded to another site
    )
    logger.info(
        "%s, %d features of %s, takes %.2f GiB of the device",
        name,
        made.num_features,
        made.source,
        device_bytes(made) / 2**30,
    )
    return made


def matrix_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrices: on a GPU the model's, with products that are added up in
    float32; a CPU multiplies in float32."""
    return dtype if device.type == "cuda" else torch.float32


def device_bytes(autoencoder: Autoencoder) -> int:
    """Return the bytes that an autoencoder takes on its device."""
    return sum(getattr(autoencoder, name).nbytes for name in TENSORS)


class FeatureMaker(Maker):
    """Makes `Features`, float32 [count, 1, width]."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)

        @lru_cache(ID_LISTS)
        def ids_on_device(ids: tuple[int, ...]) -> torch.Tensor:
            return async_tensor_h2d(np.array(ids, dtype=np.int64), material.arena.device)

        self._ids = ids_on_device

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Read the rows of the site under the autoencoder."""
        making = stream.making
        assert isinstance(making, Features)
        arena, sites = self.material.arena, len(stream.places)
        width = making.width(1, arena.shape[1])
        made = torch.empty(block.count, sites, width, device=arena.device)
        ids, widths = self._ids(making.ids), [field.width for field in making.fields]
        shards = self.material.shards
        number = max(ACTIVATION_BYTES * shards.ranks // (4 * making.size), 1)
        # An autoencoder has one site; of another worker's site nothing is here.
        for _, rows in self.material.by_run(block, stream):
            autoencoder = self.material.autoencoders[making.key]
            parts = rows.flatten(0, 1).split(number), made.flatten(0, 1).split(number)
            for some, into in zip(*parts, strict=True):
                _read(making, autoencoder, shards, some, ids, into.split(widths, dim=1))
        return made


def _read(
    making: Features,
    autoencoder: Autoencoder,
    shards: Shards,
    rows: torch.Tensor,
    ids: torch.Tensor,
    into: Sequence[torch.Tensor],
) -> None:
    """Write what is given of rows [n, hidden] to the fields, each [n, width].

    Args:
        autoencoder: the shard that is here, of `shards`.
    """
    top_ids, top_values, values, active, error = into
    scaled = autoencoder.scaled(rows)
    activations = autoencoder.above(product(scaled.rows, autoencoder.encoder))
    if autoencoder.k:
        activations = shards.kept(activations, autoencoder.k)
    if making.top:
        found, numbers = shards.best(activations, making.top)
        is_active = found > making.above
        top_ids.view(torch.int32).copy_(numbers.where(is_active, -1))
        top_values.copy_(found.where(is_active, 0.0))
    number = (activations > making.above).sum(1, keepdim=True)
    together = shards.total(torch.cat([shards.of(activations, ids), number], dim=1))
    values.copy_(together[:, :-1])
    active.view(torch.int32).copy_(together[:, -1:])
    if making.error:
        decoded = shards.total(autoencoder.products(activations))
        decoded = autoencoder.unscaled(decoded + autoencoder.decoder_bias, scaled)
        error[:, 0] = (rows.float() - decoded).norm(dim=1)
