# SPDX-License-Identifier: Apache-2.0
"""The taps codemod against the pinned upstream tree: what it edits, and what it refuses."""

from __future__ import annotations

import py_compile
import shutil
from pathlib import Path

import pytest

from patches.taps import census
from patches.taps.codemod import verify, wire, wire_class
from patches.taps.errors import TapsError
from patches.taps.proof import prove
from patches.taps.report import report
from patches.taps.rows import FAMILIES, MODELS, WIRED, Idiom, Row
from patches.taps.source import Source, Tree, method
from patches.taps.table import ROWS
from tests.support import taps_oracle, taps_settings
from tools.pins import ROOT, load_pin
from tools.wheels import upstream_folder

pytestmark = pytest.mark.quick

WIRED_ROWS = [row for row in ROWS if row.idiom in WIRED]
BY_CLASS = {row.cls: row for row in WIRED_ROWS}
EDITED = [row for row in ROWS if row.idiom in WIRED or row.idiom is Idiom.REFUSED]
CASES = [
    pytest.param(row, settings, id=f"{Path(row.file).parts[-3]}-{row.cls}-{i}")
    for row in WIRED_ROWS
    for i, settings in enumerate(taps_settings.settings_of(row))
]


@pytest.fixture(scope="session")
def upstream() -> Path:
    """The pinned wheel, unpacked; nobody writes to it."""
    return upstream_folder(load_pin(ROOT, "cpu"), ROOT / "build")


class Wired:
    """Each class of the pinned tree before and after wiring, made once."""

    def __init__(self, root: Path) -> None:
        self._tree = Tree(root)
        self._done: dict[str, Source] = {}

    def before(self, row: Row) -> Source:
        return self._tree.read(row.file)

    def after(self, row: Row) -> Source:
        if row.key not in self._done:
            self._done[row.key] = wire_class(self.before(row), row)
        return self._done[row.key]


@pytest.fixture(scope="session")
def wired(upstream: Path) -> Wired:
    return Wired(upstream)


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
    points = ", ".join(f'"{p}"' for p in row.points)
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


def lines(*code: str) -> str:
    """Statements as they stand in a method's body."""
    return "".join(f"        {line}\n" for line in code)


SKIP = "residual = hidden_states"
PRE = "hidden_states = self.taps.pre_attn(hidden_states)"
POST = "hidden_states = self.taps.post_attn(hidden_states)"
END = "hidden_states = self.taps.post_block(hidden_states)"
TIMES = "taps = self.taps.at(current_step)"
LN_1 = "hidden_states = self.ln_1(hidden_states)"
LN_2 = "hidden_states = self.ln_2(hidden_states)"
ENTER = "hidden_states, residual = self.taps.post_attn.steer_pair(hidden_states, residual)"
LEAVE = (
    "hidden_states, residual = self.taps.post_block.steer_and_capture_pair(hidden_states, residual)"
)
LAST_OLD = "corrected_predictions = old"
LAST = "corrected_predictions = self.taps.post_block(corrected_predictions)"
BAD_WIRING = [
    # (class, wired text, wrong text): the codemod never writes these; both checks must see them.
    (
        "LlamaDecoderLayer",
        "steer_pair(hidden_states, residual)",
        "steer_pair(residual, hidden_states)",
    ),
    ("Gemma3nDecoderLayer", lines(PRE), lines("old = hidden_states", PRE, "hidden_states = old")),
    ("Gemma3nDecoderLayer", PRE, "pass"),
    ("Gemma3nDecoderLayer", lines(LAST), lines(LAST, "corrected_predictions[1:] += attn_norm")),
    ("Gemma3nDecoderLayer", lines(LAST), lines("old = predictions + 0", LAST, LAST_OLD)),
    ("LlamaDecoderLayer", "pre_attn.read(residual)", "pre_attn.read(hidden_states)"),
    ("LlamaDecoderLayer", ENTER, "pass"),
    (
        "LlamaDecoderLayer",
        ENTER,
        "_, residual = self.taps.post_attn.steer_pair(hidden_states, residual)",
    ),
    (
        "LlamaDecoderLayer",
        ENTER,
        "hidden_states, _ = self.taps.post_attn.steer_pair(hidden_states, residual)",
    ),
    # A name that holds half of the stream from before the tap is wrong once a tap empties it.
    ("LlamaDecoderLayer", lines(ENTER), lines("old = hidden_states", ENTER, "hidden_states = old")),
    ("LlamaDecoderLayer", lines(ENTER), lines("old = residual", ENTER, "residual = old")),
    ("LlamaDecoderLayer", lines(LEAVE), lines("old = hidden_states", LEAVE, "hidden_states = old")),
    # Nor may a half be changed between the tap and the norm that adds both.
    ("LlamaDecoderLayer", lines(ENTER), lines(ENTER, "hidden_states = hidden_states * 2")),
    ("LlamaDecoderLayer", lines(ENTER), lines("hidden_states = hidden_states + residual", ENTER)),
    (
        "LlamaDecoderLayer",
        LEAVE,
        "_, residual = self.taps.post_block.steer_and_capture_pair(hidden_states, residual)",
    ),
    (
        "LlamaDecoderLayer",
        "steer_and_capture_pair(hidden_states, residual)",
        "steer_and_capture_pair(residual, residual)",
    ),
    ("GPT2Block", lines(PRE, SKIP), lines(SKIP, PRE)),
    ("GPT2Block", POST, "attn_output = self.taps.post_attn(hidden_states)"),
    ("GPT2Block", lines(POST) + "\n" + lines(SKIP, LN_2), lines(SKIP, LN_2, POST)),
    ("GPTJBlock", lines(LN_1), lines(LN_1, PRE)),
    ("GLMBlock", "self.taps.post_attn(layernorm_input)", "self.taps.post_attn(attention_output)"),
    ("CohereDecoderLayer", END, "residual = self.taps.post_block(residual)"),
    ("DbrxBlock", "self.norm_attn_norm.norm_2)", "self.norm_attn_norm.norm_1)"),
    ("DbrxBlock", "hidden_states, residual = self.taps.post", "_, residual = self.taps.post"),
    ("DeciLMDecoderLayer", ENTER.replace("steer_pair", "steer_and_capture_pair"), "pass"),
    (
        "Zamba2HybridLayer",
        "self.taps.post_block(layer_outputs)",
        "self.taps.post_block(hidden_states)",
    ),
    ("HrmTextDecoderLayer", "self.taps.at(current_step)", "self.taps.at(0)"),
    ("HrmTextDecoderLayer", TIMES, lines("current_step = 0").strip() + "\n" + lines(TIMES)),
    ("HrmTextDecoderLayer", "taps.post_attn", "self.taps.at(0).post_attn"),
    ("LoopCoderDecoderLayer", "        hidden_states = taps.pre_attn(hidden_states)\n", ""),
]


@pytest.mark.parametrize(("cls", "old", "new"), BAD_WIRING)
def test_wrong_wiring_is_seen(wired: Wired, cls: str, old: str, new: str) -> None:
    row = BY_CLASS[cls]
    good = wired.after(row)
    head, mark, tail = good.text.partition(f"class {cls}(")
    assert old in tail
    bad = Source(good.home, good.file, head + mark + tail.replace(old, new, 1))
    with pytest.raises(TapsError, match=cls):
        prove(row, bad)
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        taps_oracle.check(row, wired.before(row), bad, taps_settings.settings_of(row)[0])


BAD_BY_HAND = [
    # Lanes that skip unsteered, a point that reads something else, and a vector that goes nowhere.
    ("DeepseekV4DecoderLayer", "residual = x = self.taps.pre_attn", "x = self.taps.pre_attn"),
    ("DeepseekV4DecoderLayer", "residual = x = self.taps.post_attn", "x = self.taps.post_attn"),
    ("DeepseekV4DecoderLayer", "self.taps.post_block(x", "self.taps.post_block(residual"),
    ("DeepseekV4DecoderLayer", " x = self.taps.post_block", " _ = self.taps.post_block"),
    # The same, a mixture that stays as it was or is another's, a branch that is added twice, lanes
    # that are mixed again, and those of the block before that are left out.
    ("Glm5NextDecoderLayer", "residual = self.taps.pre_attn", "_ = self.taps.pre_attn"),
    ("Glm5NextDecoderLayer", "(post, comb, x), residual = self.taps.post_attn",
     "_, residual = self.taps.post_attn"),
    ("Glm5NextDecoderLayer", "lambda lanes: (x.new_zeros(x.shape), ", "lambda lanes: (x, "),
    ("Glm5NextDecoderLayer", ".expand_as(comb)", ".add(comb)"),
    ("DeepseekV4DecoderLayer", "residual = self.taps.pre_attn", "_ = self.taps.pre_attn"),
    ("DeepseekV4DecoderLayer", "(post_mix, res_mix, x), residual = self.taps.post_attn",
     "_, residual = self.taps.post_attn"),
    ("DeepseekV4DecoderLayer", "(lanes, self.hc_ffn_fn", "(residual, self.hc_ffn_fn"),
    ("DeepseekV4DecoderLayer", "(lanes, self.hc_attn_fn", "(lanes, self.hc_ffn_fn"),
    ("DeepseekV4DecoderLayer", "lambda lanes: (x.new_zeros(x.shape), ", "lambda lanes: (x, "),
    ("DeepseekV4DecoderLayer", ".expand_as(res_mix)", ".add(res_mix)"),
    ("DeepseekV4DecoderLayer", "x, residual, post_mix, res_mix = self.taps.post_block",
     "x, _, post_mix, res_mix = self.taps.post_block"),
    ("Qwen4ExpDecoderLayer", "attn_out.new_zeros(attn_out.shape)", "attn_out"),
    ("Qwen4ExpDecoderLayer", "mlp_out.new_zeros(mlp_out.shape)", "mlp_out"),
    ("Qwen4ExpDecoderLayer", "x if branch is None else attn_hc.combine(x, branch, factors)", "x"),
    ("Qwen4ExpDecoderLayer", "(lanes.flatten(1), None, None)",
     "(lanes.flatten(1), prev_block_output, prev_injection)"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "old", "new"), BAD_BY_HAND)
def test_wrong_lines_by_hand_are_seen(wired: Wired, cls: str, old: str, new: str) -> None:
    """By numbers, as the proof cannot read such a class."""
    rows = [row for row in WIRED_ROWS if row.cls == cls]
    [row] = [row for row in rows if wired.after(row).text.count(old) == 1]
    good = wired.after(row)
    bad = Source(good.home, good.file, good.text.replace(old, new))
    settings = taps_settings.settings_of(row)

    def check_all() -> None:
        for each in settings:
            taps_oracle.check(row, wired.before(row), bad, each)

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.parametrize(("row", "settings"), CASES)
def test_contract_by_numbers(wired: Wired, row: Row, settings: dict[str, object]) -> None:
    taps_oracle.check(row, wired.before(row), wired.after(row), settings)


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
