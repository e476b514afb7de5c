# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the calls that the codemod puts into `forward`: each a change of its source text.

A function returns the changed text of one class, or None where the mistake does not apply to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from patches.taps.rows import Row, Second

Mutate = Callable[[str, Row, str], str | None]
"""(text of the class, its row, point) -> the mutant."""


def after_the_norm(text: str, row: Row, point: str) -> str | None:
    """The vector is added to the skip once the norm has run: the branch does not see it."""
    if enter := _enter(text, point):
        text = text.replace(enter[0], "", 1)
        return re.sub(
            rf"self\.taps\.{point}\.read\((\w+)\)", rf"\1 = self.taps.{point}(\1)", text, count=1
        )
    if not (whole := _whole(text, point)) or point == "post_block":
        return None
    head, tail = text.split(whole[0], 1)
    norms = "|".join(map(re.escape, row.norms))
    skip = re.match(rf"\s*(?:#.*\n\s*)*({row.skip}) = {whole['x']}\n", tail)
    if not skip or not (norm := re.search(rf"^( *).*self\.(?:{norms})\(.*\)\n", tail, re.M)):
        return None
    line = f"{norm[1]}{row.skip} = self.taps.{point}({row.skip})\n"
    return head + tail[: norm.end()] + line + tail[norm.end() :]


def without_the_residual(text: str, row: Row, point: str) -> str | None:
    """Only one half of the sum is captured."""
    if leave := _leave(text, point):
        return text.replace(
            leave[0], f"{leave['i']}{leave['h']} = self.taps.{point}({leave['h']})\n"
        )
    if enter := _enter(text, point):
        return re.sub(rf"(self\.taps\.{point}\.read)\(\w+\)", rf"\1({enter['h']})", text, count=1)
    if (whole := _whole(text, point)) and point != "pre_attn":
        i, x = whole["i"], whole["x"]
        lines = (
            f"{i}{x} = self.taps.{point}.steer({x})\n{i}self.taps.{point}.read({x} - {row.skip})\n"
        )
        return text.replace(whole[0], lines)
    return None


def at_post_block(text: str, row: Row, point: str) -> str | None:
    """`post_attn` is called where `post_block` is."""
    if point != "post_attn":
        return None
    if (enter := _enter(text, point)) and (leave := _leave(text, "post_block")):
        text = text.replace(enter[0], "", 1)
        text = re.sub(r" *self\.taps\.post_attn\.read\(\w+\)\n", "", text, count=1)
        return text.replace(leave[0], leave[0].replace("post_block", "post_attn") + leave[0], 1)
    if (whole := _whole(text, point)) and (block := _whole(text, "post_block")):
        text = text.replace(whole[0], "", 1)
        return text.replace(block[0], block[0].replace("post_block", "post_attn") + block[0], 1)
    return None


def stale_as_deferred(text: str, row: Row, point: str) -> str | None:
    """An old residual, returned beside a complete stream, is taken for its other half."""
    whole = _whole(text, "post_block")
    if point != "post_block" or row.second is not Second.STALE or not whole:
        return None
    x, r = whole["x"], row.residual
    line = f"{whole['i']}{x}, {r} = self.taps.post_block.steer_and_capture_pair({x}, {r})\n"
    return text.replace(whole[0], line)


def twice(text: str, row: Row, point: str) -> str | None:
    """The same call stands there twice."""
    found = _enter(text, point) or _leave(text, point) or _whole(text, point)
    return text.replace(found[0], found[0] + found[0], 1) if found else None


def gone(text: str, row: Row, point: str) -> str | None:
    """The tap only captures."""
    if enter := _enter(text, point):
        return text.replace(enter[0], "", 1)
    if whole := _whole(text, point):
        return text.replace(whole[0], f"{whole['i']}self.taps.{point}.read({whole['x']})\n", 1)
    return None


SOURCE: dict[str, Mutate] = {
    "tap after the norm": after_the_norm,
    "missing residual half": without_the_residual,
    "post_attn where post_block is": at_post_block,
    "stale second return read as deferred": stale_as_deferred,
    "steering twice (call doubled)": twice,
    "steering call missing": gone,
}

_PAIR = r"^(?P<i> *)(?P<h>\w+), (?P<r>\w+) = self\.taps\.{}\.{}\([^)]*\)\n"


def _enter(text: str, point: str) -> re.Match[str] | None:
    return re.search(_PAIR.format(point, "steer_pair"), text, re.M)


def _leave(text: str, point: str) -> re.Match[str] | None:
    return re.search(_PAIR.format(point, "steer_and_capture_pair"), text, re.M)


def _whole(text: str, point: str) -> re.Match[str] | None:
    return re.search(rf"^(?P<i> *)(?P<x>\w+) = self\.taps\.{point}\((?P=x)\)\n", text, re.M)


@dataclass(frozen=True)
class SourceMutant:
    """One mistake at one point of one class."""

    name: str
    point: str
    module: str
    """The text of the whole module with it."""


def source_mutants(text: str, row: Row) -> Iterator[SourceMutant]:
    """Every mistake that applies to the wired class of `row` in its module's `text`."""
    (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == row.cls)
    lines = text.splitlines(keepends=True)
    head, own = "".join(lines[: node.lineno - 1]), "".join(lines[node.lineno - 1 : node.end_lineno])
    tail = "".join(lines[node.end_lineno :])
    for name, mutate in SOURCE.items():
        for point in row.taps:
            changed = mutate(own, row, point)
            if changed is not None:
                assert changed != own
                yield SourceMutant(name, point, head + changed + tail)
