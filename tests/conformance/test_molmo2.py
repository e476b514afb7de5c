# SPDX-License-Identifier: Apache-2.0
"""The processor and the encoder that stand for Molmo 2's: which patches a token is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.conformance import models
from tests.conformance.molmo2 import Backbone
from tests.conformance.molmo2_checkpoint import Crops
from tests.conformance.pictures import noise

pytestmark = pytest.mark.quick

SIZES = {(64, 64): (1, 1), (96, 64): (1, 2), (64, 96): (2, 1), (300, 200): (1, 2)}
"""Width and height in pixels -> rows and columns of crops of the enlarged image."""


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_made_of_the_patches_below_them(size: tuple[int, int]) -> None:
    """Of the whole image and of the enlarged one, each patch once, and none beyond the edges."""
    crops, image = Crops(), noise(*size, 3)
    pixels, pooling, grid = crops(image)
    rows, columns = SIZES[size]
    assert pixels.shape == (1 + rows * columns, 25, 588)
    shapes = (5, 5), (3 * rows + 2, 3 * columns + 2)
    assert grid == [-(-length // 2) for shape in shapes for length in shape]
    flat, first = pixels.reshape(-1, 588), 0
    for shape, tall, wide in zip(shapes, grid[::2], grid[1::2], strict=True):
        own = pooling[first : first + tall * wide].reshape(tall, wide, 2, 2)
        first += tall * wide
        numbers = own.transpose(0, 2, 1, 3).reshape(2 * tall, 2 * wide)
        within, beyond = numbers[: shape[0], : shape[1]], numbers.copy()
        beyond[: shape[0], : shape[1]] = -1
        assert (within >= 0).all() and (beyond == -1).all()
        want = crops.patches(image, *shape)
        assert np.array_equal(flat[within], want)
        assert not np.array_equal(flat[np.roll(within, 1, axis=1)], want)
    assert first == len(pooling)


def test_a_token_is_of_its_own_patches_alone() -> None:
    """What is beyond an edge counts for nothing, and another crop does not either."""
    model = models.build(models.MODELS["molmo2"])
    backbone = model.get_submodule("model.vision_backbone")
    assert isinstance(backbone, Backbone)
    pixels = torch.randn(2, 25, 588, generator=torch.Generator().manual_seed(1))
    pooling = torch.tensor([[25, 26, -1, -1], [25, 26, 30, -1], [0, 25, 26, 30]])
    other = pixels.clone()
    other[0] += 1.0
    with torch.inference_mode():
        made, changed = backbone(pixels, pooling), backbone(other, pooling)
    assert torch.equal(made[:2], changed[:2])
    apart = (made - changed).norm(dim=-1) / made.norm(dim=-1)
    assert apart[2] > 0.05
    assert float((made[0] - made[1]).norm() / made[0].norm()) > 0.05
