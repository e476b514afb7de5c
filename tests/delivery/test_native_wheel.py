# SPDX-License-Identifier: Apache-2.0
"""The native ops in the built wheel: which it says that it has, and that an engine uses them."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import ROOT
from tests.delivery.fork import Fork
from tools import backend, native
from tools.native import NativeBuildError
from tools.pins import Pin, load_pin
from vllm_pilot import state

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

LIBRARY = f"vllm/{native.LIBRARY}"
ELF = b"\0GLIBC_2.2.5\0GLIBC_2.17\0"


def wheel_with(
    made: bytes | str, pin: Pin, fork: Fork, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, bytes]:
    """The wheel of the miniature, where the compiler leaves `made`, or fails and says so."""

    def compile_it(into: Path, torch: Path, *, cuda: bool) -> Path:
        assert cuda == (pin.target == "cuda")
        if isinstance(made, str):
            raise NativeBuildError(made)
        (into / native.LIBRARY).write_bytes(made)
        return into / native.LIBRARY

    monkeypatch.setattr(native, "build", compile_it)
    monkeypatch.setattr(backend, "ROOT", fork.root)
    monkeypatch.setattr(backend, "load_pin", lambda: pin)
    with zipfile.ZipFile(folder / backend.build_wheel(str(folder))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def recorded(files: dict[str, bytes]) -> dict[str, str]:
    (name,) = (name for name in files if name.endswith("/RECORD"))
    return {path: digest for path, digest, _ in csv.reader(io.StringIO(files[name].decode()))}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (ELF, "native ops: CPU, from glibc 2.17 on (elsewhere"),
        (ELF + b".nv_fatbin\0", "native ops: CPU and CUDA, from glibc 2.17"),
        ("cmake not found", "native ops: none: cmake not found"),
    ],
)
def test_the_wheel_says_what_it_carries(
    miniature: Fork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    made: bytes | str,
    said: str,
) -> None:
    monkeypatch.setattr(native, "pinned_torch", lambda pin: tmp_path)
    files = wheel_with(made, miniature.pin, miniature, tmp_path, monkeypatch)
    assert said in capsys.readouterr().err
    if isinstance(made, str):
        assert LIBRARY not in files and LIBRARY not in recorded(files)
    else:
        assert files[LIBRARY] == made and recorded(files)[LIBRARY] == state.digest(made)


def test_kernels_for_gpus_are_built_for_the_wheel_of_gpus_only(
    miniature: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "pinned_torch", lambda pin: tmp_path)
    miniature.assemble()
    (folder,) = (miniature.root / "build").glob("upstream-*")
    pin = replace(miniature.pin, target="cuda")
    folder.rename(folder.with_name(folder.name.replace("cpu", "cuda")))
    assert LIBRARY in wheel_with(ELF, pin, miniature, tmp_path, monkeypatch)


def test_the_pinned_torch_is_found_where_isolation_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = load_pin(target="cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "of this Python"))
    torch = tmp_path / ".venv/lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(f"__version__ = '{pin.torch}+cpu'\n")
    assert native.pinned_torch(pin, tmp_path) == torch
    (torch / "version.py").write_text(f"__version__ = '{pin.torch}1+cpu'\n")
    with pytest.raises(NativeBuildError, match=rf"torch {pin.torch} not found; install it"):
        native.pinned_torch(pin, tmp_path)


PROGRAM = """
import json, sys
from pathlib import Path
from tests.conformance.engine import engine, prepare_environment
prepare_environment("v1")
from torch.profiler import profile
import vllm
from vllm.model_executor.layers.native_rows import NATIVE_ROWS

hidden = json.loads(Path(sys.argv[1], "config.json").read_text())["hidden_size"]
capture = {"inline": {"hooks": {"post_block": "all"}, "positions": "all"}}
steered = vllm.SamplingParams(
    temperature=0, max_tokens=4, capture=capture,
    steering_vectors={"post_block": {1: [1.0] * hidden}},
)
plain = vllm.SamplingParams(temperature=0, max_tokens=4, capture=capture)
options = {"enable_steering": True, "capture_consumers": ["inline"]}
with engine(Path(sys.argv[1]), **options) as llm, profile() as seen:
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, [steered, plain], use_tqdm=False)
rows = [
    [rows.values.tolist() for _, rows in sorted(o.capture_results["inline"].payload.items())]
    for o in outputs
]
ops = sorted({e.name for e in seen.events() if e.name.startswith("pilot::")})
print(json.dumps({"package": vllm.__file__, "there": NATIVE_ROWS, "ops": ops, "rows": rows}))
"""


def run_in(python: Path, model: Path) -> dict[str, Any]:
    """What PROGRAM prints; `tests` is the repository's, vLLM the environment's."""
    done = subprocess.run(
        [python, "-c", PROGRAM, model],
        cwd=python.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_an_engine_of_the_installed_wheel_uses_them(
    tmp_path: Path, tiny_models: TinyModels, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real wheel in an environment of its own, that has this one's packages but not its vLLM;
    then the same without the library."""
    if lacking := native.missing():
        pytest.skip(f"csrc/ cannot be built here: {lacking} not found")
    wheel = tmp_path / backend.build_wheel(str(tmp_path))
    assert "native ops: CPU" in capfd.readouterr().err
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (here,) = Path(sys.prefix).glob("lib/python3*/site-packages")
    (packages / "shared.pth").write_text(f"{here}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--no-compile", str(wheel)], check=True)

    model = tiny_models.path("llama")
    found = run_in(python, model)
    assert found["package"] == str(packages / "vllm/__init__.py") and found["there"]
    assert "pilot::add_and_capture_rows" in found["ops"]
    (packages / LIBRARY).unlink()
    without = run_in(python, model)
    assert not without["there"] and without["ops"] == []
    assert without["rows"] == found["rows"]
    steered, plain = found["rows"]
    assert len(steered) == len(plain) > 1 and steered != plain
