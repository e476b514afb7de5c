# SPDX-License-Identifier: Apache-2.0
"""What a Molmo 2 checkpoint brings as code, which transformers lacks: a config and a processor.

This file is copied beside the weights and loaded from there. It is ours: what upstream's
molmo2.py reads of a config, and the names and shapes of a processor's outputs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedConfig, ProcessorMixin

SPECIALS = (
    "<|image|>",
    "<im_patch>",
    "<im_col>",
    "<im_start>",
    "<low_res_im_start>",
    "<im_end>",
    "<|video|>",
    "<bos>",
)


class Molmo2TextConfig(PreTrainedConfig):
    """Of the decoder."""

    model_type = "molmo2_text"

    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    additional_vocab_size: int = 0
    qkv_bias: bool = True
    hidden_act: str = "silu"
    max_position_embeddings: int = 0
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] | None = None
    use_qk_norm: bool = False
    qk_norm_type: str = "olmo"
    layer_norm_eps: float = 1e-6
    norm_after: bool = False
    rope_scaling_layers: list[int] | None = None


class Molmo2VitConfig(PreTrainedConfig):
    """Of the encoder of images."""

    model_type = "molmo2_vit"

    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 3
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    image_default_input_size: tuple[int, int] = (70, 70)
    image_patch_size: int = 14
    image_num_pos: int = 25


class Molmo2AdapterConfig(PreTrainedConfig):
    """Of what makes tokens of an encoder's patches."""

    model_type = "molmo2_adapter"

    vit_layers: tuple[int, int] = (-1, -3)
    pooling_attention_mask: bool = True
    hidden_size: int = 64
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 32
    hidden_act: str = "silu"
    intermediate_size: int = 80
    text_hidden_size: int = 0


class Molmo2Config(PreTrainedConfig):
    """Of the whole model."""

    model_type = "molmo2"
    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = {
        "text_config": Molmo2TextConfig,
        "vit_config": Molmo2VitConfig,
        "adapter_config": Molmo2AdapterConfig,
    }

    text_config: Any = None
    vit_config: Any = None
    adapter_config: Any = None
    image_patch_id: int = 0
    image_col_id: int = 0
    image_start_token_id: int = 0
    low_res_image_start_token_id: int = 0
    image_end_token_id: int = 0
    image_low_res_id: int = 0
    frame_start_token_id: int = 0
    frame_end_token_id: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name, made in self.sub_configs.items():
            given = getattr(self, name)
            if not isinstance(given, PreTrainedConfig):
                setattr(self, name, made(**(given or {})))
        super().__post_init__(**kwargs)


class Crops:
    """Cuts an image into crops of 5 x 5 patches: one of all of it, and a row or column of up to two
    of it enlarged, each of which shares a patch with its neighbours on every side."""

    patch_size = 14
    size: ClassVar[dict[str, int]] = {"height": 70, "width": 70}
    pooling_size = (2, 2)
    max_crops = 2
    overlap_margins = (1, 1)

    def __call__(self, image: Image.Image) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """float32 patches [crops, 25, 588], which of them each token is made of [tokens, 4], where
        -1 is none, and rows and columns of tokens of the whole and of the enlarged image."""
        side, margin = self.size["height"] // self.patch_size, self.overlap_margins[0]
        window = side - 2 * margin
        rows, columns = self.tiles(image)
        tall, wide = rows * window + 2 * margin, columns * window + 2 * margin
        large = self.patches(image, tall, wide)
        crops = [self.patches(image, side, side)]
        index = np.zeros((tall, wide), dtype=np.int64)
        for row in range(rows):
            for column in range(columns):
                top, left = row * window, column * window
                numbers = len(crops) * side**2 + np.arange(side**2).reshape(side, side)
                index[top : top + side, left : left + side] = numbers
                crops.append(large[top : top + side, left : left + side])
        whole = self.pooled(np.arange(side**2).reshape(side, side))
        parts = self.pooled(index)
        pooling = np.concatenate([whole.reshape(-1, 4), parts.reshape(-1, 4)])
        pixels = np.stack(crops).reshape(len(crops), side**2, -1)
        return pixels, pooling, [*whole.shape[:2], *parts.shape[:2]]

    def tiles(self, image: Image.Image) -> tuple[int, int]:
        """How many windows the enlarged image is high and wide: the fewest that enlarge it least,
        or, where all would make it smaller, that make it the least so."""
        edge = self.overlap_margins[0] * self.patch_size
        window = self.size["height"] - 2 * edge
        width, height = (length - 2 * edge for length in image.size)
        scales = {
            (rows, columns): min(rows * window / height, columns * window / width)
            for rows, columns in ((1, 1), (1, 2), (2, 1))
        }
        enlarging = {tiles: scale for tiles, scale in scales.items() if scale >= 1}
        if enlarging:
            return min(enlarging, key=lambda tiles: enlarging[tiles])
        return max(scales, key=lambda tiles: scales[tiles])

    def patches(self, image: Image.Image, rows: int, columns: int) -> np.ndarray:
        """float32 [rows, columns, 588]: the image at that size, from -1 to 1."""
        p = self.patch_size
        resized = image.convert("RGB").resize((columns * p, rows * p), Image.Resampling.BILINEAR)
        pixels = np.asarray(resized, dtype=np.float32) / 127.5 - 1.0
        cut = pixels.reshape(rows, p, columns, p, 3).transpose(0, 2, 1, 3, 4)
        return cut.reshape(rows, columns, -1)

    def pooled(self, index: np.ndarray) -> np.ndarray:
        """[rows, columns] -> [half the rows, half the columns, 4], with -1 beyond the edges."""
        rows, columns = (-(-length // 2) for length in index.shape)
        padded = np.full((2 * rows, 2 * columns), -1, dtype=np.int64)
        padded[: index.shape[0], : index.shape[1]] = index
        return padded.reshape(rows, 2, columns, 2).transpose(0, 2, 1, 3).reshape(rows, columns, 4)


class Molmo2Processor(ProcessorMixin):
    """Text and images to the arguments of the model."""

    image_use_col_tokens = True
    use_single_crop_col_tokens = None
    use_single_crop_start_token = True
    video_use_col_tokens = False
    use_frame_special_tokens = False
    video_processor = None
    image_processor = Crops()

    def __init__(self, tokenizer: Any, **_: Any) -> None:
        super().__init__(tokenizer)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts that are saved: cutting an image takes no settings."""
        return ["tokenizer"]

    def __call__(
        self, text: Any = None, images: Any = None, videos: Any = None, **_: Any
    ) -> BatchFeature:
        """int64 input_ids [1, n], images expanded; and of all images one after the other
        pixel_values [crops, 25, 588], image_token_pooling [tokens, 4], image_grids [images, 4] and
        image_num_crops [images]."""
        assert not videos
        (text,) = [text] if isinstance(text, str) else text
        cut = [self.image_processor(image) for image in images or ()]
        pieces = text.split("<|image|>")
        assert len(pieces) == len(cut) + 1
        written = [self._tokens(grid) for _, _, grid in cut]
        joined = "".join(a + b for a, b in zip(pieces, [*written, ""], strict=True))
        # As upstream, which asks a processor about prompts with images alone.
        first = [self.tokenizer.bos_token_id] if cut else []
        ids = [*first, *self.tokenizer(joined)["input_ids"]]
        made = {"input_ids": torch.tensor([ids], dtype=torch.int64)}
        if cut:
            pixels, pooling, grids = zip(*cut, strict=True)
            made["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
            made["image_token_pooling"] = torch.from_numpy(np.concatenate(pooling))
            made["image_grids"] = torch.tensor(grids)
            made["image_num_crops"] = torch.tensor([len(crops) for crops in pixels])
        return BatchFeature(made)

    def _tokens(self, grid: list[int]) -> str:
        whole = ("<im_patch>" * grid[1] + "<im_col>") * grid[0]
        parts = ("<im_patch>" * grid[3] + "<im_col>") * grid[2]
        return f"<low_res_im_start>{whole}<im_end><im_start>{parts}<im_end>"


Molmo2Config.register_for_auto_class()
Molmo2Processor.register_for_auto_class("AutoProcessor")
