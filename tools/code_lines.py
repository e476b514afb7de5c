# SPDX-License-Identifier: Apache-2.0
"""Number of lines of code of Python files."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


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


def count(files: list[Path]) -> int:
    """Lines of code of the Python files among `files`."""
    return sum(code_lines(path.read_text()) for path in files if path.suffix == ".py")
