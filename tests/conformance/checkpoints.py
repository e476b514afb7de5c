# SPDX-License-Identifier: Apache-2.0
"""The table of real checkpoints in docs/models.md: rows that `vllm steering check MODEL --json`
printed, a line each in `checkpoints.jsonl`, with `by`, which says whose they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patches.taps.rows import ALL_POINTS

ROWS = Path(__file__).with_name("checkpoints.jsonl")

HEAD = """## Real checkpoints

Weights that people have, checked with `vllm steering check MODEL --json`. At each point the worst
row of all layers: relative L2 of the whole row, and of the row without its largest channels (one
of 64), because some models have rows with single numbers of 20,000 beside others of order one.
*written*: the worst difference in log-probabilities, in nats, while one of nine sites is steered;
*plain*: with none. Reference: transformers on the same folder, in the same dtype on a CPU. *agrees*
counts the lines of the check, whose tolerances come from transformers' own rounding. On a GPU,
Triton's kernels round float32 to TF32, three digits; the check sets `TRITON_F32_DEFAULT=ieee`, and
a server does it where you set that variable.

To send a row in: run the command on your checkpoint, append the last line that it prints to
`tests/conformance/checkpoints.jsonl`, put `"by": "your name; where the weights are from"` into it,
run `.venv/bin/python -m tests.conformance.report`, and open a pull request. Rows that disagree are
welcome, too.

| checkpoint | architecture | setup | pre_attn | post_attn | post_block | written | plain | agrees |
by |
|---|---|---|---|---|---|---|---|---|---|
""".replace("agrees |\nby |", "agrees | by |")


QUANTISED = """## Quantised checkpoints

Rows and writes against transformers on the same rounded weights, worst row: a random Llama of 4
layers of 512, bfloat16, on one H200, compiled and in graphs; eager is within 0.02 of it
([output](measurements/h200-quantised.txt)). W8A8 rounds what each layer reads, too, so a digit that
bfloat16 decides moves a row further; the limit is twice what transformers in bfloat16 differs from
itself in float32. The last column is the least that rows differ from those of the weights before
rounding, or, for W8A8, from the token before. `python -m tests.gpu.quantised` measures all,
`tests/real/test_quantised.py` those marked CPU, on upstream's CPU build. The
kernels of Blackwell are not measured; vLLM 0.32.0 has no bitsandbytes.

| format | stored as | CPU | read | written | limit | twin |
|---|---|---|---|---|---|---|
| FP8 W8A8 | compressed-tensors, a scale a channel | yes | 0.10 | 0.08 | 0.23 | 1.2 |
| FP8 W8A16 | compressed-tensors, a scale a channel | no | 0.016 | 0.013 | 0.03 | 0.080 |
| INT8 W8A8 | compressed-tensors, a scale a channel | yes | 0.052 | 0.042 | 0.12 | 1.2 |
| INT4 W4A16 | compressed-tensors, groups of 128 | yes | 0.013 | 0.011 | 0.03 | 0.25 |
| GPTQ | 4 bits, groups of 128, symmetric | yes | 0.013 | 0.011 | 0.03 | 0.25 |
| AWQ | 4 bits, groups of 128, with zeros | yes | 0.021 | 0.017 | 0.03 | 0.16 |
| NVFP4 W4A16 | compressed-tensors, groups of 16 | no | 0.011 | 0.009 | 0.03 | 0.11 |
"""
"""The page's part on them, by hand: the scripts that it names print the numbers."""


def load_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows, sorted.

    Raises:
        ValueError: a line is no such row; the message has its number.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        if lacks := sorted({"model", "findings", "device", "by"} - row.keys()):
            raise ValueError(f"{path.name}:{number}: lacks {', '.join(lacks)}")
        rows.append(row)
    return sorted(rows, key=lambda r: (r["model"], r["device"], r["dtype"], r["mode"], r["tp"]))


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """That part of the page."""
    return HEAD + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)


def _cells(row: Mapping[str, Any]) -> list[str]:
    found = {one["check"]: one for one in row["findings"]}

    def worst(*names: str) -> str:
        numbers = [found[n]["measured"] for n in names if n in found and found[n]["measured"]]
        return f"{max(map(float, numbers)):.0e}" if numbers else "none"

    checked = [one for one in row["findings"] if one["agrees"] is not None]
    wrong = [one["check"] for one in checked if not one["agrees"]]
    setup = [row["device"], row["dtype"], row["mode"], f"tp {row['tp']}", row["version"]]
    return [
        row["model"],
        row["architecture"],
        ", ".join(setup),
        *(
            f"{worst(f'read {point} = transformers')}, "
            f"{worst(f'read {point} but for its largest channels')}"
            for point in ALL_POINTS
        ),
        worst(*(name for name in found if name.startswith("write "))),
        worst("logprobs = transformers"),
        f"{len(checked) - len(wrong)} of {len(checked)}"
        + (f"; not {', '.join(wrong)}" * bool(wrong)),
        row["by"].replace("|", "/"),
    ]
