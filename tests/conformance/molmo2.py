# SPDX-License-Identifier: Apache-2.0
"""A Molmo 2 in plain PyTorch, for transformers has none: a decoder and an encoder of images.

Modules are named as upstream's loader expects a checkpoint's. Attention is one way: that of images
among their own tokens is for GPUs alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .loopcoder import rotated
from .molmo2_checkpoint import (
    Molmo2AdapterConfig,
    Molmo2Config,
    Molmo2TextConfig,
    Molmo2VitConfig,
)


def eager_attention_forward(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, heads, n, width] each, fewer heads of keys -> [1, n, heads, width] and the weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def _in_heads(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, width)).transpose(-3, -2)


class TextAttention(nn.Module):
    """Queries, keys and values by one matrix, queries and keys normalised, whole or a head."""

    def __init__(self, config: Molmo2TextConfig) -> None:
        super().__init__()
        self.width, self.theta = config.head_dim, config.rope_theta
        queries = config.num_attention_heads * self.width
        self.sizes = [queries, *[config.num_key_value_heads * self.width] * 2]
        self.att_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        self.attn_out = nn.Linear(queries, config.hidden_size, bias=False)
        self.by_head = config.qk_norm_type == "qwen3"
        if config.use_qk_norm:
            q, k = [self.width] * 2 if self.by_head else self.sizes[:2]
            self.q_norm = nn.RMSNorm(q, config.layer_norm_eps)
            self.k_norm = nn.RMSNorm(k, config.layer_norm_eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The branch [1, n, hidden]."""
        q, k, v = self.att_proj(x).split(self.sizes, dim=-1)
        if not self.by_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (_in_heads(each, self.width) for each in (q, k, v))
        if self.by_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q[0], self.theta)[None], rotated(k[0], self.theta)[None]
        out, _ = eager_attention_forward(self, q, k, v, mask)
        return self.attn_out(out.flatten(2))


class TextMlp(nn.Module):
    """A gated one: the first half of what one matrix makes, times silu of the second."""

    def __init__(self, config: Molmo2TextConfig) -> None:
        super().__init__()
        self.ff_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.ff_out = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The branch."""
        up, gate = self.ff_proj(x).chunk(2, dim=-1)
        return self.ff_out(up * functional.silu(gate))


class Block(nn.Module):
    """One layer: norms before the branches, or after them."""

    def __init__(self, config: Molmo2TextConfig) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.self_attn, self.mlp = TextAttention(config), TextMlp(config)
        self.attn_norm = nn.RMSNorm(config.hidden_size, config.layer_norm_eps)
        self.ff_norm = nn.RMSNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The stream after the layer."""
        if self.norm_after:
            x = x + self.attn_norm(self.self_attn(x, mask))
            return x + self.ff_norm(self.mlp(x))
        x = x + self.self_attn(self.attn_norm(x), mask)
        return x + self.mlp(self.ff_norm(x))


class Decoder(nn.Module):
    """The layers, what comes before them and the last norm."""

    def __init__(self, config: Molmo2TextConfig) -> None:
        super().__init__()
        words = config.vocab_size + config.additional_vocab_size
        self.wte = nn.Embedding(words, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.RMSNorm(config.hidden_size, config.layer_norm_eps)


class EncoderAttention(nn.Module):
    """Of patches to all patches of their crop, or of one query to what is pooled."""

    def __init__(self, inner: int, config: Molmo2VitConfig | Molmo2AdapterConfig) -> None:
        super().__init__()
        self.width = config.head_dim
        self.wq, self.wk, self.wv = (nn.Linear(inner, config.hidden_size) for _ in range(3))
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: torch.Tensor, kept: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, m, inner] to [b, n, inner], of which `seen` bool [b, n] says some."""
        pairs = ((self.wq, x), (self.wk, kept), (self.wv, kept))
        q, k, v = (_in_heads(matrix(given), self.width) for matrix, given in pairs)
        scores = q @ k.transpose(-2, -1) * self.width**-0.5
        if seen is not None:
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderMlp(nn.Module):
    """Two matrices and tanh's GELU."""

    def __init__(self, config: Molmo2VitConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The branch."""
        return self.w2(functional.gelu(self.w1(x), approximate="tanh"))


class EncoderBlock(nn.Module):
    """One layer of the encoder."""

    def __init__(self, config: Molmo2VitConfig) -> None:
        super().__init__()
        self.attention = EncoderAttention(config.hidden_size, config)
        self.feed_forward = EncoderMlp(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Patches [crops, 25, width] after the layer."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed)
        return x + self.feed_forward(self.ffn_norm(x))


class EncoderBlocks(nn.Module):
    """All of them, for their name in a checkpoint."""

    def __init__(self, config: Molmo2VitConfig) -> None:
        super().__init__()
        blocks = (EncoderBlock(config) for _ in range(config.num_hidden_layers))
        self.resblocks = nn.ModuleList(blocks)


class Encoder(nn.Module):
    """Patches of crops, each crop by itself."""

    def __init__(self, config: Molmo2VitConfig) -> None:
        super().__init__()
        pixels = 3 * config.image_patch_size**2
        self.patch_embedding = nn.Linear(pixels, config.hidden_size)
        positions = torch.zeros(config.image_num_pos, config.hidden_size)
        self.positional_embedding = nn.Parameter(positions)
        self.transformer = EncoderBlocks(config)

    def forward(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """[crops, 25, 588] -> [crops, 25, width], after each layer."""
        x, made = self.patch_embedding(pixels) + self.positional_embedding, []
        for block in self.transformer.resblocks:
            x = block(x)
            made.append(x)
        return made


class Projector(nn.Module):
    """To the width of the stream."""

    def __init__(self, config: Molmo2AdapterConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.text_hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> [tokens, hidden]."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Backbone(nn.Module):
    """Tokens of images: each looks at the patches that it is made of, starting from their mean."""

    def __init__(self, config: Molmo2Config) -> None:
        super().__init__()
        adapter: Molmo2AdapterConfig = config.adapter_config
        self.layers = adapter.vit_layers
        self.image_vit = Encoder(config.vit_config)
        inner = config.vit_config.hidden_size * len(self.layers)
        self.image_pooling_2d = EncoderAttention(inner, adapter)
        self.image_projector = Projector(adapter)

    def forward(self, pixels: torch.Tensor, pooling: torch.Tensor) -> torch.Tensor:
        """float32 [crops, 25, 588] and int64 [tokens, 4], patches by number or -1."""
        made = self.image_vit(pixels)
        patches = torch.cat([made[layer] for layer in self.layers], dim=-1).flatten(0, 1)
        seen = pooling >= 0
        kept = patches[pooling.clamp(min=0)] * seen[..., None]
        mean = kept.sum(1, keepdim=True) / seen.sum(1)[:, None, None]
        return self.image_projector(self.image_pooling_2d(mean, kept, seen)[:, 0])


class Body(nn.Module):
    """All but the head."""

    def __init__(self, config: Molmo2Config) -> None:
        super().__init__()
        self.image_patch_id = config.image_patch_id
        self.transformer = Decoder(config.text_config)
        self.vision_backbone = Backbone(config)

    def forward(self, token_ids: torch.Tensor, images: dict[str, torch.Tensor]) -> torch.Tensor:
        """What goes to the head, [1, n, hidden]."""
        x = self.transformer.wte(token_ids)
        if images:
            first, pooling = 0, []  # a token's patches are numbered within its image
            grids, crops = images["image_grids"], images["image_num_crops"]
            tokens = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
            split = images["image_token_pooling"].split(tokens.tolist())
            for number, own in zip(crops.tolist(), split, strict=True):
                pooling.append(torch.where(own < 0, own, own + first))
                first += number * images["pixel_values"].shape[1]
            made = self.vision_backbone(images["pixel_values"], torch.cat(pooling))
            x[token_ids == self.image_patch_id] = made
        n = token_ids.shape[1]
        mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
        for block in self.transformer.blocks:
            x = block(x, mask)
        return self.transformer.ln_f(x)


class Molmo2(PreTrainedModel):
    """The model."""

    config_class = Molmo2Config

    def __init__(self, config: Molmo2Config) -> None:
        super().__init__(config)
        text: Molmo2TextConfig = config.text_config
        self.model = Body(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Those of words; transformers has no head without them."""
        return self.model.transformer.wte

    def forward(
        self, input_ids: torch.Tensor, use_cache: bool = False, **images: torch.Tensor
    ) -> CausalLMOutput:
        """The logits of one sequence."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, images)))
