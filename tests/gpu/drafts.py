# SPDX-License-Identifier: Apache-2.0
"""A random EAGLE draft for the model of `tests.gpu.mode`: its drafts are hardly ever right, so
nearly every step rejects rows that were captured and steered."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_eagle(target: Path, path: Path) -> None:
    """One decoder layer over (embedding, hidden state), in the layout EAGLE checkpoints have."""
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = 1
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (queries, hidden),
        "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(31)
    weights = {
        f"{name}.weight": torch.randn(rows, columns, generator=generator) * columns**-0.5
        for name, (rows, columns) in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: w.bfloat16() for n, w in weights.items()}, path / "model.safetensors")
