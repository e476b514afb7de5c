# SPDX-License-Identifier: Apache-2.0
"""The taps codemod against the pinned upstream tree: what it edits, and what it refuses."""

from __future__ import annotations

import py_compile
import shutil
from pathlib import Path

import pytest

from patches.taps import census
from patches.taps.codemod import verify, wire
from patches.taps.errors import TapsError
from patches.taps.report import report
from patches.taps.rows import FAMILIES, MODELS, WIRED, Idiom, Row
from patches.taps.source import Source, method
from patches.taps.table import ROWS
from tests.support.taps_wired import BY_CLASS, WIRED_ROWS, Wired

pytestmark = pytest.mark.quick

EDITED = [row for row in ROWS if row.idiom in WIRED or row.idiom is Idiom.REFUSED]


@pytest.fixture(scope="session")
def pristine(upstream: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of the two model trees alone."""
    root = tmp_path_factory.mktemp("pristine")
    for folder in (MODELS, FAMILIES):
        shutil.copytree(upstream / folder, root / folder, ignore=_not_python)
    return root


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Path:
    """A copy of them to edit."""
    return Path(shutil.copytree(pristine, tmp_path / "tree"))


def part(upstream: Path, target: Path, *rows: Row) -> Path:
    """A tree of the files of these rows alone, to edit."""
    for row in rows:
        (target / row.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(upstream / row.file, target / row.file)
    return target


def _not_python(folder: str, names: list[str]) -> set[str]:
    return {n for n in names if not n.endswith(".py") and not (Path(folder) / n).is_dir()}


def edit(tree: Path, row: Row, old: str, new: str) -> None:
    """Change upstream's code inside one class of the copy."""
    path = tree / row.file
    head, mark, tail = path.read_text().partition(f"class {row.cls}(")
    assert mark and old in tail, f"{row.key} has no {old!r}"
    path.write_text(head + mark + tail.replace(old, new, 1))


def forward_text(source: Source, row: Row) -> list[str]:
    """Body of forward(), without indentation of the class, comments and blank lines."""
    node = method(source.cls(row.cls), "forward")
    assert node is not None and node.end_lineno is not None
    lines = source.text.splitlines()[node.body[0].lineno - 1 : node.end_lineno]
    return [line[8:] for line in lines if line.strip() and not line.strip().startswith("#")]


def test_every_row_fits_and_none_is_missing(upstream: Path) -> None:
    text, fits = report(upstream)
    assert fits, text
    assert f"{len(WIRED_ROWS) + 7} classes with taps" in text


def test_verify_says_which_rows_do_not_fit(upstream: Path, tmp_path: Path) -> None:
    row = BY_CLASS["GPT2Block"]
    tree = part(upstream, tmp_path, BY_CLASS["LlamaDecoderLayer"], row)
    edit(tree, row, "self.ln_2(hidden_states)", "self.ln_2(attn_output)")
    good, bad = verify(tree, [BY_CLASS["LlamaDecoderLayer"], row])
    assert good.ok and not bad.ok and bad.error is not None and bad.error.cls == "GPT2Block"


def test_wire_only_inserts_lines(upstream: Path, tree: Path) -> None:
    changed = wire(tree)
    assert {str(p.relative_to(tree)) for p in changed} == {r.file for r in EDITED}
    replaced: list[tuple[str, str]] = []
    for path in changed:
        py_compile.compile(str(path), cfile=str(tree / "out.pyc"), doraise=True)
        old = (upstream / path.relative_to(tree)).read_text().splitlines()
        new = [line for line in path.read_text().splitlines() if "taps" not in line]
        old, new = ([line.strip() for line in lines if line.strip()] for lines in (old, new))
        while old != new:
            at = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
            replaced.append((old[at], "; ".join(new[at : at + 2])))
            new[at : at + 2] = [old[at]]
    assert (
        replaced
        == [
            (
                "return self.feed_forward(hidden_states), residual",
                "hidden_states = self.feed_forward(hidden_states); return hidden_states, residual",
            )
        ]
        * 2
    )
    with pytest.raises(TapsError, match="clean upstream tree"):
        wire(tree)


GOLDEN = {
    "LlamaDecoderLayer": """\
hidden_states, residual = self.taps.pre_attn.steer_pair(hidden_states, residual)
if residual is None:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
else:
    hidden_states, residual = self.input_layernorm(hidden_states, residual)
self.taps.pre_attn.read(residual)
hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
hidden_states, residual = self.taps.post_attn.steer_pair(hidden_states, residual)
hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
self.taps.post_attn.read(residual)
hidden_states = self.taps.mlp_in(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states, residual = self.taps.post_block.steer_and_capture_pair(hidden_states, residual)
return hidden_states, residual""",
    "Gemma2DecoderLayer": """\
hidden_states, residual = self.taps.pre_attn.steer_pair(hidden_states, residual)
if residual is None:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
else:
    hidden_states, residual = self.input_layernorm(hidden_states, residual)
self.taps.pre_attn.read(residual)
hidden_states = self.self_attn(
    positions=positions,
    hidden_states=hidden_states,
)
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states, residual = self.taps.post_attn.steer_pair(hidden_states, residual)
hidden_states, residual = self.pre_feedforward_layernorm(
    hidden_states, residual
)
self.taps.post_attn.read(residual)
hidden_states = self.taps.mlp_in(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = self.post_feedforward_layernorm(hidden_states)
hidden_states, residual = self.taps.post_block.steer_and_capture_pair(hidden_states, residual)
return hidden_states, residual""",
}


@pytest.mark.parametrize("cls", GOLDEN)
def test_golden_forward(wired: Wired, cls: str) -> None:
    row = BY_CLASS[cls]
    after = wired.after(row)
    assert "\n".join(forward_text(after, row)) == GOLDEN[cls]
    points = ", ".join(f'"{p}"' for p in row.taps)
    assert f"class {cls}(nn.Module):\n    taps = UnboundTaps({points})\n\n" in after.text


ADD = "hidden_states = attn_output + residual\n"
CHANGES = [
    # (class, upstream's text, changed text)
    ("LlamaDecoderLayer", "self.post_attention_layernorm(h", "self.norm_2(h"),
    ("LlamaDecoderLayer", "= self.mlp(hidden_states)", "= self.moe(hidden_states)"),
    (
        "LlamaDecoderLayer",
        "return hidden_states, residual",
        "return hidden_states + residual, None",
    ),
    ("LlamaDecoderLayer", "return hidden_states, residual", "return residual, residual"),
    (
        "LlamaDecoderLayer",
        "        hidden_states = self.mlp(hidden_states)\n",
        "        hidden_states = self.mlp(hidden_states)\n        residual = residual * 0.5\n",
    ),
    (
        "LlamaDecoderLayer",
        "        hidden_states = self.mlp(hidden_states)\n",
        "        hidden_states = self.mlp(hidden_states)\n        residual.mul_(0.5)\n",
    ),
    (
        "LlamaDecoderLayer",
        "        # Fully Connected\n",
        "        residual = residual + hidden_states\n",
    ),
    (
        "LlamaDecoderLayer",
        "        # Self Attention\n",
        "        first = self.mlp(hidden_states)\n",
    ),
    ("LlamaDecoderLayer", "self.mlp = LlamaMLP(", "self.mlp = LlamaMLP(reduce_results=False, "),
    ("LlamaDecoderLayer", "self.input_layernorm = RMSNorm(", "self.input_layernorm = PlainNorm("),
    (
        "Qwen3DecoderLayer",
        "        if residual is None:\n",
        "        if residual is None and True:\n",
    ),
    (
        "Gemma2DecoderLayer",
        "        hidden_states = self.post_attention_layernorm(hidden_states)\n",
        "        residual = self.post_attention_layernorm(hidden_states)\n",
    ),
    ("GPT2Block", ADD, "hidden_states = attn_output + hidden_states\n"),
    ("GPT2Block", ADD, ADD + "        attn_output = hidden_states + residual\n"),
    ("GPT2Block", "self.ln_2(hidden_states)", "self.ln_2(attn_output)"),
    ("GPT2Block", "self.mlp(hidden_states)", "self.mlp(hidden_states + 0)"),
    ("GPT2Block", "self.mlp(hidden_states)", "self.mlp(residual)"),
    ("GPTJBlock", "attn_output + mlp_output +", "hidden_states + attn_output + mlp_output +"),
    ("GPTJBlock", "attn_output + mlp_output + residual", "attn_output + residual"),
    ("GPTJBlock", "self.mlp(hidden_states)", "self.mlp(residual + attn_output)"),
    ("CohereDecoderLayer", "return hidden_states, residual", "return hidden_states"),
    ("CohereDecoderLayer", "self.tp_size > 1", "False"),
    (
        "CohereDecoderLayer",
        "        residual = hidden_states\n",
        "        residual = hidden_states if residual is None else residual\n",
    ),
    ("MambaDecoderLayer", "self.mixer(hidden_states, output)", "self.mixer(residual, residual)"),
    (
        "KimiDecoderLayer",
        "return hidden_states, prefix_sum, residual",
        "return hidden_states, residual, prefix_sum",
    ),
    ("DeepseekV32DecoderLayer", "self.mlp(hidden_states)", "self.mlp(residual)"),
    ("DeepseekV32DecoderLayer", "reduce_results=False", "reduce_results=True"),
    ("FlashDecoderLayer", "hidden_states + moe_hidden_states", "moe_hidden_states + residual"),
    ("DeciLMDecoderLayer", "self.mlp(hidden_states)", "self.mlp(residual)"),
    ("Gemma3nDecoderLayer", "self.altup.predict(", "self.altup.guess("),
    ("Gemma3nDecoderLayer", "attention_layernorm(attn)", "attention_layernorm(laurel_output)"),
    ("Gemma3nDecoderLayer", "return corrected_predictions", "return predictions"),
    ("Gemma3nDecoderLayer", "return corrected_predictions", "return corrected_predictions * 1"),
]


@pytest.mark.parametrize(("cls", "old", "new"), CHANGES)
def test_changed_upstream_is_refused(
    upstream: Path, tmp_path: Path, cls: str, old: str, new: str
) -> None:
    row = BY_CLASS[cls]
    tree = part(upstream, tmp_path, BY_CLASS["GraniteDecoderLayer"], row)
    edit(tree, row, old, new)
    before = {p: p.read_bytes() for p in tree.rglob("*.py")}
    with pytest.raises(TapsError) as refused:
        wire(tree, [BY_CLASS["GraniteDecoderLayer"], row])
    assert (refused.value.file, refused.value.cls) == (row.file, row.cls)
    assert row.file in str(refused.value) and "remedy" in str(refused.value)
    assert {p: p.read_bytes() for p in tree.rglob("*.py")} == before, "wrote before all fitted"


def test_cohere_norm_that_adds_is_refused(upstream: Path, tmp_path: Path) -> None:
    tree = part(upstream, tmp_path, BY_CLASS["CohereDecoderLayer"])
    path = tree / MODELS / "commandr.py"
    old = "        return hidden_states, residuals\n"
    path.write_text(path.read_text().replace(old, old.replace("residuals", "residuals + 0")))
    with pytest.raises(TapsError, match="CohereDecoderLayer"):
        wire(tree, [BY_CLASS["CohereDecoderLayer"]])


def test_inherited_class_with_its_own_forward_is_refused(upstream: Path, tmp_path: Path) -> None:
    row = next(r for r in ROWS if r.cls == "Qwen3VLDecoderLayer")
    assert row.idiom is Idiom.INHERITED
    tree = part(upstream, tmp_path, BY_CLASS["Qwen3DecoderLayer"], row)
    edit(
        tree,
        row,
        "    def __init__(",
        "    def forward(self, x):\n        return x\n\n    def __init__(",
    )
    with pytest.raises(TapsError, match="Qwen3VLDecoderLayer"):
        wire(tree, [BY_CLASS["Qwen3DecoderLayer"], row])


def test_census_notices_new_and_gone_classes(tree: Path) -> None:
    path = tree / MODELS / "llama.py"
    text = path.read_text().replace("class LlamaDecoderLayer(", "class LlamaFancyDecoderLayer(")
    path.write_text(text)
    found = {f.key for f in census.check(tree)}
    assert {
        MODELS + "llama.py:LlamaFancyDecoderLayer",
        MODELS + "llama.py:LlamaDecoderLayer",
    } <= found


def test_subclasses_that_override_forward_are_drafts(upstream: Path) -> None:
    excluded = {row.key for row in ROWS if row.idiom is Idiom.EXCLUDED}
    overridden = census.overridden(upstream)
    assert MODELS + "qwen3_eagle3.py:Qwen3Eagle3DecoderLayer" in overridden
    assert set(overridden) <= excluded


def test_rows_are_unique_and_reasoned() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert bool(row.reason) is (row.idiom in (Idiom.EXCLUDED, Idiom.REFUSED)), row.key
