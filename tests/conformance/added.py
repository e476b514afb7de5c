# SPDX-License-Identifier: Apache-2.0
"""Measures the points within a branch alone, and puts them into a result that there is.

A new column takes a tenth of the time of a new result. The result keeps the digest of the sources
that all its other numbers were made with, so tests still take it for one of before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .proof import HeadErrors, Result, load_results

if TYPE_CHECKING:
    from .completions import Engine
    from .runner import Reference
    from .tiny import TinyModel


def known(name: str, where: str) -> Result | None:
    """The result in the repository, if it is within tolerance."""
    found = (r for r in load_results() if (r.name, r.where) == (name, where))
    return next((r for r in found if not r.failures()), None)


def add(row: TinyModel, cache: Path, result: Result, **options: Any) -> Result:
    """`result` with what is measured of the points within a branch.

    Args:
        cache: directory for the tiny models; made when missing.
        options: engine options.
    """
    from vllm.config.points import FINAL, INNER_POINTS

    from . import models, pictures
    from .engine import engine
    from .runner import Reference, TwoWay, prompts

    path = models.save(row, cache)
    token_prompts = prompts()
    shown: list[Any] = pictures.prompts(row.pictures) if row.pictures else []
    if row.two_way:
        shown = [TwoWay(prompt) for prompt in token_prompts]
    reference = Reference(row, models.load(row, path), shown)
    settings = {**row.engine, **options, "capture_consumers": ["inline"]}
    with row.upstream(), engine(path, capture_points=[*INNER_POINTS, FINAL], **settings) as llm:
        shape = llm.llm_engine.vllm_config.tap_shape
        assert shape is not None
        offered = {point for layer in shape.layers.values() for point in layer.widths}
        errors, without = inner_errors(llm, reference, shown or token_prompts, offered)
    heads = {point: e for point, e in result.heads.items() if point not in INNER_POINTS}
    why = {point: w for point, w in result.without.items() if point not in INNER_POINTS}
    return replace(result, heads=heads | errors, without=why | without)


def inner_errors(
    llm: Engine, reference: Reference, prompts: list[Any], offered: set[str]
) -> tuple[dict[str, HeadErrors], dict[str, str]]:
    """The errors of the points within a branch, and why there are none of the others.

    Args:
        offered: those that the engine has.
    """
    from vllm.config.points import INNER_POINTS

    from .runner import other_errors

    seen = {point for point, _ in reference.run(prompts[-1]).others}
    shown = [point for point in INNER_POINTS if point in offered and point in seen]
    errors = other_errors(llm, reference, prompts, shown) if shown else {}
    lacking = {p: "unseen" if p in offered else "none" for p in INNER_POINTS if p not in shown}
    return errors, lacking
