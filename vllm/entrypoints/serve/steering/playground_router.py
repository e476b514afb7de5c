# SPDX-License-Identifier: Apache-2.0
"""Serves `GET /playground`, one page that asks the server's own endpoints; see docs/playground.md.

The page is joined of the files in `playground/` when the server starts. It is the same for everyone
and holds nothing of the server, so it needs no key; what it asks under `/v1` does.
"""

import argparse
import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

FOLDER = Path(__file__).with_name("playground")
SCRIPTS = (
    "numbers.js", "elements.js", "drawing.js", "server.js", "bodies.js", "copying.js", "link.js",
    "model.js", "files.js", "find.js", "train.js", "steer.js", "sliders.js", "compare.js",
    "scales.js", "presets.js", "talk.js", "look.js", "heads.js", "features.js", "trace.js",
    "start.js",
)  # fmt: skip
"""The files of the script, in the order in which they run."""
MAX_BYTES = 96 << 10
"""The most bytes of the page; 64 KiB were full before it had a panel for features."""

_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)""")
_BEFORE_QUOTES = re.compile(r"\b(return|case|of|in|typeof|await) $")
_LONG_COMMENT = re.compile(r"^[ \t]*/\*.*?\*/[ \t]*\n", re.MULTILINE | re.DOTALL)


def need_playground(args: argparse.Namespace) -> None:
    """Raise ValueError where `--playground` would have nothing to show."""
    # A peer's dialect turns on what it needs.
    if args.playground and not (args.enable_steering or args.capture_consumers or args.compat):
        raise ValueError(
            "playground: needs steering or capture; start the server with --enable-steering or "
            "--capture-consumers inline"
        )


def page() -> tuple[bytes, str]:
    """Join the page.

    Returns:
        the page, and its `Content-Security-Policy`: the script and the style by their digests,
        requests to this origin, and nothing else.
    """
    style = packed_style((FOLDER / "style.css").read_text())
    script = packed_script("".join((FOLDER / name).read_text() for name in SCRIPTS))
    html = (FOLDER / "page.html").read_text().replace(">\n<", "><")
    html = re.sub(r"</option>|</p>(?=<)", "", re.sub(r'="([\w-]+)"', r"=\1", html))
    # Not str.format, and each once: the parts have braces of their own.
    for mark, part in (("/* style.css */", style), ("/* script */", script)):
        html = part.join(html.split(mark, 1))
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


def packed_script(text: str) -> str:
    """Leave out comments, needless space and the last semicolon of a block.

    Ours have a comment on lines of its own alone, a semicolon after each statement, and spaces
    around what divides; a line with more than that, such as a regular expression, is left as it is.
    """
    lines = []
    for line in _LONG_COMMENT.sub("", text).splitlines():
        line = line.strip()
        if not line or line.startswith("//"):
            continue
        bare = _QUOTED.sub("", line)
        if line.count("`") in (0, 2) and bare.count("/") == bare.count(" / "):
            parts = _QUOTED.split(line)
            parts[::2] = map(_without_space, parts[::2])
            parts[:-1:2] = [_BEFORE_QUOTES.sub(r"\1", part) for part in parts[:-1:2]]
            line = "".join(parts)
        lines.append(line)
    joined = re.sub(
        r";\n(?=\})| (?=[+?:&|]+\n)", lambda found: found[0].strip(" ;"), "\n".join(lines)
    )
    joined = re.sub(r"([,{}(\[;=?:+|&>])\n|\n(?=[?:+.|&}])", r"\1", joined)
    return f"'use strict';{joined}"


def _without_space(code: str) -> str:
    code = re.sub(r" ([-+]) (?![-+])", r"\1", code)
    return re.sub(r"\s*([=<>?:,{}()\[\]&|;*/])\s*", r"\1", code).replace(";}", "}")


def packed_style(text: str) -> str:
    """Leave out needless space of a style sheet."""
    tight = re.sub(r"\s*([{};,>])\s*|(:)\s+", lambda found: found[1] or found[2], text)
    return re.sub(r"\b0\.", ".", tight.replace(";}", "}"))


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def playground_router() -> APIRouter:
    """Make the router; the page is read now."""
    html, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.get("/playground", include_in_schema=False)
    async def playground() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return router
