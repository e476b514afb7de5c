# SPDX-License-Identifier: Apache-2.0
"""What judges the edits: the proof and the oracle. Right ones pass, and wrong ones do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from patches.taps.errors import TapsError
from patches.taps.proof import prove
from patches.taps.rows import Row
from patches.taps.source import Source
from tests.support import taps_oracle, taps_settings
from tests.support.taps_wired import BY_CLASS, WIRED_ROWS, Wired

pytestmark = pytest.mark.quick

CASES = [
    pytest.param(row, settings, id=f"{Path(row.file).parts[-3]}-{row.cls}-{i}")
    for row in WIRED_ROWS
    for i, settings in enumerate(taps_settings.settings_of(row))
]


@pytest.mark.parametrize(("row", "settings"), CASES)
def test_contract_by_numbers(wired: Wired, row: Row, settings: dict[str, object]) -> None:
    taps_oracle.check(row, wired.before(row), wired.after(row), settings)


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
MLP_IN = "hidden_states = self.taps.mlp_in(hidden_states)"
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
    # The MLP reads what its tap returned, and nothing else does.
    ("LlamaDecoderLayer", MLP_IN, "pass"),
    ("LlamaDecoderLayer", MLP_IN, "residual = self.taps.mlp_in(residual)"),
    (
        "Gemma2DecoderLayer",
        lines(MLP_IN),
        lines("old = hidden_states", MLP_IN, "hidden_states = old"),
    ),
    ("Gemma2DecoderLayer", lines(MLP_IN), lines(MLP_IN, MLP_IN)),
    ("GPT2Block", lines(LN_2), lines(MLP_IN, LN_2).replace("mlp_in(", "mlp_in(0 + ")),
    ("GPTJBlock", lines(LN_1), lines(LN_1, MLP_IN)),
    (
        "GPTJBlock",
        "attn_output + mlp_output + residual",
        "mlp_output + attn_output + hidden_states",
    ),
    ("CohereDecoderLayer", "self.mlp(hidden_states)", "self.mlp(residual)"),
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
