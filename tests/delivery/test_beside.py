# SPDX-License-Identifier: Apache-2.0
"""A version of upstream beside the pinned one: in miniature, and in the long tier the real ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from patches.taps import census
from patches.taps.codemod import verify
from patches.taps.table import OTHERS, ROWS, rows
from tests import ROOT
from tests.delivery import fork
from tests.delivery.fork import Fork
from tests.delivery.pilot import contents, no_sync, run, texts
from tools import beside, check, pilot_wheel, wheels
from tools.assemble import assemble, overlay_files
from tools.into import assemble_into
from tools.pins import BuildError, Pin, load_pin, other_pins
from vllm_pilot import payload, udiff

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("no_sync")]
__all__ = ["no_sync"]

ENGINE, MOVED, OUTPUTS = "vllm/engine.py", "vllm/core/engine.py", "vllm/outputs.py"
OURS = "vllm/v1/steering/steer.py"
SECTION = """
[beside."0.33.0"]
filename = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
sha256 = "{sha256}"
torch = "2.14.0"
untested = "nobody ran it"
[beside."0.33.0".moved]
"vllm/engine.py" = "vllm/core/engine.py"
[beside."0.33.0".ours]
"ours = 1" = "ours = 33"
"""
NEW = "first = 0\n" + fork.LINES.replace("line_9 =", "row_9 =")
"""Upstream's engine in 0.33.0: a line more, and one renamed at which a seam stands."""
OWN = f"""Concern: a test
Instead: {{instead}}

diff --git a/{MOVED} b/{MOVED}
index {udiff.blob(NEW.encode())}
@@ -10,0 +11 @@
+nine()
"""


@pytest.fixture
def other(miniature: Fork, tmp_path: Path) -> Pin:
    """The miniature with seams after lines 5 and 9, and a version beside it: its pin."""
    miniature.seam("line_5 = 5\nseam()\n")
    miniature.edit(ENGINE, "line_9 = 9\n", "line_9 = 9\nnine()\n")
    fork.export(miniature.root)
    files = {name: text for name, text in fork.UPSTREAM.items() if name != ENGINE} | {MOVED: NEW}
    name = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    fork.write_wheel(tmp_path / "cache" / name, files, "vllm", "0.33.0")
    toml = miniature.root / "upstream.toml"
    section = SECTION.format(sha256=wheels.sha256(tmp_path / "cache" / name))
    toml.write_text(toml.read_text() + section)
    (pin,) = other_pins(miniature.root)
    own(miniature, "0")
    with pytest.raises(BuildError, match="these 1, which need a hand") as said:
        assemble(pin, miniature.root)
    assert f"{ENGINE}\n\nnine()" in str(said.value)
    own(miniature, str(said.value).partition("`Instead: ")[2].partition("`")[0])
    return pin


def own(miniature: Fork, instead: str, text: str = OWN) -> None:
    """Write the hunks of the version alone."""
    path = miniature.root / "patches/seams/0.33.0.diff"
    path.write_text(text.format(instead=instead))


def site_of(pin: Pin, tmp_path: Path) -> Path:
    """Its wheel, unpacked as pip does."""
    wheels.unpack(wheels.fetch(pin), tmp_path / "site")
    return tmp_path / "site"


def test_hunks_go_where_they_went(miniature: Fork, other: Pin) -> None:
    tree = assemble(other, miniature.root)
    assert tree.name == "tree-0.33.0"
    want = NEW.replace("line_5 = 5\n", "line_5 = 5\nseam()\n").replace("9 = 9\n", "9 = 9\nnine()\n")
    assert (tree / MOVED).read_text() == want and not (tree / ENGINE).exists()
    assert (tree / OURS).read_text() == "ours = 33\n" and not (tree / OURS).is_symlink()
    assert (miniature.assemble() / OURS).read_text() == "ours = 1\n"
    (miniature.root / OURS).write_text("ours = 1\nmore = 1\n")
    assert (assemble(other, miniature.root) / OURS).read_text() == "ours = 33\nmore = 1\n"


def test_apply_says_what_is_untested(
    miniature: Fork,
    other: Pin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = tmp_path / "payload.zip"
    pilot_wheel.write_payload(made, miniature.pin, miniature.root, [other])
    monkeypatch.setattr(payload, "PAYLOAD", made)
    site = site_of(other, tmp_path)
    before = contents(site)
    assert run(site, "apply") == 1 and contents(site) == before
    said = capsys.readouterr().err
    assert (
        "vllm 0.33.0 is patched only on demand, as nobody ran it: run `vllm-pilot apply --u" in said
    )
    assert run(site, "apply", "--untested") == 0
    assert "to vllm 0.33.0 in" in capsys.readouterr().out
    tree = assemble(other, miniature.root)
    assert texts(site) == texts(tree) | {"vllm/_C.abi3.so": (site / "vllm/_C.abi3.so").read_bytes()}
    assert run(site, "status") == 0
    assert "\nuntested: nobody ran it\nintact\n" in capsys.readouterr().out
    assert run(site, "remove") == 0 and contents(site) == before
    pinned = tmp_path / "pinned"
    wheels.unpack(wheels.fetch(miniature.pin), pinned)
    assert run(pinned, "apply") == 0, "the pinned version is tested"
    assert texts(pinned)[OURS] == b"ours = 1\n"


def test_into_needs_what_was_carried(miniature: Fork, other: Pin, tmp_path: Path) -> None:
    """A host without network and git takes the file, and only while it is that of the seams."""
    site = site_of(other, tmp_path)
    with pytest.raises(BuildError, match=r"seams-0.33.0.patch is missing, or older .*--beside 0"):
        assemble_into(site, miniature.root)
    tree = assemble(other, miniature.root)
    for folder in miniature.root.glob("build/upstream-*"):
        shutil.rmtree(folder)
    (tmp_path / "cache").rename(tmp_path / "no cache")
    assert MOVED in assemble_into(site, miniature.root)
    assert texts(site)[MOVED] == texts(tree)[MOVED] and texts(site)[OURS] == b"ours = 33\n"
    miniature.patch.write_text(miniature.patch.read_text() + "\n")
    with pytest.raises(BuildError, match=r"seams-0.33.0.patch is missing, or older than"):
        assemble_into(site, miniature.root)


def test_what_does_not_fit_is_refused(miniature: Fork, other: Pin) -> None:
    mine = miniature.root / "patches/seams/0.33.0.diff"
    good = mine.read_text()
    for old, new, match in (
        ("@@ -10,0", "@@ -6,0", "two hunks are at one place"),
        (udiff.blob(NEW.encode()), "0" * 40, "is not the file that"),
    ):
        mine.write_text(good.replace(old, new))
        with pytest.raises(BuildError, match=match):
            assemble(other, miniature.root)
    mine.write_text(good)
    (miniature.root / OURS).write_text("ours = 1\nours = 1\n")
    with pytest.raises(BuildError, match="'ours = 1' occurs 2 times in our files"):
        assemble(other, miniature.root)


def test_its_lines_are_counted(
    miniature: Fork, other: Pin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = beside.difference(other, miniature.root)
    assert lines == sum(bool(line.strip()) for line in (SECTION + OWN).splitlines())
    miniature.assemble()
    assert check.check(miniature.root, miniature.pin) == []
    monkeypatch.setattr(beside, "MAX_LINES", lines - 1)
    (said,) = check.check(miniature.root, miniature.pin)
    assert said.startswith(f"0.33.0 has {lines} lines for it alone, at most {lines - 1}; drop")


def test_every_version_has_its_table() -> None:
    assert {pin.upstream_version for pin in other_pins(ROOT)} == set(OTHERS)
    assert rows(load_pin(ROOT, "cpu").upstream_version) == ROWS
    for pin in other_pins(ROOT):
        assert beside.replaced(overlay_files(ROOT), ROOT, pin)


@pytest.mark.long
@pytest.mark.parametrize("pin", other_pins(ROOT), ids=lambda pin: pin.upstream_version)
def test_the_real_one(pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seams go to it, its classes are wired and proved, none is forgotten, and `apply` gives
    what was assembled and `remove` upstream's bytes; a row of the pinned table does not fit it."""
    tree = assemble(pin, ROOT)
    upstream = wheels.upstream_folder(pin, ROOT / "build")
    table = rows(pin.upstream_version)
    assert all(outcome.ok for outcome in verify(upstream, table))
    assert census.check(upstream, table) == []
    assert not all(outcome.ok for outcome in verify(upstream, ROWS))
    pilot_wheel.write_payload(tmp_path / "payload.zip", load_pin(ROOT, "cpu"), ROOT, [pin])
    monkeypatch.setattr(payload, "PAYLOAD", tmp_path / "payload.zip")
    wheels.unpack(wheels.fetch(pin), tmp_path / "site", only=(".py", "METADATA", "RECORD"))
    site = tmp_path / "site"
    before = texts(site)
    assert run(site, "apply", "--untested") == 0
    applied, made = texts(site), texts(tree)
    assert applied == made and len(made) - len(before) > 240
    assert run(site, "remove") == 0 and texts(site) == before
    assert [*map(str, assemble_into(site, ROOT))] and texts(site) == made
