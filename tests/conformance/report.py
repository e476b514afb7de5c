# SPDX-License-Identifier: Apache-2.0
"""Makes docs/models.md of what was measured: `python -m tests.conformance.report [DIR ...]`.

Results of the folders given (written by `python -m tests.conformance --out DIR`) replace those of
the same model, device, runner and dtype in `results.jsonl`, which is in the repository because no
one machine can measure everything. The page is that file and the table of wired classes, and
nothing else; but for real checkpoints, which `checkpoints.jsonl` has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patches.taps.rows import ALL_POINTS, WIRED, Idiom, Row
from patches.taps.table import ROWS
from tests import ROOT
from vllm.config.points import INNER_POINTS

from .checkpoints import QUANTISED, load_rows, section
from .proof import RESULTS, Result, load_results
from .zoo import MODELS
from .zoo.absent import ABSENT, APART

PAGE = ROOT / "docs" / "models.md"
_CARRIES = WIRED | {Idiom.INHERITED}

_HEAD = """# Models

Made by `make test-models`; not edited by hand. Every architecture below is a tiny random model,
written by transformers (where it lacks it and the last column says so, in plain PyTorch) and run by
both: each point of each layer is read, and vectors are added at
the first, a middle and the last layer (docs/hook-contract.md, "What proves it").
Errors are relative L2 of the worst row. *plain*: log-probabilities of vLLM without us. *read*:
captured rows, unsteered and steered, at most 1e-4. *write*: log-probabilities while
steered, at most 1e-3. *moved*: the least that a vector moved them, at least 0.05. *q* to *z*: rows
of every head (docs/attention.md), and *attn*: all weights, of every layer and token, at most 1e-4,
while a neighbouring head's are at least 0.05 away. *z written* and *focus*: log-probabilities while
heads are steered, and while the weights of keys all over the sequence are multiplied by 64, or of
half of the heads by 0: at most 1e-3, having moved them by at least 0.02. *mlp_in* and *mlp_in
written*: the same of what the MLP reads, where a class has that point; *router_logits* and
*mlp_act*: rows at these points within a branch. There, **none**: the
model has no such thing, or its class of attention no such point; **unseen**: transformers does not
show it, or takes no bias; **refused**: by vLLM Pilot, by name; **not run**: not compared since
there is this column. Where the kernels
have no float32, all are at most 0.02 in float16 and 0.05 in bfloat16; *every expert*: each token is
routed to all, so that rounding decides nothing. An architecture that reads images got a
prompt with two, with one and with none. What was measured in other ways has a list of its own; a
class that is wired and in neither was not measured: use `vllm steering check` on your model.
"""


def merge(folders: Iterable[Path]) -> list[Result]:
    """Those of the repository, with the folders' in place of older ones, and without failures of
    models that another run has verified; written back."""
    known = {(r.name, r.where): r for r in load_results()}
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            result = Result.from_json(file.read_text())
            known[result.name, result.where] = result
    good = {name for (name, _), result in known.items() if not result.failures()}
    results = [
        known[key]
        for key in sorted(known)
        if key[0] in MODELS and (key[0] not in good or not known[key].failures())
    ]
    RESULTS.write_text("".join(r.to_json() + "\n" for r in results))
    return results


def render(
    results: list[Result],
    rows: tuple[Row, ...] = ROWS,
    checkpoints: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """docs/models.md; its real checkpoints are those of the repository, or others."""
    by_key = {row.key: row for row in rows}
    good = [r for r in results if not r.failures() and _wired(r, by_key)]
    verified = {r.architecture for r in good}
    classes = {cls for r in good for cls in r.classes if cls in by_key}
    backend = {cls for r in good for cls in r.classes} - classes
    wired = {row.key for row in rows if row.idiom in _CARRIES}
    lines = [
        _HEAD,
        f"Verified: {len(verified)} architectures over {len(classes)} decoder layer classes, "
        f"and {len(backend)} of the Transformers backend; {len(wired)} classes are wired.",
        "",
        section(load_rows() if checkpoints is None else checkpoints),
        QUANTISED,
        "## Verified",
        "",
        "| architecture | layer class | idiom | points | plain | read | write | moved | q | k | v "
        "| z | z written | attn | focus | mlp_in | mlp_in written "
        f"| {' | '.join(INNER_POINTS)} | where | |",
        "|---" * (19 + len(INNER_POINTS)) + "|",
    ]
    for result in sorted(good, key=lambda r: (r.architecture, r.name, r.where)):
        lines.append(_verified_line(result, by_key))
    lines += ["", "## Not verified", "", "| architecture | why |", "|---|---|"]
    open_reasons = dict(ABSENT)
    for result in results:
        if result.architecture not in verified:
            failures = "; ".join(result.failures())[:160].replace("|", "/")
            said = f"{result.where}: {failures or 'rewired since'}"
            note = MODELS[result.name].note
            open_reasons[result.architecture] = f"{said}. {note}" if note else said
    for architecture, why in sorted(open_reasons.items()):
        if architecture not in verified:
            lines.append(f"| {architecture} | {why} |")
    lines += ["", "## Classes measured otherwise", "", "| class | how |", "|---|---|"]
    for key, how in sorted(APART.items()):
        if key in wired:
            lines.append(f"| `{_short(key)}` ({by_key[key].idiom.value}) | {how} |")
    lines += ["", "## Classes wired, not measured", ""]
    for key in sorted(wired - classes - APART.keys()):
        lines.append(f"* `{_short(key)}` ({by_key[key].idiom.value})")
    lines += ["", "## Classes refused", "", "| class | why |", "|---|---|"]
    for row in rows:
        if row.idiom not in _CARRIES and row.idiom is not Idiom.EXCLUDED:
            lines.append(f"| `{_short(row.key)}` | {row.reason} |")
    lines += [
        "",
        "Encoders, draft models and parts of blocks have no points either: "
        "patches/taps/table_excluded.py.",
    ]
    return "\n".join(lines) + "\n"


def _wired(result: Result, by_key: dict[str, Row]) -> bool:
    """Is every class of the measured model still wired?"""
    return bool(result.classes) and all(
        _idiom(cls, by_key) != "not wired" for cls in result.classes
    )


def _idiom(cls: str, by_key: dict[str, Row]) -> str:
    if cls.startswith("transformers/"):
        return "transformers backend"
    row = by_key.get(cls)
    return row.idiom.value if row is not None and row.idiom in _CARRIES else "not wired"


def _verified_line(result: Result, by_key: dict[str, Row]) -> str:
    worst = {
        kind: max(getattr(e, kind) for e in result.points.values()) for kind in ("read", "write")
    }
    cells = (
        result.architecture,
        ", ".join(f"`{_short(cls)}`" for cls in result.classes),
        ", ".join(sorted({_idiom(cls, by_key) for cls in result.classes})),
        ", ".join(sorted(result.points, key=ALL_POINTS.index)),
        f"{result.plain:.0e}",
        f"{worst['read']:.0e}",
        f"{worst['write']:.0e}",
        f"{min(e.moved for e in result.points.values()):.2f}",
        *_of_branches(result),
        result.where,
        MODELS[result.name].note,
    )
    return f"| {' | '.join(cells)} |"


def _of_branches(result: Result) -> list[str]:
    """Cells of q, k, v, z, z written, attn, focus, mlp_in, mlp_in written and the points within a
    branch."""
    found = {point: heads.read for point, heads in result.heads.items()}
    written = {p: h.write for p, h in result.heads.items() if h.write is not None}
    found |= {f"{point} written": write for point, write in written.items()}
    if result.focus is not None:
        found["focus"] = result.focus.write
    why = result.without | {f"{point} written": why for point, why in result.without.items()}
    return [
        f"{found[name]:.0e}" if name in found else why.get(name, "not run").partition(":")[0]
        for name in (
            *("q", "k", "v", "z", "z written", "attn", "focus", "mlp_in", "mlp_in written"),
            *INNER_POINTS,
        )
    ]


def _short(key: str) -> str:
    file, _, cls = key.partition(":")
    return f"{file.removeprefix('vllm/').removeprefix('model_executor/models/')} {cls}"


def main() -> int:
    """Exit status 0."""
    page = render(merge(Path(folder) for folder in sys.argv[1:]))
    PAGE.write_text(page)
    print(next(line for line in page.splitlines() if line.startswith("Verified:")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
