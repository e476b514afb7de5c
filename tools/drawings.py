# SPDX-License-Identifier: Apache-2.0
"""The drawings of docs/design.md and docs/hook-contract.md: `python -m tools.drawings`.

A test finds every drawn name in the code (tests/docs/test_drawings.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.pins import ROOT
from tools.svg import OURS, Drawing, Name

FOLDER = ROOT / "docs" / "drawings"

FRONTEND, SCHEDULER, WORKER = f"{OURS}/frontend", f"{OURS}/scheduler", f"{OURS}/worker"
TRANSPORT = "vllm/v1/capture/transport"
TAPS = "vllm/model_executor/layers/residual_taps.py"


def block() -> Drawing:
    """A decoder block, its three points, and what its MLP reads."""
    d = Drawing("A decoder block and its points", 900, 300)
    stream, branch = 168, 62
    d.text(20, stream - 12, "x[l]")
    d.arrow((20, stream), (880, stream), kind="stream")
    d.text(880, stream - 12, "x[l+1]", "", "end")
    for start, norm, mixer, end, words in (
        (130, 160, 250, 400, "attention"),
        (480, 510, 600, 750, "MLP"),
    ):
        d.arrow((start, stream), (start, branch + 18), (norm, branch + 18))
        d.shape(norm, branch, 70, 36, "norm")
        d.arrow((norm + 70, branch + 18), (mixer, branch + 18))
        d.shape(mixer, branch, 110, 36, words)
        d.arrow((mixer + 110, branch + 18), (end, branch + 18), (end, stream - 11))
        d.plus(end, stream)
    for x, symbol, *notes in (
        (90, "pre_attn", "what the block reads:", "attention and all that follows"),
        (440, "post_attn", "attention has been added:", "the MLP and all that follows"),
        (790, "post_block", "what the next block reads,", "or the final norm"),
    ):
        d.point(x, stream)
        d.name(x, stream + 34, Name(TAPS, f"BoundTaps.{symbol}", symbol), "middle")
        for i, note in enumerate(notes):
            d.text(x if x > 100 else 110, stream + 52 + 15 * i, note, "note", "middle")
    d.point(590, branch + 18)
    d.name(590, branch - 10, Name(TAPS, "BoundTaps.mlp_in", "mlp_in"), "middle")
    d.text(20, 26, "The residual stream of decoder layer l", "title")
    d.sentence(
        20, 280, "At each point the stream is steered (", Name(TAPS, "SiteTap.steer"),
        ") and then read (", Name(TAPS, "SiteTap.read"),
        "): a captured row is what the rest of the model sees.",
    )  # fmt: skip
    return d


def processes() -> Drawing:
    """A request through the three processes."""
    d = Drawing("A request through three processes", 960, 656)
    d.lane(12, 12, 288, 632, "Frontend: checks", FRONTEND)
    d.lane(336, 12, 288, 632, "Engine core: decides", SCHEDULER)
    d.lane(660, 12, 288, 632, "Worker: copies", WORKER)
    left, middle, right, wide = 28, 352, 676, 256

    params = d.box(
        left, 66, wide, Name("vllm/sampling_params.py", "SamplingParams"), "what the user asks"
    )
    d.arrow((left + 128, params), (left + 128, 146))
    resolved = d.box(
        left, 146, wide, Name(f"{FRONTEND}/request/resolve.py", "resolve"),
        "names, layers, positions, vectors;", "every user error is raised here",
    )  # fmt: skip
    d.arrow((left + 128, resolved), (left + 128, 241))
    planned = d.box(
        left, 241, wide, Name(f"{OURS}/plan.py", "Plan"),
        "which vectors and operations act where,", "which rows are captured for whom",
        kind="message",
    )  # fmt: skip
    d.text(left + 10, planned + 20, "travels once, with the request, as", "note")
    d.name(left + 10, planned + 36, Name("vllm/v1/engine/__init__.py", "EngineCoreRequest.plan"))

    decides = d.box(
        middle, 66, wide, Name(f"{SCHEDULER}/decisions.py", "SchedulerInterventions"),
        "a request starts when all that it", "will ever need is free",
    )  # fmt: skip
    d.arrow((left + wide, 277), (318, 277), (318, 102), (middle, 102))
    d.arrow((middle + 128, decides), (middle + 128, 152))
    d.text(middle + 136, 148, "asks", "note")
    pools = 152.0
    for file, symbol, note in (
        ("tables.py", "Tables", "rows of the workers' tables"),
        ("pools.py", "Pool", "what lies in the rows of one of them"),
        ("row_budget.py", "RowBudget", "captured rows that fit into a step"),
        ("identity.py", "BlockIdentity", "keys of blocks in the prefix cache"),
    ):
        pools = d.box(middle, pools, wide, Name(f"{SCHEDULER}/{file}", symbol), note) + 8
    d.arrow((middle + 128, pools - 8), (middle + 128, pools + 8))
    pools += 8
    d.box(
        middle, pools, wide, Name(f"{OURS}/messages.py", "StepInterventions"),
        "what a step changes and captures", kind="message",
    )  # fmt: skip

    takes = d.box(
        right, 66, wide, Name(f"{WORKER}/runner.py", "WorkerInterventions"),
        "all that a model runner calls; each", "thing it is told was checked before",
    )  # fmt: skip
    d.arrow((middle + wide, pools + 28), (642, pools + 28), (642, 102), (right, 102))
    d.arrow((right + 128, takes), (right + 128, 160))
    table = d.box(
        right, 160, wide, Name(f"{WORKER}/tables/sums.py", "SteeringTable"),
        "sums of vectors, one row a slot and phase",
    )  # fmt: skip
    terms = d.box(
        right, table + 8, wide, Name(f"{WORKER}/tables/terms.py", "TermTable"),
        "operations, if the engine has them",
    )  # fmt: skip
    mapped = d.box(
        right, terms + 8, wide, Name(f"{WORKER}/token_map.py", "TokenMap"),
        "which of these rows each token gets,", "from its position, on the device",
    )  # fmt: skip
    d.arrow((right + 128, mapped), (right + 128, mapped + 24))
    tap = d.box(
        right, mapped + 24, wide, Name(TAPS, "SiteTap"),
        "in each decoder layer: steers the stream,", "copies the wanted rows",
    )  # fmt: skip

    back = 572
    d.arrow((right + 128, tap), (right + 128, back))
    d.box(
        right, back, wide, Name(f"{OURS}/step_rows.py", "StepRows"), "the rows of the step",
        kind="message",
    )  # fmt: skip
    d.arrow((right, back + 28), (middle + wide, back + 28))
    d.box(
        middle, back, wide, Name(f"{SCHEDULER}/relay.py", "RowRelay"),
        "each accepted row once",
    )  # fmt: skip
    d.arrow((middle, back + 28), (left + wide, back + 28))
    d.box(
        left, back, wide, Name("vllm/v1/capture/results.py", "CaptureResult"),
        "what the user gets back", kind="message",
    )  # fmt: skip
    d.text(left + 10, back - 30, "Rows go back from the right to the left:", "note")
    d.text(left + 10, back - 14, "the next drawing says how.", "note")
    return d


def rows() -> Drawing:
    """The way of a captured row, from the layer to the user and to consumers."""
    d = Drawing("A captured row's way back", 1008, 620)
    wide, x = 225, (24, 269, 514, 759)
    centre = wide / 2
    d.lane(12, 12, 984, 142, "Worker", WORKER)
    d.lane(12, 170, 984, 216, "Engine core", SCHEDULER)
    d.lane(12, 402, 984, 206, "Frontend", FRONTEND)

    y = 72
    d.box(x[0], y, wide, Name(TAPS, "SiteTap.read"), "copies wanted rows of its site")
    d.box(x[1], y, wide, Name(TAPS, "SiteTap.arena"), "one buffer, all sites, one step")
    d.box(
        x[2], y, wide, Name(f"{WORKER}/rows/outbox.py", "Outbox"), "to the landing, beside a step"
    )
    d.box(
        x[3], y, wide, Name(f"{OURS}/step_rows.py", "StepRows"), "waits for the copy when read",
        kind="message",
    )  # fmt: skip
    for start in x[:3]:
        d.arrow((start + wide, y + 28), (start + wide + 20, y + 28))

    y = 224
    d.arrow((x[3] + 160, 129), (x[3] + 160, y))
    accept = Name(f"{SCHEDULER}/relay.py", "RowRelay.accept")
    d.box(x[3], y, wide, accept, "once each; drops rejected drafts")
    d.arrow((x[3], y + 28), (x[2] + wide, y + 28))
    join = Name(f"{SCHEDULER}/relay.py", "RowRelay.join")
    d.box(x[2], y, wide, join, "all rows of a step at once, uncut,", "ahead of its outputs")
    d.arrow((x[2] + centre, y + 72), (x[2] + centre, y + 88))
    encoder = Name(f"{TRANSPORT}/landing.py", "RowEncoder")
    d.box(x[2], y + 88, wide, encoder, "sends where they lie")
    d.arrow((x[3] + 60, y), (x[3] + 60, y - 18), (x[1] + centre, y - 18), (x[1] + centre, y))
    sessions = Name(f"{SCHEDULER}/consumers.py", "CaptureSessions")
    d.box(x[1], y, wide, sessions, "rows for consumers that run here")
    d.arrow((x[1], y + 28), (x[0] + wide, y + 28))
    d.box(x[0], y, wide, Name(f"{TRANSPORT}/feed.py", "Feed"), "what one consumer selected")
    d.arrow((x[0] + centre, y + 57), (x[0] + centre, y + 80))
    d.box(
        x[0], y + 80, wide, Name(f"{TRANSPORT}/host.py", "ConsumerHost"), "calls it in its threads"
    )

    y = 458
    outputs = Name(f"{FRONTEND}/results/outputs.py", "CaptureOutputs")
    d.box(x[3], y, wide, outputs, "all captures of this frontend")
    d.arrow((x[2] + centre, 369), (x[2] + centre, 384), (x[3] + 60, 384), (x[3] + 60, y))
    captured = Name("vllm/v1/engine/__init__.py", "EngineCoreOutput.captured")
    d.name(x[3] + 52, 440, captured, "end")
    d.box(
        x[2], y, wide, Name(f"{FRONTEND}/results/inbox.py", "RowInbox"), "for each of its requests"
    )
    collector = Name(f"{FRONTEND}/results/collector.py", "RowCollector")
    d.box(x[1], y, wide, collector, "of one completion; trims its end")
    d.box(
        x[0], y, wide, Name("vllm/v1/capture/results.py", "CaptureResult"), "what the user gets",
        kind="message",
    )  # fmt: skip
    for start in x[:3]:
        d.arrow((start + wide + 20, y + 28), (start + wide, y + 28))
    d.arrow((x[0] + 205, 361), (x[0] + 205, y))
    results = Name("vllm/v1/engine/__init__.py", "EngineCoreOutput.capture_results")
    d.name(x[0] + 213, 440, results)

    y = 538
    d.arrow((x[3] + centre, 515), (x[3] + centre, y + 28), (x[2] + wide, y + 28))
    d.box(x[2], y, wide, Name(f"{TRANSPORT}/feed.py", "Feed"), "for consumers that run here")
    d.arrow((x[2], y + 28), (x[1] + wide, y + 28))
    d.box(x[1], y, wide, Name(f"{TRANSPORT}/host.py", "ConsumerHost"), "calls it in its threads")
    d.arrow((x[1], y + 28), (x[0] + centre, y + 28), (x[0] + centre, 515))
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "block": block,
    "processes": processes,
    "row-way-back": rows,
}
"""The name of the file in docs/drawings, without its end, and what draws it."""


def main(folder: Path = FOLDER) -> int:
    """Exit status 0."""
    for name, draw in DRAWINGS.items():
        path = folder / f"{name}.svg"
        path.write_text(draw().svg())
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
