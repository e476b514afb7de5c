# SPDX-License-Identifier: Apache-2.0
"""Writes tests/pilot/autoencoders.safetensors: small autoencoders as the tools that train them save
them, and what the tools themselves make of random rows with them.

    pip install sae-lens==6.54.12 eai-sparsify==1.3.3 dictionary-learning==0.1.0   # apart from ours
    SPARSIFY_DISABLE_TRITON=1 python autoencoder_oracles.py tests/pilot/autoencoders.safetensors

The tools run as shipped, apart from the tests, which read the file. A case is `TOOL-KIND`; its
files of text, by name, as the tool or its trainer writes them, are in the metadata as JSON. The
folders of suites are made up here, and read by the loaders that SAELens has for them.
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
from sae_lens.loading import pretrained_sae_loaders as loaders
from sae_lens.training.activation_scaler import ActivationScaler
from safetensors.torch import load_file, save_file

HIDDEN, FEATURES, ROWS, K = 8, 32, 20, 4
FACTOR = 2.5
"""A trainer's factor of all rows."""
NORMS = {"in": 5.0, "out": 7.0}
"""Average norms of the rows of a data set."""
Case = tuple[dict[str, str], dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]
"""Text of files by name, tensors, rows, activations, and what is decoded of them."""


def drawn(model: torch.nn.Module, seed: int) -> None:
    """Fill a model with random numbers, thresholds with positive ones."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn_like(parameter) / 2
        parameter.data = values.abs() if name == "threshold" else values


def made_by(sae: Any, files: dict[str, str], tensors: dict[str, torch.Tensor]) -> Case:
    """A case of what SAELens makes of rows whose mean is not zero."""
    rows = 2 * torch.randn(ROWS, HIDDEN) + 0.5
    activations = sae.encode(rows)
    activations = activations.to_dense() if activations.is_sparse else activations
    decoded = sae(rows) if hasattr(sae, "W_skip") else sae.decode(activations)
    return files, tensors, rows, activations, decoded


def of_saelens(
    kind: str, subtracts: bool, normalize_activations: str = "none", **more: Any
) -> Case:
    if kind == "TopKSAE":
        more["k"] = K
    if "Transcoder" in kind:
        more["d_out"] = HIDDEN
    config = getattr(sae_lens, f"{kind}Config")(
        d_in=HIDDEN,
        d_sae=FEATURES,
        apply_b_dec_to_input=subtracts,
        normalize_activations=normalize_activations,
        **more,
    )
    sae = getattr(sae_lens, kind)(config)
    drawn(sae, len(kind) + subtracts)
    with tempfile.TemporaryDirectory() as folder:
        sae.save_model(folder)
        files = {"cfg.json": json.dumps(json.loads((Path(folder) / "cfg.json").read_text()))}
        tensors = load_file(Path(folder) / "sae_weights.safetensors")
        if normalize_activations == "expected_average_only_in":
            beside = f"{folder}/activation_scaler.json"
            ActivationScaler(scaling_factor=FACTOR).save(beside)
            files["activation_scaler.json"] = Path(beside).read_text()
            sae.fold_activation_norm_scaling_factor(FACTOR)
    return made_by(sae, files, tensors)


def of_suite(
    loader: str, folder: str, file: str, said: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Case:
    """A folder of a suite, one file of text and one of tensors, in SAELens."""
    [(name, config)] = said.items()
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / folder / "checkpoints").mkdir(parents=True)
        (Path(root) / folder / name).write_text(json.dumps(config))
        save_file(tensors, Path(root) / folder / file)

        def local(repo_id: str, filename: str, subfolder: str = "", **_: Any) -> str:
            return str(Path(root) / subfolder / filename)

        def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
            return {n: [*t.shape] for n, t in load_file(Path(root) / filename).items()}

        loaders.hf_hub_download, loaders.get_safetensors_tensor_shapes = local, shapes
        of_loader, state, _ = getattr(loaders, loader)("repository", folder, device="cpu")
    kinds = {"jumprelu": "JumpReLUSAE", "jumprelu_transcoder": "JumpReLUTranscoder"}
    kind = kinds[of_loader["architecture"]]
    if "W_skip" in state:  # SAELens's table of suites says so
        kind = "JumpReLUSkipTranscoder"
    more = {"d_out": HIDDEN} if "Transcoder" in kind else {}
    said_by_loader = {n: of_loader[n] for n in ("apply_b_dec_to_input", "normalize_activations")}
    sae_config = getattr(sae_lens, f"{kind}Config")(
        d_in=HIDDEN, d_sae=FEATURES, **said_by_loader, **more
    )
    sae = getattr(sae_lens, kind)(sae_config)
    sae.load_state_dict({n: tensor.float() for n, tensor in state.items()})
    if of_loader["normalize_activations"] == "expected_average_only_in":
        # Its table of suites has this factor of each file.
        sae.fold_activation_norm_scaling_factor(HIDDEN**0.5 / NORMS["in"])
    return made_by(sae, {name: json.dumps(config)}, tensors)


def suites() -> dict[str, Case]:
    """Cases of Gemma Scope 2 and Llama Scope, of numbers that bfloat16 has: SAELens reads the
    latter in it."""
    torch.manual_seed(3)
    hidden, number = HIDDEN, FEATURES
    shapes = {"w_enc": (hidden, number), "w_dec": (number, hidden), "threshold": (number,)}
    shapes |= {"b_enc": (number,), "b_dec": (hidden,)}
    gemma = {name: torch.randn(shape) / 2 for name, shape in shapes.items()}
    gemma["threshold"] = gemma["threshold"].abs()
    skip = {n: t.clone() for n, t in gemma.items()} | {
        "affine_skip_connection": torch.randn(hidden, hidden)
    }
    config = {"config.json": {"architecture": "jump_relu", "model_name": "google/gemma-3-1b-pt"}}
    linear = {"encoder.weight": (number, hidden), "encoder.bias": (number,)}
    linear |= {"decoder.weight": (hidden, number), "decoder.bias": (hidden,)}
    llama = {n: (torch.randn(shape) / 2).bfloat16().float() for n, shape in linear.items()}
    point = {"hook_point_in": "blocks.2.hook_resid_post"}
    said = {
        "hyperparams.json": {
            "act_fn": "jumprelu",
            "norm_activation": "dataset-wise",
            "jump_relu_threshold": 0.5,
            "d_model": hidden,
            "d_sae": number,
            "dataset_average_activation_norm": {**NORMS, "out": NORMS["in"]},
            **point,
            "hook_point_out": point["hook_point_in"],
        }
    }
    gemma_3, weights = "gemma_3_sae_huggingface_loader", "params.safetensors"
    return {
        "gemma_scope_2-sae": of_suite(
            gemma_3, "resid_post/layer_12_width_16k_l0_small", weights, config, gemma
        ),
        "gemma_scope_2-skip": of_suite(
            gemma_3, "transcoder/layer_12_width_16k_l0_small_affine", weights, config, skip
        ),
        "llama_scope-sae": of_suite(
            "llama_scope_sae_huggingface_loader",
            "Llama3_1-8B-Base-L2R-8x",
            "checkpoints/final.safetensors",
            said,
            llama,
        ),
    }


def of_sparsify(transcode: bool, skip: bool) -> Case:
    config = sparsify.SparseCoderConfig(
        num_latents=FEATURES, k=K, transcode=transcode, skip_connection=skip
    )
    sae = sparsify.SparseCoder(HIDDEN, config, device="cpu")
    drawn(sae, 1)
    with tempfile.TemporaryDirectory() as folder:
        sae.save_to_disk(Path(folder))
        said = (Path(folder) / "cfg.json").read_text()
        tensors = load_file(Path(folder) / "sae.safetensors")
    rows = torch.randn(ROWS, HIDDEN)
    found = sae.encode(rows)
    activations = torch.zeros(ROWS, FEATURES).scatter_(1, found.top_indices, found.top_acts)
    decoded = activations @ sae.W_dec + sae.b_dec
    decoded = sae(rows).sae_out if transcode else decoded
    return {"cfg.json": said}, tensors, rows, activations, decoded


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
    return {"config.json": said}, dict(sae.state_dict()), rows, activations, sae.decode(activations)


def main(out: str) -> None:
    """Write the file."""
    cases = {
        f"saelens-{kind}-{subtracts}": of_saelens(f"{kind}SAE", subtracts)
        for kind in ("Standard", "JumpReLU", "TopK", "Gated")
        for subtracts in (True, False)
    }
    for scaling in ("layer_norm", "constant_norm_rescale", "expected_average_only_in"):
        cases[f"saelens-{scaling}"] = of_saelens("JumpReLUSAE", True, scaling)
    cases["saelens-rescale"] = of_saelens("TopKSAE", True, rescale_acts_by_decoder_norm=True)
    for kind in ("Transcoder", "SkipTranscoder", "JumpReLUTranscoder", "JumpReLUSkipTranscoder"):
        cases[f"saelens-{kind}"] = of_saelens(kind, False)
    cases["saelens-transcoder-layer_norm"] = of_saelens("Transcoder", False, "layer_norm")
    cases["sparsify-TopK"] = of_sparsify(False, False)
    cases["sparsify-transcode"] = of_sparsify(True, False)
    cases["sparsify-skip"] = of_sparsify(True, True)
    for kind in ("AutoEncoder", "JumpReluAutoEncoder", "BatchTopKSAE"):
        cases[f"dictionary_learning-{kind}"] = of_dictionary_learning(kind)
    cases |= suites()
    tensors: dict[str, torch.Tensor] = {}
    for case, (_, own, rows, activations, decoded) in cases.items():
        tensors |= {f"{case}/{name}": tensor for name, tensor in own.items()}
        made = {"rows": rows, "activations": activations, "decoded": decoded}
        tensors |= {f"{case}.{name}": tensor for name, tensor in made.items()}
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(kept, out, {case: json.dumps(made[0]) for case, made in cases.items()})


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1])
