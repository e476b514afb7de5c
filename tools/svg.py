# SPDX-License-Identifier: Apache-2.0
"""An SVG made of plain words and of names: what `tools.drawings` draws with.

A name says where it is defined, and words may not look like names, so that a test can tell whether
the code still has what is drawn. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

OURS = "vllm/v1/interventions"
"""The folder that files are shown without."""

# Colours are classes, so that a browser in dark mode takes the second set. The background is drawn,
# so that a page of the other colour does not matter.
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
       font-size: 12px; fill: #1f2328; }
.name { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
        font-weight: 600; }
.place { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
         font-size: 10px; fill: #59636e; }
.note { font-size: 11px; fill: #59636e; }
.title { font-size: 14px; font-weight: 600; }
.page { fill: #ffffff; }
.lane { fill: #f6f8fa; stroke: #d1d9e0; }
.box { fill: #ffffff; stroke: #8c959f; }
.message { fill: #ddf4ff; stroke: #54aeff; }
.point { fill: #fff8c5; stroke: #bf8700; }
.line { fill: none; stroke: #57606a; stroke-width: 1.4; }
.stream { fill: none; stroke: #0969da; stroke-width: 3; }
.head { fill: #57606a; }
.streamhead { fill: #0969da; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .place, .note { fill: #9198a1; }
  .page { fill: #0d1117; }
  .lane { fill: #151b23; stroke: #3d444d; }
  .box { fill: #212830; stroke: #656c76; }
  .message { fill: #121d2f; stroke: #388bfd; }
  .point { fill: #272115; stroke: #d29922; }
  .line { stroke: #9198a1; }
  .stream { stroke: #4493f8; }
  .head { fill: #9198a1; }
  .streamhead { fill: #4493f8; }
}
"""


@dataclass(frozen=True)
class Name:
    """Something that is drawn by its name: `symbol` of the file `path`, both as the code has it."""

    path: str
    symbol: str
    shown: str = ""
    """End of the symbol that is drawn in its place; "" if the whole symbol is drawn."""


def _short(path: str) -> str:
    """A file, as much of its path as fits into a box."""
    path = path.removeprefix(f"{OURS}/")
    if len(path) <= 36:
        return path
    return "…/" + "/".join(path.split("/")[-2:])


@dataclass
class Drawing:
    """An SVG in the making. Coordinates are pixels, y grows downwards."""

    title: str
    width: int
    height: int
    names: list[Name] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Plain words, that name nothing."""
        self.words.append(words)
        self._text(x, y, words, kind, anchor)

    def name(self, x: float, y: float, name: Name, anchor: str = "start") -> None:
        """A name, without its file."""
        self.names.append(name)
        self._text(x, y, name.shown or name.symbol, "name", anchor)

    def sentence(self, x: float, y: float, *pieces: str | Name) -> None:
        """Words and names on one line."""
        spans = []
        for piece in pieces:
            if isinstance(piece, Name):
                self.names.append(piece)
                spans.append(f'<tspan class="name">{escape(piece.shown or piece.symbol)}</tspan>')
            else:
                self.words.append(piece)
                spans.append(f'<tspan class="note">{escape(piece)}</tspan>')
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" xml:space="preserve">{"".join(spans)}</text>'
        )

    def lane(self, x: float, y: float, width: float, height: float, what: str, at: str) -> None:
        """A process: its place in the drawing, and the folder of its code."""
        self.folders.append(at)
        self._rect(x, y, width, height, "lane", 8)
        self.text(x + 12, y + 21, what, "title")
        self._text(x + 12, y + 37, at, "place")

    def box(
        self, x: float, y: float, width: float, name: Name, *notes: str, kind: str = "box"
    ) -> float:
        """A name with its file and what it does; returns the y of the box's lower edge."""
        height = 42 + 15 * len(notes)
        self._rect(x, y, width, height, kind, 5)
        self.name(x + 10, y + 19, name)
        self._text(x + 10, y + 33, _short(name.path), "place")
        for i, note in enumerate(notes):
            self.text(x + 10, y + 49 + 15 * i, note, "note")
        return y + height

    def shape(self, x: float, y: float, width: float, height: float, words: str) -> None:
        """A part of a model, centred words in a box."""
        self._rect(x, y, width, height, "box", 5)
        self.text(x + width / 2, y + height / 2 + 4, words, "", "middle")

    def plus(self, x: float, y: float) -> None:
        """Draw a plus in a circle: the place where a branch is added to the stream."""
        self._parts.append(f'<circle class="box" cx="{x:g}" cy="{y:g}" r="11"/>')
        self._parts.append(f'<path class="line" d="M{x - 6:g} {y:g} H{x + 6:g}"/>')
        self._parts.append(f'<path class="line" d="M{x:g} {y - 6:g} V{y + 6:g}"/>')

    def point(self, x: float, y: float) -> None:
        """A tap on the stream."""
        self._parts.append(f'<circle class="point" cx="{x:g}" cy="{y:g}" r="9" stroke-width="2"/>')

    def arrow(self, *corners: tuple[float, float], kind: str = "line", head: bool = True) -> None:
        """A line through `corners`."""
        (x, y), *rest = corners
        path = f"M{x:g} {y:g} " + " ".join(f"L{a:g} {b:g}" for a, b in rest)
        self._parts.append(f'<path class="{kind}" d="{path}"/>')
        if head:
            (a, b), (c, d) = corners[-2:]
            across, down = (c > a) - (c < a), (d > b) - (d < b)
            points = f"{c:g},{d:g} " + " ".join(
                f"{c - 8 * across + side * down * 4:g},{d - 8 * down + side * across * 4:g}"
                for side in (-1, 1)
            )
            shade = "streamhead" if kind == "stream" else "head"
            self._parts.append(f'<polygon class="{shade}" points="{points}"/>')

    def svg(self) -> str:
        """The file."""
        size = f'width="{self.width}" height="{self.height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width} {self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n"
            f'<rect class="page" {size} rx="8"/>\n' + "\n".join(self._parts) + "\n</svg>\n"
        )

    def _text(self, x: float, y: float, shown: str, kind: str, anchor: str = "start") -> None:
        attributes = f'x="{x:g}" y="{y:g}"'
        if kind:
            attributes += f' class="{kind}"'
        if anchor != "start":
            attributes += f' text-anchor="{anchor}"'
        self._parts.append(f"<text {attributes}>{escape(shown)}</text>")

    def _rect(
        self, x: float, y: float, width: float, height: float, kind: str, radius: float
    ) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}"/>'
        )
