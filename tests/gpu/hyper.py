# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections on a GPU: tiny random models, stock, then steered and captured, eagerly and in
CUDA graphs. One line a check, exit status 1 on any failure.

    python -m tests.gpu.hyper [--models hy_v4 glm5_next qwen4_exp] [--device cpu]

Needs the fork on sys.path (CONTRIBUTING.md), no model. The references are the models' formulas in
float32 (`tests/gpu/hyper_models`), which say what of each is left out. GLM-5-Next needs TileLang,
Qwen4-Exp CuTe DSL, and both a compiler of CUDA where it runs; HY-V4 alone runs on CPUs too.
One process a model and mode, all at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.conformance.engine import prepare_environment
from tests.gpu.hyper_models import MODELS
from tests.gpu.hyper_models.plain import LAYERS, Change, Plain, Site
from tests.gpu.processes import Processes, all_good
from vllm.config.points import STREAM_POINTS

MODES: dict[str, dict[str, Any]] = {
    "stock eager": {"enforce_eager": True},
    "stock graphs": {"enforce_eager": False},
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False},
}
"""What stock modes start has neither steering nor capture."""
LIMITS = {"cuda": 0.03, "cpu": 1e-4}
"""Most relative L2 error of a row: what bfloat16 may cause, and float32."""

FIRST, LAST = "log-probabilities", "a plain request beside steered ones, in bits"
"""Checks of a mode; in stock ones the first is the last."""


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative L2 error of a row of a lane."""
    got = got.float().reshape(want.shape)
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(9e9).max())


def steerings(plain: Plain) -> dict[str, tuple[dict[str, Any], Site, Change, Change]]:
    """What is asked for, where, what it must do there, and what that must not be."""
    lanes, hidden = plain.lanes, plain.hidden
    generator = torch.Generator().manual_seed(3)
    each = 4.0 * torch.randn(lanes, hidden, generator=generator)
    one = each[0]
    unit, units = one / one.norm(), each / each.norm(dim=-1, keepdim=True)

    def on(lane: int, change: Change) -> Change:
        keep = torch.arange(lanes)[:, None] != lane
        return lambda rows: torch.where(keep, rows, change(rows))

    def along(h: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (h * u).sum(-1, keepdim=True) * u

    found: dict[str, tuple[dict[str, Any], Site, Change, Change]] = {}
    for layer in range(LAYERS):
        for point in STREAM_POINTS:
            given = {"steering_vectors": {point: {layer: one}}}
            found[f"all lanes {point} {layer}"] = (
                given, (point, layer), lambda h: h + one, on(1, lambda h: h + one),
            )  # fmt: skip
    for point in STREAM_POINTS:
        site = (point, 1)
        lane = {"steering_vectors": {point: {1: {"vector": one, "lane": 2}}}}
        found[f"one lane {point}"] = (
            lane, site, on(2, lambda h: h + one), on(1, lambda h: h + one),
        )  # fmt: skip
        found[f"lane by lane {point}"] = (
            {"steering_vectors": {point: {1: each}}}, site, lambda h: h + each,
            lambda h: h + each.flip(0),
        )  # fmt: skip
        pin = {"op": "pin", "point": point, "layers": 1, "direction": each, "value": 20.0}
        found[f"pin lane by lane {point}"] = (
            {"steering": [pin]}, site, lambda h: h - along(h, units) + 20 * units,
            lambda h: h - along(h, units.flip(0)) + 20 * units.flip(0),
        )  # fmt: skip
        op = {"op": "ablate", "point": point, "layers": 1, "direction": one, "strength": 16.0}
        found[f"ablate one lane {point}"] = (
            {"steering": [{**op, "lane": 3}]}, site, on(3, lambda h: h - 16 * along(h, unit)),
            on(0, lambda h: h - 16 * along(h, unit)),
        )  # fmt: skip
    return found


def checks(llm: Any, plain: Plain, stock: bool, limit: float) -> Iterator[tuple[str, Any]]:
    """(name, numbers with "ok") of each check."""
    from tests.conformance import runner
    from tests.conformance.completions import complete, log_probs_of

    prompts = runner.prompts()
    said_all = complete(llm, [(p, {}) for p in prompts])
    errors, moved = [], []
    for done in said_all:
        said, wanted = log_probs_of(done), plain.run(done.token_ids)[1]
        errors.append(worst(said, wanted))
        moved.append(float((said.roll(1, 0) - wanted).norm() / wanted.norm()))
    yield FIRST, within(max(errors), limit, min(moved))
    if stock:
        return

    def read(cases: list[Any]) -> list[Any]:
        capture = {
            "hooks": {p: "all" for p in STREAM_POINTS} | {"final": "all"},
            "positions": "all",
        }
        return complete(llm, cases, log_probs=False, capture=capture)

    alone = read([(p, {}) for p in prompts])
    whole, wrong, step, skew, head = [], [], [], [], []
    for done in alone:
        rows, _ = plain.run(done.token_ids)
        got = {
            s: r.unflatten(1, (plain.lanes, -1))
            for s, r in done.rows.items()
            if s[0] in STREAM_POINTS
        }
        for site, want in rows.items():
            whole.append(worst(got[site], want))
        for layer in range(LAYERS):
            for here, after in (("pre_attn", "post_attn"), ("post_attn", "post_block")):
                want = plain.half(got[here, layer], layer, here)
                step.append(worst(got[after, layer], want))
                skew.append(worst(got[after, layer].roll(1, 1), want))
                wrong.append(worst(got[here, layer], want))
        last = plain.final(got["post_block", LAYERS - 1])
        head.append(worst(done.rows["final", LAYERS - 1], last))
    # What each half block rounds adds up, steered or not; alone each has half of this limit below.
    yield "rows of the whole model", within(max(whole), 2 * limit, min(skew))
    yield "each half block from the captured rows before it", within(max(step), limit, min(wrong))
    yield "head from the captured last rows", within(max(head), limit, min(skew))

    asked = steerings(plain)
    cases = [(prompts[i % 3], given) for i, (given, *_) in enumerate(asked.values())]
    wrote = complete(llm, cases)
    seen = read(cases)
    for (name, (_, site, change, other)), steered, captured in zip(
        asked.items(), wrote, seen, strict=True
    ):
        told = plain.run(steered.token_ids, {site: change})
        others = [plain.run(steered.token_ids, changes) for changes in ({site: other}, {})]
        least = min(apart(twin, told, site) for twin in others)
        error = worst(log_probs_of(steered), told[1])
        by_rows = plain.run(captured.token_ids, {site: change})[0]
        read_error = max(worst(captured.rows[s], r) for s, r in by_rows.items())
        yield f"steered: {name}", within(max(error, read_error), 2 * limit, least, 0.03)

    neighbours = [(prompts[0], {}), *cases[:6]]
    [first, *_] = read([(p, {}) for p, _ in neighbours])
    [beside, other_row, *_] = read(neighbours)
    same = all(torch.equal(first.rows[s], beside.rows[s]) for s in first.rows)
    changed = any(not torch.equal(first.rows[s], other_row.rows[s]) for s in first.rows)
    yield LAST, {"same": same, "ok": same and changed}


Told = tuple[dict[Site, torch.Tensor], torch.Tensor]
"""Rows by site, and log-probabilities."""


def apart(one: Told, two: Told, site: Site) -> float:
    """How far off, by the rows of a site after `site` or in the end, what is told is at most."""
    rows = [worst(one[0][s], two[0][s]) for s in two[0] if s != site]
    return max(*rows, float((one[1] - two[1]).norm() / two[1].norm()))


def within(error: float, limit: float, other: float, least: float = 0.05) -> dict[str, Any]:
    """The numbers of a check: the error, and how far off what must differ is."""
    ok = error <= limit and other >= max(least, 2 * error)
    return {"error": float(f"{error:.2g}"), "limit": limit, "other": round(other, 3), "ok": ok}


def run_mode(name: str, folder: Path, device: str) -> int:
    """In a process of its own: start the engine, and print a line a check.

    Args:
        name: the model's and the mode's.
        folder: of the models.
    """
    which, _, mode = name.partition(": ")
    model, folder = MODELS[which], folder / which
    prepare_environment("v2" if device == "cuda" else "v1", "cuda" if device == "cuda" else "cpu")
    # Their configs turn these graphs on, too late for attention that this process has imported.
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(device == "cuda")))
    from tests.conformance.engine import make_llm, shut_down
    from vllm.config.operations import STREAM_OPERATIONS

    settings: dict[str, Any] = dict(MODES[mode])
    if device == "cuda":
        settings |= {
            "dtype": "bfloat16", "block_size": None, "kv_cache_memory_bytes": 1 << 30,
            "gpu_memory_utilization": 0.05, "max_num_seqs": 32,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 256]},
            **model.engine,
        }  # fmt: skip
    else:
        settings |= {
            "block_size": 16, "compilation_config": {"custom_ops": ["none"]},
            "attention_config": {"backend": "CPU_MLA"},
        }  # fmt: skip
    stock = mode.startswith("stock")
    if not stock:
        settings |= {
            "enable_steering": True, "steering_families": list(STREAM_OPERATIONS),
            "max_steering_ops": 4,
            "max_steering_configs": 40, "capture_consumers": ["inline"],
            "capture_points": [*STREAM_POINTS, "final"],
        }  # fmt: skip
    llm = make_llm(folder, **settings)
    ok = True
    for check, numbers in checks(llm, model(folder), stock, LIMITS[device]):
        print(json.dumps({"mode": name, "check": check, **numbers}), flush=True)
        ok &= numbers["ok"]
    shut_down(llm)
    return 0 if ok else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.hyper", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=["hy_v4"])
    parser.add_argument("--only", nargs="*", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=140, help="seconds for one mode")
    options = parser.parse_args()
    if options.mode:
        return run_mode(options.mode, options.folder, options.device)
    processes = Processes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            (Path(folder) / name).mkdir()
            MODELS[name].save(Path(folder) / name)
        command = [sys.executable, "-m", "tests.gpu.hyper", "--device", options.device]
        command += ["--folder", folder, "--mode"]
        modes = [
            partial(
                processes.checks, [*command, f"{model}: {mode}"], dict(os.environ), options.timeout,
                FIRST if mode.startswith("stock") else LAST,
            )
            for model in options.models
            for mode in options.only
        ]  # fmt: skip
        return 0 if all_good(processes, modes, len(modes)) else 1


if __name__ == "__main__":
    sys.exit(main())
