# SPDX-License-Identifier: Apache-2.0
"""What `make release` leaves, who publishes it, and the requirements with hashes."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests import ROOT
from tools import lock, pilot_wheel
from tools.pins import BuildError, Pin, load_pin
from tools.release import release

pytestmark = pytest.mark.quick

PIN = load_pin(ROOT, "cpu")
NAME = f"v{PIN.pilot_version}"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of two commits, with a wheel of a few bytes."""

    def build(target: Path, pin: Pin, root: Path) -> Path:
        target.mkdir()
        (target / "w.whl").write_bytes(b"wheel")
        return target / "w.whl"

    monkeypatch.setattr(pilot_wheel, "build", build)
    for key in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{key}_NAME", "a")
        monkeypatch.setenv(f"GIT_{key}_EMAIL", "a")
    git(tmp_path, "init", "--quiet")
    for subject in ("Begin", "Go on"):
        (tmp_path / "file").write_text(subject)
        git(tmp_path, "add", "file")
        git(tmp_path, "commit", "--quiet", "-m", subject)
    return tmp_path


def git(root: Path, *command: str) -> None:
    subprocess.run(["git", "-C", root, *command], check=True)


def test_what_it_leaves(repository: Path) -> None:
    wheel, sums, changes = release(repository / "dist", PIN, repository)
    assert sums.read_text() == f"{hashlib.sha256(b'wheel').hexdigest()}  {wheel.name}\n"
    title, *_, last, first = changes.read_text().splitlines()
    assert title == f"# vLLM Pilot {PIN.pilot_version}, for vLLM {PIN.upstream_version}"
    assert [last, first] == ["* Go on", "* Begin"]


def test_changes_are_since_the_last_tag(repository: Path) -> None:
    """The tag of this release, if it is there already, is not the last one."""
    git(repository, "tag", "v0.0.1", "HEAD~1")
    git(repository, "tag", NAME)
    *_, changes = release(repository / "dist", PIN, repository)
    said = changes.read_text()
    assert "since v0.0.1." in said and "* Go on" in said and "* Begin" not in said


def test_refused(repository: Path) -> None:
    git(repository, "tag", NAME, "HEAD~1")
    with pytest.raises(BuildError, match="on another commit: raise `ours`"):
        release(repository / "dist", PIN, repository)
    (repository / "file").write_text("changed")
    with pytest.raises(BuildError, match="commit these first"):
        release(repository / "dist", PIN, repository)
    assert not (repository / "dist").exists()


def test_workflow_publishes_what_make_leaves() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow: dict[Any, Any] = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML takes the word `on` for true
    [job] = workflow["jobs"].values()
    steps = [step["run"] for step in job["steps"] if "run" in step]
    targets = re.findall(r"^make (\S+)", "\n".join(steps), re.M)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["release", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    assert steps[-2].endswith("twine upload dist/vllm_pilot-*.whl")
    assert not re.search(r"https?://|\.org\b|\.com\b", text)


def locked() -> dict[str, tuple[str, list[str]]]:
    """Package -> its version and hashes."""
    text = lock.CUDA.read_text().replace(" \\\n", " ")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {
        name: (version, [one.removeprefix("--hash=sha256:") for one in hashes])
        for (name, _, version), hashes in ((line[0].partition("=="), line[1:]) for line in lines)
    }


def test_requirements_have_hashes_and_the_pinned_wheel() -> None:
    cuda, found = load_pin(ROOT, "cuda"), locked()
    assert found["vllm"] == (cuda.upstream_version, [cuda.sha256])
    assert found["torch"][0] == cuda.torch
    assert len(found) > 150
    assert all(re.fullmatch("[0-9a-f]{64}", one) for _, hashes in found.values() for one in hashes)
    assert all(hashes for _, hashes in found.values())
    needed = [Requirement(one) for one in cuda.requires]
    bare = [one for one in needed if one.marker is None or one.marker.evaluate()]
    assert bare and all(one.specifier.contains(found[one.name][0]) for one in bare)


def test_a_lock_becomes_requirements() -> None:
    files = [{"hashes": {"sha256": "b"}}, {"hashes": {"sha256": "a"}}]
    packages = [
        {"name": "x", "version": "1", "wheels": files, "sdist": {"hashes": {"sha256": "c"}}},
        {"name": "y", "version": "2", "sdist": {"hashes": {"sha256": "d"}}},
    ]
    made = lock.requirements({"packages": packages}).removeprefix(lock.HEADER)
    assert made == (
        "x==1 \\\n    --hash=sha256:a \\\n    --hash=sha256:b\ny==2 \\\n    --hash=sha256:d\n"
    )
    with pytest.raises(KeyError):
        lock.requirements({"packages": [{"name": "z", "version": "3"}]})
