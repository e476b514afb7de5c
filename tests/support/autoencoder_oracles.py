# SPDX-License-Identifier: Apache-2.0
"""Writes tests/pilot/autoencoders.safetensors: small autoencoders as the tools that train them save
them, and what the tools themselves make of random rows with them.

    pip install sae-lens==6.54.12 eai-sparsify==1.3.3 dictionary-learning==0.1.0   # apart from ours
    SPARSIFY_DISABLE_TRITON=1 python autoencoder_oracles.py tests/pilot/autoencoders.safetensors

The tools run as shipped, apart from the tests, which read the file. A case is `TOOL-KIND`; its
configuration, the text of a file that the tool or its trainer writes, is in the metadata.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sae_lens
import sparsify
import torch
from dictionary_learning import dictionary
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from safetensors.torch import load_file, save_file

HIDDEN, FEATURES, ROWS, K = 8, 32, 20, 4
Case = tuple[str, dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]
"""Configuration, tensors, rows, activations, and what is decoded of them."""


def drawn(model: torch.nn.Module, seed: int) -> None:
    """Fill a model with random numbers, thresholds with positive ones."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn_like(parameter) / 2
        parameter.data = values.abs() if name == "threshold" else values


def of_saelens(kind: str, subtracts: bool) -> Case:
    more: dict[str, Any] = {"k": K} if kind == "TopK" else {}
    config = getattr(sae_lens, f"{kind}SAEConfig")(
        d_in=HIDDEN, d_sae=FEATURES, apply_b_dec_to_input=subtracts, **more
    )
    sae = getattr(sae_lens, f"{kind}SAE")(config)
    drawn(sae, len(kind) + subtracts)
    with tempfile.TemporaryDirectory() as folder:
        sae.save_model(folder)
        said = json.dumps(json.loads((Path(folder) / "cfg.json").read_text()))
        tensors = load_file(Path(folder) / "sae_weights.safetensors")
    rows = torch.randn(ROWS, HIDDEN)
    activations = sae.encode(rows)
    return said, tensors, rows, activations, sae.decode(activations)


def of_sparsify() -> Case:
    config = sparsify.SparseCoderConfig(num_latents=FEATURES, k=K)
    sae = sparsify.SparseCoder(HIDDEN, config, device="cpu")
    drawn(sae, 1)
    with tempfile.TemporaryDirectory() as folder:
        sae.save_to_disk(Path(folder))
        said = (Path(folder) / "cfg.json").read_text()
        tensors = load_file(Path(folder) / "sae.safetensors")
    rows = torch.randn(ROWS, HIDDEN)
    found = sae.encode(rows)
    activations = torch.zeros(ROWS, FEATURES).scatter_(1, found.top_indices, found.top_acts)
    return said, tensors, rows, activations, activations @ sae.W_dec + sae.b_dec


def of_dictionary_learning(kind: str) -> Case:
    more: dict[str, Any] = {}
    if kind == "BatchTopKSAE":
        sae: Any = BatchTopKSAE(HIDDEN, FEATURES, K)
        more["use_threshold"] = True
    else:
        sae = getattr(dictionary, kind)(HIDDEN, FEATURES)
    drawn(sae, len(kind))
    if more:
        sae.threshold.data = torch.tensor(0.3)
    rows = torch.randn(ROWS, HIDDEN)
    activations = sae.encode(rows, **more)
    said = json.dumps({"trainer": {"dict_class": kind}})
    return said, dict(sae.state_dict()), rows, activations, sae.decode(activations)


def main(out: str) -> None:
    """Write the file."""
    cases = {
        f"saelens-{kind}-{subtracts}": of_saelens(kind, subtracts)
        for kind in ("Standard", "JumpReLU", "TopK", "Gated")
        for subtracts in (True, False)
    }
    cases["sparsify-TopK"] = of_sparsify()
    for kind in ("AutoEncoder", "JumpReluAutoEncoder", "BatchTopKSAE"):
        cases[f"dictionary_learning-{kind}"] = of_dictionary_learning(kind)
    tensors: dict[str, torch.Tensor] = {}
    for case, (_, own, rows, activations, decoded) in cases.items():
        tensors |= {f"{case}/{name}": tensor for name, tensor in own.items()}
        made = {"rows": rows, "activations": activations, "decoded": decoded}
        tensors |= {f"{case}.{name}": tensor for name, tensor in made.items()}
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(kept, out, {case: made[0] for case, made in cases.items()})


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1])
