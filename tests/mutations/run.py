# SPDX-License-Identifier: Apache-2.0
"""Runs the mutants of a tiny model in one engine, and measures each as the conformance tests do."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from patches.taps.errors import TapsError
from patches.taps.proof import prove
from patches.taps.rows import WIRED, Row
from patches.taps.source import Source, Tree
from patches.taps.table import ROWS
from tests import ROOT
from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.engine import engine
from tests.mutations.source import source_mutants
from tests.mutations.taps import BOUND, bound_taps
from vllm.config.points import BLOCK_POINTS, INPUT_POINTS
from vllm.v1.interventions.worker.layers import find_layers, unbound_taps

BUILD = ROOT / "build"
TREE = BUILD / "tree"
PROMPTS = check.prompts(lengths=(17, 5))
BY_KEY = {row.key: row for row in ROWS}
UNMUTATED = "(unmutated)"


@dataclass(frozen=True)
class Verdict:
    """One mutant against transformers."""

    model: str
    cls: str
    mutant: str
    point: str
    read: float
    """Worst relative L2 of captured rows, unsteered and while steering; tolerance 1e-4."""
    write: float
    """Worst relative L2 of steered log-probabilities; tolerance 1e-3."""
    proof: str
    """What the static proof says: refuses, accepts, or cannot see."""
    raised: str = ""

    @property
    def caught(self) -> bool:
        wrong = self.read > check.READ_TOLERANCE or self.write > check.WRITE_TOLERANCE
        return wrong or bool(self.raised)

    @property
    def right(self) -> bool:
        """Caught where there is a mistake, and not where there is none."""
        return self.caught != (self.mutant == UNMUTATED)


def run_model(
    name: str, wanted: Callable[[str, str], bool] = lambda mutant, point: True
) -> Iterator[Verdict]:
    """The unmutated twin, then every mutant of the model's first wired class.

    Args:
        name: of a tiny model.
        wanted: (mutant, point) -> whether to run it.
    """
    row = models.MODELS[name]
    path = models.save(row, BUILD / "tiny-models")
    reference = check.Reference(row, models.load(row, path))
    points = {"steering_points": list(BLOCK_POINTS), "capture_points": list(BLOCK_POINTS)}
    options = {"enable_steering": True, "capture_consumers": ["inline"], **points, **row.engine}
    with engine(path, **options) as llm:
        model = llm.apply_model(lambda model: model)[0]
        layers = find_layers(model)
        cls = type(next(iter(layers.values())))
        inputs = [n for n, layer in layers.items() if unbound_taps(layer).inputs]
        wired = BY_KEY[f"{cls.__module__.replace('.', '/')}.py:{cls.__name__}"]

        def measure(mutant: str, point: str, proof: str) -> Verdict:
            try:
                reads = check.read_errors(llm, reference, PROMPTS)
                reads += check.steered_read_errors(llm, reference, PROMPTS)
                writes = check.write_errors(llm, reference, PROMPTS)
                read, write = max(r.error for r in reads), max(r.error for r in writes)
                if inputs:
                    found = check.other_errors(llm, reference, PROMPTS, INPUT_POINTS)
                    read = max(read, *(errors.read for errors in found.values()))
                    written, _ = check.input_write_errors(llm, reference, PROMPTS[0], inputs)
                    write = max(write, written)
            except AssertionError as error:
                return Verdict(name, cls.__name__, mutant, point, 0, 0, proof, str(error))
            return Verdict(name, cls.__name__, mutant, point, read, write, proof)

        yield measure(UNMUTATED, "", "accepts")
        if wired.idiom in WIRED:
            text = (TREE / wired.file).read_text()
            assert proof_of(wired, text) == "accepts"
            for mutant in source_mutants(text, wired):
                if wanted(mutant.name, mutant.point):
                    proof = proof_of(wired, mutant.module)
                    with forward_of(cls, mutant.module):
                        yield measure(mutant.name, mutant.point, proof)
        for mistake, change in BOUND.items():
            if wanted(mistake, "all"):
                before = bound_taps(layers)
                _bind(layers, change(before))
                yield measure(mistake, "all", "cannot see")
                _bind(layers, before)
        yield measure(UNMUTATED, "", "accepts")


def proof_of(row: Row, text: str) -> str:
    """What the proof says of a wired module's text."""
    try:
        prove(row, Source(Tree(TREE), row.file, text))
    except TapsError:
        return "refuses"
    return "accepts"


def _bind(layers: dict[int, nn.Module], taps: dict[int, Any]) -> None:
    for index, layer in layers.items():
        layer.taps = taps[index]


@contextmanager
def forward_of(cls: type[nn.Module], text: str) -> Iterator[None]:
    """Within, instances of `cls` run the forward() that `text`, its module's, defines."""
    module = ast.parse(text)
    (node,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    (forward,) = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    names = dict(vars(sys.modules[cls.__module__]))
    exec(compile(ast.Module([forward], []), f"<mutant of {cls.__name__}>", "exec"), names)
    before = cls.forward
    cls.forward = names["forward"]
    try:
        yield
    finally:
        cls.forward = before
