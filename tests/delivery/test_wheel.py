# SPDX-License-Identifier: Apache-2.0
"""The built wheel's metadata, the environment's steps, and the patch format's arithmetic."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import io
import re
import runpy
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.delivery.fork import METADATA, UPSTREAM, Fork
from tools import backend, install, native
from tools.assemble import git
from tools.export import unified
from tools.pins import ROOT, BuildError, load_pin
from vllm_pilot import state, udiff

pytestmark = pytest.mark.quick


def test_wheel(miniature: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miniature.seam()
    monkeypatch.setattr(backend, "ROOT", miniature.root)
    monkeypatch.setattr(backend, "load_pin", lambda: miniature.pin)
    monkeypatch.setattr(native, "missing", lambda: "cmake")  # test_native_wheel.py has the ops
    name = backend.build_wheel(str(tmp_path))
    assert name == "vllm-0.32.0+cpu.pilot.0.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(tmp_path / name) as archive:
        files = {member: archive.read(member) for member in archive.namelist()}
    info = "vllm-0.32.0+cpu.pilot.0.1.0.dist-info"
    for member, digest, _ in csv.reader(io.StringIO(files[f"{info}/RECORD"].decode())):
        assert digest == ("" if "RECORD" in member else state.digest(files.pop(member)))
    assert set(files) == {f"{info}/RECORD"}
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert set(UPSTREAM) | {"vllm/v1/steering/steer.py"} <= set(archive.namelist())
        assert b"seam()" in archive.read("vllm/engine.py")
        assert b"ours = 1" in archive.read("vllm/v1/steering/steer.py")
        points = archive.read(f"{info}/entry_points.txt").decode()
    assert "vllm = vllm.engine:main" in points
    assert "[vllm.capture_consumers]\ninline = vllm.v1.steering.steer:Inline" in points


def test_setup_py_makes_the_wheel_and_says_what_does_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = runpy.run_path(str(ROOT / "setup.py"))
    made: list[str] = []

    def build_wheel(folder: str) -> str:
        made.append(folder)
        return "name.whl"

    monkeypatch.setitem(shim["main"].__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(shim["main"].__globals__, "build_wheel", build_wheel)
    shim["main"](["bdist_wheel"])
    assert made == [str(tmp_path / "dist")] and (tmp_path / "dist").is_dir()
    for arguments in ([], ["install"], ["bdist_wheel", "--universal"]):
        with pytest.raises(SystemExit, match=r"`bdist_wheel` and nothing else; .*`pip install \."):
            shim["main"](arguments)
    assert len(made) == 1


def test_metadata(miniature: Fork) -> None:
    text = backend.rewrite_metadata(METADATA, miniature.pin)
    head, _, description = text.partition("\n\n")
    assert head.split("\n") == [
        "Metadata-Version: 2.4",
        "Name: vllm",
        "Version: 0.32.0+cpu.pilot.0.1.0",
        "Requires-Dist: numpy",
        'Requires-Dist: torch==2.13.0; platform_machine == "x86_64"',
        'Requires-Dist: scipy; extra == "audio"',
        "Provides-Extra: audio",
        "Requires-Dist: gguf>=0.17",
    ]
    assert description == "Name: this is the description, not a field\n"
    extra = dataclasses.replace(miniature.pin, requires=('matplotlib>=3.9; extra == "pilot"',))
    made = backend.rewrite_metadata(METADATA, extra).partition("\n\n")[0].split("\n")
    assert made[-2:] == [f"Requires-Dist: {extra.requires[0]}", "Provides-Extra: pilot"]


def test_the_installed_distribution() -> None:
    """The real one, in the environment that runs this."""
    pin = load_pin()
    distribution = importlib.metadata.distribution("vllm")
    assert distribution.version == pin.version
    names = {re.split("[=>]", requirement)[0] for requirement in distribution.requires or []}
    assert names.isdisjoint(pin.drop) and {"numba", "gguf"} <= names
    (script,) = distribution.entry_points.select(group="console_scripts")
    assert script.value == "vllm.entrypoints.cli.main:main"


def test_requirements_are_pinned_exactly() -> None:
    for name in ("cpu.txt", "dev.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            requirement = line.partition("#")[0].strip()
            assert not requirement or requirement.count("==") == 1, f"{name}: {line}"


@pytest.fixture
def commands(miniature: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What install runs, instead of running it."""
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "ROOT", miniature.root)
    monkeypatch.setattr(install, "VENV", tmp_path / "venv")
    monkeypatch.setattr(install, "check_platform", lambda: None)
    monkeypatch.setattr(install, "load_pin", lambda: miniature.pin)
    (tmp_path / "venv").mkdir()
    (miniature.root / "requirements").mkdir()
    for name in ("requirements/cpu.txt", "requirements/dev.txt", *install.DIST_INPUTS):
        (miniature.root / name).parent.mkdir(exist_ok=True)
        (miniature.root / name).touch()
    monkeypatch.setattr(install, "run", lambda *command: ran.append([str(c) for c in command]))
    return ran


def steps(commands: list[list[str]]) -> list[str]:
    """Names of the steps taken since the last call."""
    known = {"venv": "environment", "-r": "requirements", "-e": "vllm", "assemble": "assemble"}
    taken = [name for command in commands for word, name in known.items() if word in command]
    commands.clear()
    return taken


ALL = ["environment", "requirements", "assemble", "vllm"]


def test_install_steps(commands: list[list[str]], miniature: Fork) -> None:
    install.install()
    assert steps(commands) == ALL
    install.install()
    assert steps(commands) == ["assemble"]
    (miniature.root / "tools/backend.py").write_text("changed")
    install.install()
    assert steps(commands) == ["assemble", "vllm"]
    (miniature.root / "requirements/cpu.txt").write_text("numpy==2.3.5\n")
    install.install()
    assert steps(commands) == ALL


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_install_cut_short(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    run = install.run

    def fail_at(*command: str | Path) -> None:
        if len(commands) == step:
            raise BuildError("cut short")
        run(*command)

    monkeypatch.setattr(install, "run", fail_at)
    with pytest.raises(BuildError, match="cut short"):
        install.install()
    commands.clear()
    monkeypatch.setattr(install, "run", run)
    install.install()
    assert steps(commands) == (ALL if step < 2 else ALL[2:])


LINE = st.sampled_from(["", "a", "b", "    pass", "\x0c", "-c", "+c", "@@ -1 +1 @@", "é"])
FILE = st.lists(LINE, max_size=8).map(lambda lines: "".join(f"{line}\n" for line in lines))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(before=FILE, after=FILE)
def test_git_writes_what_we_apply(tmp_path: Path, before: str, after: str) -> None:
    tree = tmp_path / "tree"
    if not tree.exists():
        tree.mkdir()
        git(tree, "init", "--quiet")
    (tree / "file").write_text(before)
    git(tree, "add", "file")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "upstream")
    git(tree, "tag", "--force", "upstream")
    (tree / "file").write_text(after)
    patch = tmp_path / "one.patch"
    patch.write_text("Concern: a test\n\n" + unified(tree, ["file"]))
    data = before.encode()
    for diff in udiff.parse(patch).diffs:
        data = udiff.apply(patch, diff, data)
    assert data == after.encode()
