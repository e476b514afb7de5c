# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders: read from the files that people have, against their formulas in float64, and
written by the engine's own operation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.autoencoders import made_up
from tests.support.terms import LAYER, LENGTH, POINT, Site, worst
from vllm.model_executor.layers.steering_terms import steer_rows_torch
from vllm.pilot import Autoencoder
from vllm.v1.features.places import Place
from vllm.v1.features.sizes import size_of

pytestmark = pytest.mark.quick

HIDDEN, FEATURES = 24, 60
TOLERANCE = 1e-5


def made(seed: int = 0) -> dict[str, torch.Tensor]:
    return made_up(seed, HIDDEN, FEATURES)


def rows(count: int = LENGTH) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(9))


def saelens(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    config = {"d_in": HIDDEN, "d_sae": FEATURES, "apply_b_dec_to_input": True, **config}
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file(tensors, folder / "sae_weights.safetensors")
    return folder


def activations(tensors: dict[str, torch.Tensor], x: torch.Tensor, subtracts: bool) -> torch.Tensor:
    """The formula in float64."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    read = x.double() - t["b_dec"] if subtracts else x.double()
    before = read @ t["W_enc"] + t["b_enc"]
    threshold = t.get("threshold", torch.zeros(FEATURES, dtype=torch.float64))
    return torch.where(before > threshold, before.clamp(min=0), 0.0)


@pytest.mark.parametrize("subtracts", [False, True])
@pytest.mark.parametrize("architecture", ["standard", "jumprelu"])
def test_a_folder_of_saelens(tmp_path: Path, architecture: str, subtracts: bool) -> None:
    tensors, x = made(), rows()
    if architecture == "standard":
        del tensors["threshold"]
    config = {"architecture": architecture, "apply_b_dec_to_input": subtracts}
    sae = Autoencoder.load(saelens(tmp_path / "sae", tensors, **config))
    want, other = (activations(tensors, x, flag) for flag in (subtracts, not subtracts))
    got = sae.encode(x)
    assert (sae.hidden_size, sae.num_features) == (HIDDEN, FEATURES)
    assert float((got.double() - want).abs().max()) < TOLERANCE
    assert float((got.double() - other).abs().max()) > 0.1, "the order of the bias is not seen"
    decoded = want @ tensors["W_dec"].double() + tensors["b_dec"].double()
    assert float((sae.decode(got).double() - decoded).abs().max()) < TOLERANCE
    ids, values = sae.top(x, 3)
    assert torch.equal(values, got.sort(descending=True).values[:, :3])
    assert torch.equal(got.gather(1, ids), values)


def test_a_file_of_gemma_scope(tmp_path: Path) -> None:
    tensors, x = made(), rows()
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(tmp_path / "params.npz", **arrays)
    sae = Autoencoder.load(tmp_path / "params.npz")
    stays = sum(array.nbytes for array in arrays.values())
    assert size_of(tmp_path / "params.npz", HIDDEN, 4) == taken(sae, stays)
    assert size_of(tmp_path / "params.npz", HIDDEN, 2).device < taken(sae)[0]
    got = sae.encode(x.bfloat16())
    want = activations(tensors, x.bfloat16(), subtracts=False)
    assert float((got.double() - want).abs().max()) < TOLERANCE
    low = {**tensors, "threshold": torch.zeros(FEATURES)}
    assert float((got.double() - activations(low, x, subtracts=False)).abs().max()) > 0.05


@pytest.mark.parametrize("subtracts", [False, True])
def test_the_engine_writes_features_as_the_file_has_them(tmp_path: Path, subtracts: bool) -> None:
    """All at once: the row changes by (f' - f) W_dec of each, and keeps its error."""
    tensors, x = made(), rows()
    folder = saelens(
        tmp_path / "sae", tensors, architecture="jumprelu", apply_b_dec_to_input=subtracts
    )
    sae = Autoencoder.load(folder)
    values = {3: 8.0, 17: 0.0, 42: 2.5}
    ops = [sae.op(feature, POINT, LAYER, value=value) for feature, value in values.items()]
    ops.append(sae.op(5, POINT, LAYER, add=4.0, only_if_active=True))
    before = activations(tensors, x, subtracts)
    after = before.clone()
    for feature, value in values.items():
        after[:, feature] = value
    after[:, 5] += 4.0 * (before[:, 5] > 0)
    assert 0 < int((before[:, 5] > 0).sum()) < LENGTH
    want = x.double() + (after - before) @ tensors["W_dec"].double()
    got = Site(ops, HIDDEN, LENGTH).step(steer_rows_torch, x, range(LENGTH))
    assert worst(got, want, x) < TOLERANCE
    apart = x
    for op in ops:
        apart = Site([op], HIDDEN, LENGTH).step(steer_rows_torch, apart, range(LENGTH))
    assert worst(apart, want, x) > 0.01, "one after the other would be as good"


ORACLES = Path(__file__).with_name("autoencoders.safetensors")


FILES = {
    "saelens": "sae_weights.safetensors",
    "sparsify": "sae.safetensors",
    "gemma_scope_2": "params.safetensors",
    "llama_scope": "checkpoints/final.safetensors",
}
"""Tool or suite -> file of its tensors, but for dictionary_learning."""


def as_saved(
    folder: Path, tool: str, tensors: dict[str, torch.Tensor], texts: dict[str, str]
) -> Path:
    """A folder as a tool leaves it."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    if tool == "dictionary_learning":
        torch.save(tensors, folder / "ae.pt")
        return folder
    (folder / FILES[tool]).parent.mkdir(exist_ok=True)
    save_file(tensors, folder / FILES[tool])
    return folder


def stored_case(
    stored: dict[str, torch.Tensor], case: str
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Tensors of a case's file; its rows, activations, and what is decoded."""
    tensors = {
        name.partition("/")[2]: tensor
        for name, tensor in stored.items()
        if name.startswith(f"{case}/")
    }
    return tensors, [stored[f"{case}.{n}"] for n in ("rows", "activations", "decoded")]


def taken(sae: Autoencoder, stays: int = 0) -> tuple[int, int]:
    """Bytes of a device with float32, and of a process that has the file open, but for what of it
    `stays`."""
    kept = sae.gain, sae.decoder_gain, sae.bias, sae.threshold
    vectors = sum(4 * tensor.numel() for tensor in (*kept, torch.empty(sae.hidden_size)))
    return 2 * 4 * sae.encoder.numel() + vectors, stays + vectors


def test_what_the_tools_say_of_their_own_files(tmp_path: Path) -> None:
    """`tests/support/autoencoder_oracles.py` ran SAELens, sparsify and dictionary_learning as
    shipped. Twice the decoder's bias changes activations where a tool subtracts it."""
    stored = load_file(ORACLES)
    with safe_open(ORACLES, "pt") as file:
        cases = file.metadata()
    assert len(cases) == 26
    for case, text in cases.items():
        tool, texts = case.partition("-")[0], json.loads(text)
        tensors, [rows, want, decoded] = stored_case(stored, case)
        sae = Autoencoder.load(as_saved(tmp_path / case, tool, tensors, texts))
        assert size_of(tmp_path / case, sae.hidden_size, 4) == taken(sae), case
        got = sae.encode(rows)
        assert float((got - want).abs().max()) < TOLERANCE, case
        assert float((sae.decode(got, rows) - decoded).abs().max()) < TOLERANCE, case
        assert 0.1 < float((want > 0).float().mean()) < 0.7, "too few or too many to say"
        bias = next(name for name in ("b_dec", "bias", "decoder.bias") if name in tensors)
        moved = {**tensors, bias: 2 * tensors[bias]}
        other = Autoencoder.load(as_saved(tmp_path / f"{case}-other", tool, moved, texts))
        off = float((other.encode(rows) - want).abs().max())
        assert off < TOLERANCE if case.endswith(ADDS_AFTER) else off > 0.1, case
        assert float((other.decode(got, rows) - decoded).abs().max()) > 0.1, case


def test_autoencoders_that_differ_have_other_digests(tmp_path: Path) -> None:
    def digest(name: str, **changed: torch.Tensor) -> str:
        folder = saelens(tmp_path / name, {**made(), **changed}, architecture="jumprelu")
        return Autoencoder.load(folder).digest

    one = digest("one")
    assert one == digest("same")
    others = [digest(f"other-{name}", **{name: 2 * tensor}) for name, tensor in made().items()]
    assert len({one, *others}) == 1 + len(others)


def test_an_activation_at_its_threshold_is_none(tmp_path: Path) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in made().items()}
    tensors["threshold"] += 1.5
    tensors["W_enc"][0] = 1.0
    sae = Autoencoder.load(saelens(tmp_path / "sae", tensors, architecture="jumprelu"))
    x = torch.zeros(2, HIDDEN)
    x[:, 0] = torch.tensor([1.5, 1.5000002])
    assert (sae.encode(x) > 0).tolist() == [[False] * FEATURES, [True] * FEATURES]


def reconstructing(
    folder: Path,
) -> Iterator[tuple[str, Autoencoder, torch.Tensor, torch.Tensor]]:
    """All kinds of files but transcoders: name, autoencoder, rows, and what is decoded of them."""
    stored = load_file(ORACLES)
    with safe_open(ORACLES, "pt") as file:
        cases = file.metadata()
    for case, text in cases.items():
        tensors, [rows, _, decoded] = stored_case(stored, case)
        tool = case.partition("-")[0]
        sae = Autoencoder.load(as_saved(folder / case, tool, tensors, json.loads(text)))
        if not sae.transcodes and sae.skip is None:
            yield case, sae, rows, decoded


def test_a_reconstruction_is_what_is_decoded(tmp_path: Path) -> None:
    """As the engine computes it."""
    seen = 0
    for case, sae, rows, decoded in reconstructing(tmp_path):
        seen += 1
        assert float((sae.reconstruct(rows) - decoded).abs().max()) < TOLERANCE, case
        assert float((rows - decoded).abs().max()) > 0.1, "it reconstructs too well to say"
    assert seen >= 15


def test_a_place_computes_by_what_was_put_in_it_last(tmp_path: Path) -> None:
    """One of all kinds after the other, of fewer features than there is room for: what was there
    before leaves nothing."""
    hidden, number = 8, 40
    path = saelens(tmp_path / "wide", made_up(0, hidden, number), architecture="jumprelu")
    wide, cpu = Autoencoder.load(path), torch.device("cpu")
    of_all, of_some = (Place.empty(hidden, number, k, cpu, torch.float32) for k in (9, 0))
    refused = 0
    for case, sae, rows, decoded in reconstructing(tmp_path):
        refused += not of_some.fits(sae)
        assert of_some.fits(sae) == (not sae.k) and of_all.fits(sae)
        for place in [of_all, of_some][: 1 if sae.k else 2]:
            place.put(wide)
            other = place.reconstruct(rows)
            place.put(sae)
            assert float((place.reconstruct(rows) - decoded).abs().max()) < TOLERANCE, case
            assert float((other - decoded).abs().max()) > 0.1, case
    assert refused >= 2
    assert not Place.empty(hidden, number - 1, 0, cpu, torch.float32).fits(wide)


ADDS_AFTER = (
    "-False",
    "JumpReluAutoEncoder",
    "ranscoder",
    "transcoder-layer_norm",
    "-transcode",
    "-skip",
    "_2-sae",
    "_scope-sae",
)
"""Ends of the cases whose tools do not subtract the decoder's bias from the row."""


@pytest.mark.parametrize(
    "case",
    ["layer_norm", "constant_norm_rescale", "expected_average_only_in", "rescale"],
)
def test_a_scaling_is_the_files_own(tmp_path: Path, case: str) -> None:
    """Without the word of it in cfg.json, activations are others; and so are those of rows that
    are three times as long, unless each row is scaled by itself."""
    stored = load_file(ORACLES)
    with safe_open(ORACLES, "pt") as file:
        texts = json.loads(file.metadata()[f"saelens-{case}"])
    tensors, [x, want, decoded] = stored_case(stored, f"saelens-{case}")
    sae = Autoencoder.load(as_saved(tmp_path / "sae", "saelens", tensors, texts))
    config = json.loads(texts["cfg.json"])
    config |= {"normalize_activations": "none", "rescale_acts_by_decoder_norm": False}
    plain = {"cfg.json": json.dumps(config)}
    without = Autoencoder.load(as_saved(tmp_path / "plain", "saelens", tensors, plain))
    assert float((without.encode(x) - want).abs().max()) > 0.1
    of_long = float((sae.encode(3 * x) - want).abs().max())
    if not sae.scaling:
        assert of_long > 0.1
        feature = int(want.sum(0).argmax())
        if case == "rescale":  # of TopK
            return
        found = sae.feature(feature)
        z = x @ found["encoder"] + found["bias"]
        active = z.where(z > found["threshold"], 0.0)
        assert float((active - want[:, feature]).abs().max()) < TOLERANCE
        assert float(active.max()) > 0.1
        others = want.clone()
        others[:, feature] = 0
        added = decoded - sae.decode(others)
        assert float((added - active[:, None] * found["decoder"]).abs().max()) < TOLERANCE
        return
    assert of_long < 1e-3
    for call in (sae.probe, sae.feature):
        with pytest.raises(ValueError, match=f"scales each row by itself .{case}.*'add'"):
            call(1)
    with pytest.raises(ValueError, match="decodes with the rows that were read: give rows"):
        sae.decode(want)
    along = decoded[:, 0] - sae.decode(torch.zeros_like(want), x)[:, 0]
    _, effects = sae.effects(x, torch.eye(x.shape[1])[0], want.shape[1])
    assert float((effects.sum(1) - along).abs().max()) < 1e-4 < float(along.abs().max())


def test_llama_scope_writes_in_the_units_of_its_data(tmp_path: Path) -> None:
    """SAELens has one factor of the rows; of a transcoder what is decoded has one of its own, by
    the formula of the suite."""
    stored, case = load_file(ORACLES), "llama_scope-sae"
    with safe_open(ORACLES, "pt") as file:
        texts = json.loads(file.metadata()[case])
    tensors, [x, want, decoded] = stored_case(stored, case)
    config = json.loads(texts["hyperparams.json"])
    config["dataset_average_activation_norm"]["out"] = 7.0
    config["hook_point_out"] = "blocks.2.hook_mlp_out"

    def loaded(name: str, **more: object) -> Autoencoder:
        said = {"hyperparams.json": json.dumps({**config, **more})}
        return Autoencoder.load(as_saved(tmp_path / name, "llama_scope", tensors, said))

    sae = loaded("transcoder")
    assert sae.transcodes
    assert float((sae.encode(x) - want).abs().max()) < TOLERANCE
    assert float((sae.decode(want) - decoded * 7.0 / 5.0).abs().max()) < TOLERANCE
    assert float((sae.decode(want) - decoded).abs().max()) > 0.1
    twice = config["dataset_average_activation_norm"] | {"in": 10.0}
    other = loaded("other", dataset_average_activation_norm=twice)
    assert float((other.encode(x) - want).abs().max()) > 0.1
    refused: dict[str, dict[str, object]] = {
        "sparsity_include_decoder_norm is read of decoders alone": {
            "sparsity_include_decoder_norm": True
        },
        "dataset_average_activation_norm: in must be a positive": {
            "dataset_average_activation_norm": {"out": 1}
        },
        "jump_relu_threshold must be a positive number, got 'None'": {"jump_relu_threshold": None},
        "act_fn 'topk' is not read, jumprelu": {"act_fn": "topk"},
        "norm_activation 'token-wise' is not read": {"norm_activation": "token-wise"},
        "use_glu_encoder 'True' is not read": {"use_glu_encoder": True},
    }
    for number, (message, more) in enumerate(refused.items()):
        with pytest.raises(ValueError, match=message):
            loaded(f"refused{number}", **more)
    tensors["log_jumprelu_threshold"] = torch.zeros(())
    with pytest.raises(ValueError, match=r"has \['log_jumprelu_threshold'\]: only encoder.weight"):
        loaded("newer")


def test_a_transcoder_is_read_and_added_alone(tmp_path: Path) -> None:
    """Files of Gemma Scope do not say: at the MLP's input they are transcoders."""
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in made().items()}
    np.savez(tmp_path / "params.npz", **arrays)
    sae = Autoencoder.load(tmp_path)
    assert sae.transcodes is None
    assert sae.feature(1)["decoder"].shape == (HIDDEN,)
    assert torch.equal(sae.op(1, POINT, LAYER)["decoder"], sae.decoder[1])
    at_input = sae.at("mlp_in")
    assert at_input.transcodes and not sae.at("post_block").transcodes
    assert torch.equal(at_input.probe(1)["encoder"], sae.encoder[:, 1])
    for call in (at_input.feature, lambda number: sae.op(number, "mlp_in", LAYER)):
        with pytest.raises(ValueError, match="is a transcoder, which reads one site and writes"):
            call(1)


def largest(activations: torch.Tensor, k: int) -> torch.Tensor:
    """Activations of which the k largest of a row stay."""
    least = activations.sort(dim=-1, descending=True).values[:, k - 1 : k]
    return activations.where(activations >= least, 0.0)


def test_folders_of_sparsify_and_dictionary_learning(tmp_path: Path) -> None:
    """By their formulas in float64: encoders [features, hidden], `b_dec` subtracted."""
    tensors, x = made(), rows()
    want = activations({**tensors, "threshold": torch.zeros(FEATURES)}, x, subtracts=True)
    linear = {"encoder.weight": tensors["W_enc"].T, "encoder.bias": tensors["b_enc"]}
    decoder, bias = tensors["W_dec"], tensors["b_dec"]
    folder = tmp_path / "sparsify"
    folder.mkdir()
    (folder / "cfg.json").write_text(json.dumps({"k": 5, "activation": "topk"}))
    sparsify = {**linear, "W_dec": decoder, "b_dec": bias}
    save_file({n: t.contiguous() for n, t in sparsify.items()}, folder / "sae.safetensors")
    sae = Autoencoder.load(folder)
    got = sae.encode(x).double()
    assert float((got - largest(want, 5)).abs().max()) < TOLERANCE
    assert float((got - largest(want, 6)).abs().max()) > 0.05
    with pytest.raises(ValueError, match="is TopK: whether a feature is active depends on all"):
        sae.op(3, POINT, LAYER, value=1.0)
    by_column = {"W_enc": tensors["W_enc"], "b_enc": tensors["b_enc"], "W_dec": decoder}
    threshold = tensors["threshold"]
    of_one = {**linear, "decoder.weight": decoder.T}
    files: dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]] = {
        "AutoEncoder": ({**of_one, "bias": bias}, want),
        "BatchTopKSAE": (
            {**of_one, "b_dec": bias, "threshold": torch.tensor(0.25), "k": torch.tensor(5)},
            activations({**tensors, "threshold": torch.full((FEATURES,), 0.25)}, x, True),
        ),
        "JumpReluAutoEncoder": (
            {**by_column, "b_dec": bias, "threshold": threshold},
            activations(tensors, x, subtracts=False),
        ),
    }
    for kind, (state, of_kind) in files.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"trainer": {"dict_class": kind}}))
        torch.save(state, folder / "ae.pt")
        got = Autoencoder.load(folder).encode(x).double()
        assert float((got - of_kind).abs().max()) < TOLERANCE, kind
        assert kind == "AutoEncoder" or float((got - want).abs().max()) > 0.05, kind
    (tmp_path / "AutoEncoder" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="dict_class 'none' is not read, AutoEncoder, Batch"):
        Autoencoder.load(tmp_path / "AutoEncoder")
    torch.save({"encoder.weight": Path("x")}, tmp_path / "BatchTopKSAE" / "ae.pt")
    with pytest.raises(ValueError, match="cannot be read as an autoencoder"):
        Autoencoder.load(tmp_path / "BatchTopKSAE")


JUMPS = {"architecture": "jumprelu"}


def test_what_is_not_read_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    good = made()

    def refused(message: str, tensors: dict[str, torch.Tensor], **config: Any) -> None:
        number = len(list(tmp_path.iterdir()))
        folder = saelens(tmp_path / f"sae{number}", tensors, **config)
        with pytest.raises(ValueError, match=message):
            Autoencoder.load(folder)

    refused("architecture 'tsae' is not read, standard, jumprelu", good, architecture="tsae")
    refused("cfg.json lacks apply_b_dec_to_input: say true", good, apply_b_dec_to_input=None)
    refused("k must be a positive int, got 'None'", good, architecture="topk")
    refused("k is 61, there are 60", good, architecture="topk", k=61)
    zeros = {**good, "W_dec": torch.zeros_like(good["W_dec"])}
    refused("W_dec has rows of zeros", zeros, rescale_acts_by_decoder_norm=True)
    refused(
        "normalize_activations 'covariance_whitening'",
        good,
        normalize_activations="covariance_whitening",
    )
    refused(
        "activation_scaler.json with its scaling_factor is not there",
        good,
        normalize_activations="expected_average_only_in",
    )
    refused("reshape_activations 'hook_z' is not read", good, reshape_activations="hook_z")
    refused("activation_fn_str 'topk' is not read", good, activation_fn_str="topk")
    refused("finetuning_scaling_factor 'True'", good, finetuning_scaling_factor=True)
    refused("apply_b_dec_to_input of a transcoder", good, architecture="transcoder")
    refused("lacks threshold", {n: t for n, t in good.items() if n != "threshold"}, **JUMPS)
    skip = {"architecture": "skip_transcoder", "apply_b_dec_to_input": False}
    refused("lacks W_skip", good, **skip)
    refused("a skip transcoder with a scaling", good, **skip, normalize_activations="layer_norm")
    refused("lacks W_dec; it has", {name: t for name, t in good.items() if name != "W_dec"})
    refused(r"W_dec is torch.float32 \[60, 23\]", {**good, "W_dec": good["W_dec"][:, 1:].clone()})
    refused(r"b_enc is torch.int64 \[60\]", {**good, "b_enc": torch.zeros(60, dtype=torch.int64)})
    refused("b_dec has numbers that are not", {**good, "b_dec": torch.full((HIDDEN,), torch.nan)})
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "pickle.npz").write_bytes(b"\x80\x04N.")
    for name in ("empty", "broken.npz", "pickle.npz", "nowhere.npz"):
        with pytest.raises(ValueError, match="cannot be read as an autoencoder"):
            Autoencoder.load(tmp_path / name)


def test_direct_effects(tmp_path: Path) -> None:
    """All effects together are what the decoder adds along the direction."""
    sae = Autoencoder.load(saelens(tmp_path / "sae", made()))
    x, direction = rows(), torch.randn(HIDDEN, generator=torch.Generator().manual_seed(4))
    ids, effects = sae.effects(x, direction, FEATURES)
    want = (sae.decode(sae.encode(x)) - sae.decoder_bias) @ direction
    assert float((effects.sum(1) - want).abs().max()) < 1e-4
    assert float((effects.sum(1) - (x @ direction)).abs().max()) > 0.1
    assert (effects.abs().diff(dim=1) <= 0).all()
    one = float(sae.encode(x)[2, ids[2, 0]] * (sae.decoder[ids[2, 0]] @ direction))
    assert abs(float(effects[2, 0]) - one) < TOLERANCE
    of_rows = direction * torch.arange(1, len(x) + 1)[:, None]
    _, scaled = sae.effects(x, of_rows, 3)
    assert float((scaled[2] - 3 * effects[2, :3]).abs().max()) < 1e-4
    with pytest.raises(ValueError, match="the direction is 23 wide"):
        sae.effects(x, direction[1:], 1)


def test_wrong_features_and_rows(tmp_path: Path) -> None:
    sae = Autoencoder.load(saelens(tmp_path / "sae", made()))
    for feature in (-1, FEATURES):
        with pytest.raises(ValueError, match=f"feature: {feature} is none of 0-59"):
            sae.op(feature, POINT, LAYER, value=1.0)
    with pytest.raises(ValueError, match="rows are 23 wide"):
        sae.encode(torch.zeros(2, HIDDEN - 1))
