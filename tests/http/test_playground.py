# SPDX-License-Identifier: Apache-2.0
"""The playground without a browser: what is served, and that it asks for what exists."""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI

from tools.assemble import overlay_files
from vllm.config.points import CAPTURE_POINTS
from vllm.config.steering import FAMILIES
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.steering.api_router import attach_router
from vllm.entrypoints.serve.steering.playground_router import (
    FOLDER,
    MAX_BYTES,
    SCRIPTS,
    packed_script,
    page,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.interventions.plan import PLAN_FIELDS

if TYPE_CHECKING:
    from tests.http.server import Server

pytestmark = pytest.mark.quick

SOURCES = "".join((FOLDER / name).read_text() for name in SCRIPTS)
PATHS = set(re.findall(r"[('`](/(?:v1|detokenize)[\w/]*)", SOURCES))


class Parts(HTMLParser):
    """What a page has that could load or run something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.inside = ""
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag in ("script", "style"):
            self.texts.setdefault(tag, [])

    def handle_data(self, data: str) -> None:
        if self.inside in self.texts:
            self.texts[self.inside].append(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def test_the_page_runs_one_script_and_loads_nothing() -> None:
    html, policy = page()
    assert len(html) <= MAX_BYTES
    parts = Parts(html.decode())
    for kind in ("script", "style"):
        (text,) = parts.texts[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
        other = base64.b64encode(hashlib.sha256((text + " ").encode()).digest()).decode()
        assert other not in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy
    names = {name for name, _ in parts.attributes}
    assert names.isdisjoint({"src", "style", "srcset", "action"})
    assert not [name for name in names if name.startswith("on")]
    links = {value for name, value in parts.attributes if name == "href"}
    assert links and all(link and link.startswith("#") for link in links)
    assert len(parts.ids) == len(set(parts.ids))


def test_text_cannot_become_markup_or_code_and_nothing_is_kept() -> None:
    forbidden = (
        "innerHTML|outerHTML|insertAdjacent|document.write|DOMParser|createContextualFragment|eval|"
        "new Function|setTimeout\\('|localStorage|sessionStorage|indexedDB|cookie|import\\(|"
        "XMLHttpRequest|WebSocket|EventSource|sendBeacon|https?://[a-z]"
    )
    found = re.findall(forbidden, SOURCES.replace("http://www.w3.org/2000/svg", ""))
    assert not found
    assert re.findall(forbidden, "node.innerHTML = text") == ["innerHTML"]
    assert SOURCES.count("fetch(") == 1, "all requests go one way"
    assert "credentials: 'omit'" in SOURCES


def test_the_page_s_files_can_be_packed() -> None:
    """Comments stand on lines of their own, so that joining lines takes nothing along."""
    for line in SOURCES.splitlines():
        bare = re.sub(r"""'[^']*'|"[^"]*"|`[^`]*`|/[^/ ]+/\w*""", "", line.strip())
        assert "//" not in bare or bare.startswith("//"), line
    assert packed_script("// a\nconst a = 'b  = c';\n\n  f(a, 2 + +x);\n") == (
        "'use strict';const a='b  = c';f(a,2 + +x);"
    )
    assert packed_script("if (a) {\n  f(';}');\n}\nif (b) { g(); }\n") == (
        "'use strict';if(a){f(';}')}if(b){g()}"
    )
    assert {path.name for path in FOLDER.iterdir()} == {*SCRIPTS, "page.html", "style.css"}
    packaged = {Path(name).name for name in overlay_files() if "/playground/" in name}
    assert packaged == {*SCRIPTS, "page.html", "style.css"}, "what the wheel has"


def test_every_element_that_is_asked_for_is_there() -> None:
    ids = set(Parts(page()[0].decode()).ids)
    asked = set(re.findall(r"\$\('([\w-]+)'\)", SOURCES))
    assert asked and asked <= ids, asked - ids
    clicks = SOURCES[SOURCES.index("const CLICKS") : SOURCES.index("function startPanels")]
    clicked = set(re.findall(r"^  '?([\w-]+)'?[:,]", clicks, re.MULTILINE))
    assert len(clicked) > 6 and clicked <= ids


def test_the_page_names_what_exists() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = {flag for action in parser._actions for flag in action.option_strings}
    named = set(re.findall(r"--[a-z]+(?:-[a-z]+)+", SOURCES)) - {"--steering-api-key"}
    # --paper and its like are colours.
    assert {"--capture-lens", "--enable-steering"} <= named <= flags
    operations = SOURCES[SOURCES.index("const OPERATIONS") : SOURCES.index("const PHASES")]
    assert set(re.findall(r"^  (\w+): \{", operations, re.MULTILINE)) < set(FAMILIES)
    fields = SOURCES[SOURCES.index("const OWN_FIELDS") : SOURCES.index("function asOpenAI")]
    assert set(re.findall(r"'(\w+)'", fields)) < set(PLAN_FIELDS)
    assert "'qkvz'" in SOURCES and set("qkvz") < set(CAPTURE_POINTS)


def test_off_by_default_and_refused_with_nothing_to_show() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    plain = parser.parse_args(["--enable-steering"])
    assert plain.playground is False

    def served(args: argparse.Namespace) -> list[str]:
        app = FastAPI()
        app.state.args = args
        attach_router(app)
        return [str(route.path) for route in app.routes if hasattr(route, "path")]

    assert "/playground" not in served(plain)
    assert "/playground" in served(parser.parse_args(["--enable-steering", "--playground"]))


@pytest.mark.full
def test_served(server: Server) -> None:
    answer = server.get("/playground")
    html, policy = page()
    assert (answer.status_code, answer.content) == (200, html)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in answer.headers
    assert server.post("/playground", {}).status_code == 405
    paths = server.get("/openapi.json").json()["paths"]
    known = {*paths, *(path.rpartition("/{")[0] for path in paths)}
    assert {"/v1/steering/sweep", "/v1/completions", "/detokenize"} <= PATHS
    assert {path.rstrip("/") for path in PATHS} <= known, PATHS - known
    lenses = server.get("/v1/capture").json()["lenses"]
    assert lenses["logit"]["post_block"] == [0, 1, 2, 3]
