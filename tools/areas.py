# SPDX-License-Identifier: Apache-2.0
"""Places of our files, and the lines of code of each place: `make diffstat`, `make lint`."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.assemble import overlay_files
from vllm_pilot import udiff

CORE_BUDGET = 5500
"""Lines of code that the core may have."""


@dataclass(frozen=True)
class Area:
    """A part of the fork: its files, and its folders (with a slash, and all that is in them)."""

    name: str
    core: bool
    places: tuple[str, ...]


AREAS = (
    Area(
        "options",
        True,
        (
            "vllm/config/capture.py",
            "vllm/config/intervention_refusals.py",
            "vllm/config/points.py",
            "vllm/config/steering.py",
            "vllm/engine/intervention_args.py",
        ),
    ),
    Area(
        "taps",
        True,
        (
            "vllm/model_executor/layers/attention_taps.py",
            "vllm/model_executor/layers/native_rows.py",
            "vllm/model_executor/layers/residual_taps.py",
            "vllm/model_executor/layers/row_capture.py",
            "vllm/model_executor/layers/steering_terms.py",
        ),
    ),
    Area("shared words", True, ("vllm/v1/interventions/",)),
    Area("frontend", True, ("vllm/v1/interventions/frontend/",)),
    Area("scheduler", True, ("vllm/v1/interventions/scheduler/",)),
    Area("worker", True, ("vllm/v1/interventions/worker/",)),
    Area("capture", True, ("vllm/v1/capture/",)),
    Area("capture transport", True, ("vllm/v1/capture/transport/",)),
    Area("steering", True, ("vllm/v1/steering/",)),
    Area(
        "metrics", True, ("vllm/v1/metrics/capture_stats.py", "vllm/v1/metrics/steering_stats.py")
    ),
    Area("consumers", False, ("vllm/v1/capture/consumers/",)),
    Area(
        "files",
        False,
        (
            "vllm/v1/capture/file_format.py",
            "vllm/v1/capture/reader.py",
            "vllm/v1/capture/shard_index.py",
            "vllm/v1/capture/stored_request.py",
            "vllm/v1/capture/table.py",
            "vllm/v1/steering/files.py",
            "vllm/v1/steering/gguf.py",
            "vllm/v1/steering/json_modules.py",
            "vllm/v1/steering/op_files.py",
            "vllm/v1/steering/unshaped.py",
        ),
    ),
    # Doors to the core; the budget is of what is behind them.
    Area("HTTP server", False, ("vllm/entrypoints/serve/steering/",)),
    Area("HTTP client", False, ("vllm/entrypoints/serve/steering/client/",)),
    Area("check command", False, ("vllm/entrypoints/cli/steering/",)),
    Area("toolkit", False, ("vllm/pilot/", "vllm/entrypoints/cli/capture/")),
    Area("compatibility", False, ("vllm/entrypoints/compat/",)),
)


def area_of(name: str) -> Area | None:
    """The area with the longest place that `name` is, or is in; None where there is none."""
    found = [
        (len(place), number)
        for number, area in enumerate(AREAS)
        for place in area.places
        if name == place or (place.endswith("/") and name.startswith(place))
    ]
    return AREAS[max(found)[1]] if found else None


def misplaced(root: Path) -> list[str]:
    """Files of vllm/ and patches/ that are where nothing looks for them, each with its remedy."""
    places = ", ".join(sorted(place for area in AREAS for place in area.places))
    wrong = [
        f"{name} is in no area; move it to one of {places}, or give its place an area in "
        f"tools/areas.py:AREAS"
        for name in overlay_files(root)
        if area_of(name) is None
    ]
    patches = [
        str(path.relative_to(root))
        for path in sorted((root / "patches").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return wrong + [
        f"{name} is where nothing reads it; a seam goes into patches/seams as NAME.patch, listed "
        f"in its `series`, and the codemod's code into patches/taps as NAME.py"
        for name in patches
        if not is_patch(name)
    ]


def is_patch(name: str) -> bool:
    """Tell whether `name` is what the build reads; `series` itself says which seams are listed."""
    path = PurePosixPath(name)
    return name in ("patches/__init__.py", "patches/seams/series") or (
        (str(path.parent), path.suffix) in (("patches/seams", ".patch"), ("patches/taps", ".py"))
    )


def code_lines(text: str) -> int:
    """Lines of a Python file with code on them: not blank, and not of comments, docstrings or
    imports, which the formatter spreads over as many lines as their names are long."""
    tree = ast.parse(text)
    imports = (ast.Import, ast.ImportFrom)
    imported = {
        line
        for node in ast.walk(tree)
        if isinstance(node, imports)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - imported)


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count(files: list[Path]) -> int:
    """Lines of code of the Python files among `files`."""
    return sum(code_lines(path.read_text()) for path in files if path.suffix == ".py")


def table(root: Path) -> str:
    """Lines of code by area: the core with its budget, the satellites, and what is beside them."""
    files: dict[Area, list[Path]] = {area: [] for area in AREAS}
    for name in overlay_files(root):
        if area := area_of(name):
            files[area].append(root / name)
    core = {area.name: count(found) for area, found in files.items() if area.core}
    rest = {area.name: count(found) for area, found in files.items() if not area.core}
    seams = udiff.series(root / "patches" / "seams")
    added = [line for p in seams for diff in p.diffs for hunk in diff.hunks for line in hunk.added]
    beside = {"seams": sum(line.strip()[:1] not in ("", "#") for line in added)}
    for folder in ("patches/taps", "tools", "tests"):
        beside[folder] = count(sorted((root / folder).rglob("*.py")))
    rows = ["lines of code (no blank lines, comments, docstrings, imports)"]
    for title, group in (("core", core), ("satellites", rest), ("beside vllm/", beside)):
        budget = f" of {CORE_BUDGET:,}" if group is core else ""
        rows += [f"  {name:18} {lines:6,}" for name, lines in group.items() if lines]
        rows.append(f"{title:20} {sum(group.values()):6,}{budget}")
    return "\n".join(rows)
