# SPDX-License-Identifier: Apache-2.0
"""Rules of an operator, of random probes of several layers, which judge every token and never
fire."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

LINEAR, POOLED = "linear.json", "pooled.json"
"""The files of 32 linear probes, and of an MLP with an attention probe."""

_RULES, _UNITS, _HEADS = 32, 64, 4


def save_rules(folder: Path, model: Path) -> None:
    """Write both files, and those of their probes, for a model's config."""
    from vllm.v1.probes.files import made_probe, save_probe
    from vllm.v1.probes.pools import Attention, Mean

    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    sites = [("post_block", layers * part // 4) for part in (1, 2, 3)]
    rng = np.random.default_rng(0)

    def weight(units: int) -> np.ndarray:
        return rng.normal(size=(units, len(sites), hidden)) / hidden**0.5

    probes = {f"linear-{i}": made_probe(sites, weight(1), np.zeros(1)) for i in range(_RULES)}
    last = rng.normal(size=(1, _UNITS)) / _UNITS**0.5
    probes["mlp"] = made_probe(
        sites,
        weight(_UNITS),
        np.zeros(_UNITS),
        activation="gelu_tanh",
        output_weight=last,
        output_bias=np.zeros(1),
        pool=Mean(),
    )
    probes["attention"] = made_probe(
        sites, weight(2 * _HEADS), np.zeros(2 * _HEADS), pool=Attention()
    )
    for name, probe in probes.items():
        save_probe(probe, folder / f"{name}.safetensors")
    linear = [name for name in probes if name.startswith("linear")]
    for file, names in ((LINEAR, linear), (POOLED, ["mlp", "attention"])):
        rules = [
            {"name": n, "probe": {"file": f"{n}.safetensors"}, "threshold": 1e30} for n in names
        ]
        (folder / file).write_text(json.dumps({"rules": rules}))
