# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel `vllm-pilot`: pure Python, for a pinned vLLM that pip installed.

It holds `vllm_pilot/` and a payload: our files, and the lines that the seams and the codemod change
in upstream's, as build/tree has them, and build/tree-VERSION for each version beside the pinned
one. The pinned version's patch is for both wheels of upstream.toml: the files that it changes are
the same bytes in both, and `vllm-pilot apply` checks that.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools import beside, wheels
from tools.assemble import assemble, git, overlay_files
from tools.backend import pack
from tools.export import DIFF
from tools.pins import ROOT, TARGETS, BuildError, Pin, load_pin, other_pins, read_toml
from vllm_pilot import udiff
from vllm_pilot.state import digest

MAX_BYTES = 3 << 20
POINTS = {
    "console_scripts": {"vllm-pilot": "vllm_pilot.__main__:main"},
    "vllm.general_plugins": {"vllm_pilot": "vllm_pilot.notice:refuse"},
    "vllm.platform_plugins": {"vllm_pilot": "vllm_pilot.notice:warn"},
}
"""The entry points beside those of upstream.toml."""


def write_payload(target: Path, pin: Pin, root: Path, others: Sequence[Pin] = ()) -> None:
    """Write payload.zip of build/tree and the repository; vllm_pilot/payload.py says what is in it.

    Args:
        others: the versions that it is for beside that of `pin`.

    Raises:
        BuildError: a patch does not give its tree's files.
    """
    names = overlay_files(root)
    members = {f"added/{name}": (root / name).read_bytes() for name in names}
    for path in sorted((root / "demo").glob("*.py")):
        members[f"demo/{path.name}"] = path.read_bytes()
    upstreams = {}
    for one in (pin, *others):
        version = one.upstream_version
        patch, changed = changes(one, root)
        members[f"{version}.patch"] = patch
        for name in beside.replaced(names, root, one):
            members[f"{version}/{name}"] = beside.ours(name, root, one)
        targets = (one.target,) if one.differs else reversed(TARGETS)
        upstreams[version] = {
            "distributions": [load_pin(root, name).project for name in targets],
            "untested": one.differs.untested if one.differs else "",
            "changed": changed,
            "added": {name: digest(beside.ours(name, root, one)) for name in names},
        }
    manifest = {"version": pin.pilot_version, "upstreams": upstreams}
    members["manifest.json"] = json.dumps(manifest, indent=1).encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, date_time=(2000, 1, 1, 0, 0, 0))
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, compresslevel=9)


def changes(pin: Pin, root: Path) -> tuple[bytes, dict[str, tuple[str, str]]]:
    """Return the patch of upstream's files, and the hashes of each before and after."""
    tree, upstream = assemble(pin, root), wheels.upstream_folder(pin, root / "build")
    text = git(tree, *DIFF, "upstream", "taps").encode()
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder) / "upstream.patch"
        patch.write_bytes(text)
        changed = {}
        for diff in udiff.parse(patch).diffs:
            old = (upstream / diff.path).read_bytes()
            changed[diff.path] = (digest(old), digest(udiff.apply(patch, diff, old)))
    return text, changed


def metadata(pin: Pin, root: Path) -> str:
    """Return METADATA; the requirements are those that upstream.toml adds to upstream's."""
    versions = " or ".join(one.upstream_version for one in (pin, *other_pins(root)))
    lines = [
        "Metadata-Version: 2.4",
        "Name: vllm-pilot",
        f"Version: {pin.pilot_version}",
        f"Summary: Activation steering and capture in an installed vLLM {versions}",
        "License-Expression: Apache-2.0",
        f"Requires-Python: >={read_toml(root)['supported']['python']}",
        "Description-Content-Type: text/markdown",
        *(f"Requires-Dist: {requirement}" for requirement in pin.requires),
        "Provides-Extra: pilot",
    ]
    return "\n".join(lines) + "\n\n" + (root / "README.md").read_text()


def entry_points(pin: Pin) -> str:
    """Return entry_points.txt: the command, the plug-ins, and those of upstream.toml."""
    groups = {**POINTS, **pin.entry_points}
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in groups.items()
    )


def write_dist_info(folder: Path, pin: Pin, root: Path) -> Path:
    """Write the wheel's dist-info without RECORD, and return its folder."""
    info = folder / f"vllm_pilot-{pin.pilot_version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata(pin, root))
    (info / "entry_points.txt").write_text(entry_points(pin))
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: vllm-pilot\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    return info


def build(target: Path, pin: Pin, root: Path = ROOT) -> Path:
    """Build the wheel into the folder `target`, and return its path.

    Raises:
        BuildError: it is larger than 3 MB.
    """
    target.mkdir(parents=True, exist_ok=True)
    wheel = target / f"vllm_pilot-{pin.pilot_version}-py3-none-any.whl"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "vllm_pilot").mkdir()
        for path in sorted((ROOT / "vllm_pilot").glob("*.py")):
            (folder / "vllm_pilot" / path.name).write_bytes(path.read_bytes())
        write_payload(folder / "vllm_pilot" / "payload.zip", pin, root, other_pins(root))
        pack(folder, write_dist_info(folder, pin, root), wheel)
    if wheel.stat().st_size > MAX_BYTES:
        raise BuildError(f"{wheel} has {wheel.stat().st_size} bytes, at most {MAX_BYTES}")
    return wheel
