# SPDX-License-Identifier: Apache-2.0
"""Architectures that the tests run, and those that they may leave to a committed measurement.

One architecture for each idiom runs always. Others run in the tier long, but for those of which
`results.jsonl` has a result that was made with the sources of today: those of the taps, of the
codemod that puts them into classes, and of the zoo. `make test-models` makes such results.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests import ROOT

from .engine import Runner
from .proof import load_results

CHOSEN = (
    "cohere2",  # parallel, a norm that hands its argument back
    "dbrx",  # a call hands on a stream and its norm
    "exaone4",  # sandwich, summed, no norm before a branch
    "gemma2",  # sandwich, deferred
    "gemma4",  # the block ends in operations on the whole stream
    "gpt2",  # summed
    "gptj",  # parallel
    "granite",  # summed, with multipliers
    "lfm2",  # attention and short convolutions
    "llama",  # deferred
    "minicpm3",  # a forward() that is inherited
    "qwen2_moe",  # experts, and a layer without
    "solar",  # the model changes the stream between blocks
)
V2_MODELS = ("cohere2", "dbrx", "exaone4", "gemma2", "gpt2", "gptj", "llama", "qwen2_moe")
ALWAYS: dict[Runner, tuple[str, ...]] = {
    "v1": ("cohere2", "dbrx", "exaone4", "gemma2", "gpt2", "llama", "minicpm3"),
    "v2": ("gpt2", "llama"),
}
"""One for each idiom that CHOSEN has. The taps are the same code under both runners, so V2 has one
whose stream is one tensor and one whose stream is two."""

POINTS = "vllm/config/points.py"
FOLDERS = ("patches/taps", "vllm/model_executor/layers", "tests/conformance")


@cache
def sources_digest(root: Path = ROOT) -> str:
    """SHA-256 of the code of FOLDERS and POINTS and of the pin of upstream, in hexadecimal.

    Docstrings, comments, imports and the names of files are left out, so that moving a module is
    no change; so are tests.
    """
    parts = [(root / "upstream.toml").read_text(), _code((root / POINTS).read_text())]
    for folder in FOLDERS:
        files = [p for p in (root / folder).rglob("*.py") if not p.name.startswith("test_")]
        if not files:
            raise FileNotFoundError(f"{folder} has no sources: correct FOLDERS in {__file__}")
        parts += sorted(_code(path.read_text()) for path in files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _code(source: str) -> str:
    """A module's syntax tree as text, without what `sources_digest` leaves out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = list(_kept(body))  # type: ignore[attr-defined]
    return ast.dump(tree)


def _kept(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    for stmt in body:
        is_text = (
            isinstance(stmt, ast.Expr)
            and isinstance(stmt.value, ast.Constant)
            and isinstance(stmt.value.value, str)
        )
        if not is_text and not isinstance(stmt, ast.Import | ast.ImportFrom):
            yield stmt


def is_measured(name: str, runner: Runner) -> bool:
    """True if the repository has a good result of an architecture, made with today's sources."""
    where = f"cpu {runner} float32"
    made = [r for r in load_results() if (r.name, r.where) == (name, where) and r.sources]
    return any(r.sources == sources_digest() and not r.failures() for r in made)
