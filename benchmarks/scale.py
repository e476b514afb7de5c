# SPDX-License-Identifier: Apache-2.0
"""Makes docs/scale.md, which says what many GPUs move: `python -m benchmarks.scale`.

The words are those of `scale.in.md`; `{{bytes}}`, `{{rates}}`, `{{billion}}` and `{{limits}}` there
are tables of what `docs/measurements` has of one H200 and of sizes of models. Nothing of it was run
on more than one host, and the page says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import MEASUREMENTS, ROOT, load
from benchmarks.show import Json

PAGE = ROOT / "docs" / "scale.md"
TEMPLATE = Path(__file__).with_name("scale.in.md")

GPUS_OF_HOST = 8
NETWORK = 50.0
"""GB/s of a host's network: 400 Gb/s, an assumption and no measurement."""


@dataclass(frozen=True)
class Model:
    """A dense model in bfloat16, and on how many GPUs one engine has it."""

    name: str
    billions: float
    hidden: int
    layers: int
    gpus: int


MODELS = (
    Model("8B", 8.0, 4096, 32, 1),
    Model("70B", 70.6, 8192, 80, 8),
    Model("405B", 405.9, 16384, 126, 8),
)
MEASURED = MODELS[0]
"""The one whose rates were measured; the others' are in proportion to their parameters."""


def asked(model: Model) -> dict[str, float]:
    """Bytes a token of what a request may ask for at `post_block` of all layers, but for "4"."""
    return {
        "rows of 4 layers": 2 * model.hidden * 4,
        "rows of all layers": 2 * model.hidden * model.layers,
        "scores of 8 directions, all layers": 4 * 8 * model.layers,
        "lens of all layers, 10 tokens": 80 * model.layers,
        "last prompt row of all layers, prompts of 1,024": 2 * model.hidden * model.layers / 1024,
        "mean of the prompt, all layers, prompts of 1,024": 4 * model.hidden * model.layers / 1024,
    }


@dataclass(frozen=True)
class Measured:
    """What one H200 did, from `docs/measurements`."""

    prompt_rate: float
    """Prompt tokens a second, plain."""
    decode_rate: float
    """Generated tokens a second of 256 requests, plain."""
    landed: float
    """The most GB/s of rows that one engine brought to host memory."""
    copy: float
    """GB/s of the link to pinned host memory."""
    disk: float
    """GB/s of the disk that the file consumer was measured on, alone."""

    @staticmethod
    def of(runs: Mapping[str, Json]) -> Measured:
        """Read it from runs by file name."""
        peers, prefill = runs["h200-extraction.json"]["rows"], runs["h200-prefill.json"]["rows"]
        large = {"requests": 64, "prompt": 1024}
        [plain] = [r for r in peers if r["case"] == "plain vLLM" and r["at"] == large]
        rows = [r["facts"]["rows GB/s"] for r in peers if r["case"] == "ours, all layers, inline"]
        disk = [r["facts"]["rows GB/s"] for r in peers if r["case"] == "disk alone"]
        [copy] = [r for r in prefill if r["case"] == "copy to pinned memory"]
        steps = runs["h200-tpot-processes.json"]["rows"]
        [step] = [
            r
            for r in steps
            if (r["case"], r["at"], r["quantity"]) == ("stock", {"batch": 256}, "TPOT")
        ]
        decode_rate = 256 / step["median"] * 1e3
        return Measured(plain["median"], decode_rate, max(rows), copy["median"], max(disk))

    def rate(self, model: Model) -> float:
        """Prompt tokens a second of one GPU."""
        return self.prompt_rate * MEASURED.billions / model.billions


def size(number: float) -> str:
    """A number of bytes, in three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} PB"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bytes_table() -> str:
    """Bytes a token, by model."""
    names = list(asked(MEASURED))
    rows = [[name, *(size(asked(m)[name]) for m in MODELS)] for name in names]
    return table(["of each prompt token", *(m.name for m in MODELS)], rows)


def rates_table(measured: Measured) -> str:
    """Bytes a second if every prompt token is captured, by model and number of GPUs."""
    rows = []
    for model in MODELS:
        for name in ("rows of 4 layers", "rows of all layers"):
            of_gpu = measured.rate(model) * asked(model)[name]
            totals = [size(of_gpu * gpus) + "/s" for gpus in (8, 64, 512)]
            day = size(of_gpu * 512 * 86400)
            rows.append(
                [model.name, name, size(of_gpu * model.gpus) + "/s", *totals, day + " a day"]
            )
    return table(["model", "captured", "one engine", "8 GPUs", "64 GPUs", "512 GPUs", ""], rows)


def limits_table(measured: Measured) -> str:
    """What each model's rows of all layers meet first, on the way from a host."""
    rows = []
    for model in MODELS:
        of_engine = measured.rate(model) * model.gpus * asked(model)["rows of all layers"] / 1e9
        of_host = of_engine * GPUS_OF_HOST / model.gpus
        shares = [
            measured.landed / of_engine,
            measured.copy / of_engine,
            NETWORK / of_host,
            measured.disk / of_host,
        ]
        rows.append([model.name, f"{of_host:.3g} GB/s", *(f"{min(1, s):.1%}" for s in shares)])
    head = [
        "model",
        "a host's rows",
        f"host memory, as one GPU did it ({measured.landed:.1f} GB/s an engine)",
        f"one GPU's link ({measured.copy:.0f} GB/s an engine)",
        f"network ({NETWORK:.0f} GB/s a host, assumed)",
        f"disk as measured ({measured.disk:.1f} GB/s a host)",
    ]
    return table(head, rows)


def billion_table(runs: Mapping[str, Json]) -> str:
    """GPU hours and bytes of a billion prompt tokens of the model that was measured."""
    large = {"requests": 64, "prompt": 1024}
    [every] = [
        row["median"]
        for row in runs["h200-extraction.json"]["rows"]
        if row["case"] == "ours, all layers, inline" and row["at"] == large
    ]
    rates = {row["case"]: row["median"] for row in runs["h200-early-stop.json"]["rows"]}
    row_bytes = 2 * MEASURED.hidden
    small = MEASURED.hidden + 4  # int8, with a float32 for the row
    rows = []
    for name, rate, layers in (
        ("layer 15, and nothing after it is run", rates["stopped"], 1),
        ("layer 15, the whole model", rates["whole"], 1),
        ("all layers", every, MEASURED.layers),
    ):
        sizes = [size(each * layers * 1e9) for each in (row_bytes, small)]
        rows.append([name, f"{rate:,.0f}", f"{1e9 / rate / 3600:.1f}", *sizes])
    head = ["rows of", "tokens a second", "GPU hours", "bytes, bfloat16", "bytes, int8"]
    return table(head, rows)


def render(runs: Mapping[str, Json], template: str) -> str:
    """The page."""
    measured = Measured.of(runs)
    for place, text in (
        ("bytes", bytes_table()),
        ("rates", rates_table(measured)),
        ("limits", limits_table(measured)),
        ("billion", billion_table(runs)),
        ("prompt rate", f"{measured.prompt_rate:,.0f}"),
        ("decode rate", f"{measured.decode_rate:,.0f}"),
    ):
        template = template.replace("{{" + place + "}}", text)
    return template


def main() -> None:
    PAGE.write_text(render(load(MEASUREMENTS), TEMPLATE.read_text()))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
