# SPDX-License-Identifier: Apache-2.0
"""Writes repeng.gguf beside this file, with the real repeng, and asserts what its layers mean.

Not run by the tests: repeng pins an old numpy. It was run once, with repeng 0.4.0 and gguf 0.19.0,

    pip install --no-deps --target /tmp/site repeng gguf \
        scikit-learn scipy joblib threadpoolctl narwhals
    PYTHONPATH=/tmp/site python -m tests.support.write_repeng

and again reads what we export, with a path as its argument:

    PYTHONPATH=/tmp/site python -m tests.support.write_repeng exported.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FILE = Path(__file__).with_name("repeng.gguf")
HIDDEN = 96
LAYERS = (1, 2, 3)


def directions() -> dict[int, np.ndarray]:
    """layer -> float32 [HIDDEN], as in the file."""
    generator = np.random.default_rng(4)
    return {layer: generator.normal(size=HIDDEN).astype(np.float32) for layer in LAYERS}


def repeng() -> Any:
    """The package, which is written for numpy 1."""
    np.float_ = np.float64  # type: ignore[attr-defined]
    import repeng

    return repeng


def check_meaning(package: Any) -> None:
    """Layer i of a control vector is added to the output of block i, counted from 0."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=2,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.arange(7)[None]
    for layer, direction in directions().items():
        logits = {}
        for block in (layer - 1, layer, layer + 1):
            added = torch.from_numpy(direction)
            hook = model.model.layers[block].register_forward_hook(
                lambda module, args, output, added=added: output + added
            )
            logits[block] = model(tokens).logits
            hook.remove()
        controlled = package.ControlModel(model, [layer])
        controlled.set_control(package.ControlVector("llama", {layer: direction}))
        got = controlled(tokens).logits
        model = controlled.unwrap()
        assert torch.allclose(got, logits[layer], atol=1e-5)
        assert not torch.allclose(got, logits[layer - 1], atol=1e-2)
        assert not torch.allclose(got, logits[layer + 1], atol=1e-2)


@torch.no_grad()
def main() -> None:
    package = repeng()
    if len(sys.argv) > 1:
        read = package.ControlVector.import_gguf(sys.argv[1])
        print(read.model_type, {n: float(np.linalg.norm(v)) for n, v in read.directions.items()})
        return
    check_meaning(package)
    package.ControlVector("llama", directions()).export_gguf(str(FILE))


if __name__ == "__main__":
    main()
