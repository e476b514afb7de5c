# SPDX-License-Identifier: Apache-2.0
"""A program of interp-engine's, run with its package and without ours:

    python interp_engine_program.py formulas OUT.json
    python interp_engine_program.py model FOLDER ASKED.pt OUT.pt

`formulas` writes what it makes of small rows: each operation as its `asdict` and as its server
takes it, and the rows after it. `python -m tests.peers.test_interp_engine` keeps that in
`tests/peers/interp_engine.json`. `model` captures and steers a model with its eager backend.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from interp_engine import (
    AblateSpec,
    AddSpec,
    EagerModel,
    LayerSteeringSpec,
    NormScaledAddSpec,
    OrthogonalDecompSpec,
    ProjectionCapSpec,
    SteeringSpec,
    SwapSpec,
    capture,
    steer,
    steer_delta,
    steering_spec_to_eager_specs,
)
from interp_engine.server.app import GenerateRequest, encode_tensor

LAYER = 1
METHODS = {
    "AddSpec": "additive",
    "AblateSpec": "ablate",
    "OrthogonalDecompSpec": "orthogonal",
    "ProjectionCapSpec": "projection_cap",
    "NormScaledAddSpec": "norm_scaled_add",
    "SwapSpec": "swap",
}
"""Class -> what its server calls it."""


def operations(v: torch.Tensor, w: torch.Tensor) -> dict[str, list[Any]]:
    """Return operations of each kind, by a name."""
    return {
        "add": [AddSpec(v, 0.7)],
        "add, normalized": [AddSpec(v, -3.0, normalize=True)],
        "ablate": [AblateSpec(v)],
        "orthogonal": [OrthogonalDecompSpec(v, 0.25)],
        "orthogonal, reversed": [OrthogonalDecompSpec(v, -1.5)],
        "cap": [ProjectionCapSpec(v, min=-0.2, max=0.1)],
        "cap from above": [ProjectionCapSpec(v, max=-0.4)],
        "norm-scaled": [NormScaledAddSpec(v, 0.02)],
        "norm-scaled, capped": [NormScaledAddSpec(v, 5.0, max_fraction=0.3)],
        "norm-scaled, negative": [NormScaledAddSpec(v, -5.0, max_fraction=2.0)],
        "norm-scaled, normalized": [NormScaledAddSpec(v, 0.4, normalize=True)],
        "swap": [SwapSpec(v, w)],
        "in order": [AddSpec(v, 0.7), AblateSpec(v), SwapSpec(w, v), AddSpec(w, 0.1)],
    }


def spec_of(ops: list[Any], point: str = "resid_post") -> SteeringSpec:
    """Return the specification of operations at `LAYER`."""
    return SteeringSpec({LAYER: LayerSteeringSpec(ops)}, point)


def as_sent(ops: list[Any], packed: bool) -> list[Any]:
    """Return what a client of its server sends, once its server has taken it."""
    listed = []
    for op in ops:
        said = {key: value for key, value in vars(op).items() if value is not None}
        for key in ("vector", "target"):
            if key in said:
                vector = said[key]
                said[key] = encode_tensor(vector).model_dump() if packed else vector.tolist()
        listed.append({"method": METHODS[type(op).__name__], **said})
    wire = [{"layers": {str(LAYER): listed}}]
    taken = GenerateRequest.model_validate({"prompt_token_ids": [1], "steering": wire})
    made: list[Any] = taken.model_dump(mode="json")["steering"]
    return made


def formulas(out: str) -> None:
    """Write small rows before and after each of `operations`."""
    torch.manual_seed(0)
    rows, v, w = torch.randn(5, 8), 3 * torch.randn(8), 2 * torch.randn(8)
    cases = {}
    for name, ops in operations(v, w).items():
        changed = rows.clone()
        for spec in steering_spec_to_eager_specs(spec_of(ops)):
            changed = changed + steer_delta(spec, changed, spec.vector)
        cases[name] = {
            "spec": dataclasses.asdict(spec_of(ops)),
            "sent": as_sent(ops, packed=False),
            "packed": as_sent(ops, packed=True),
            "rows": changed,
        }
    made = {"rows": rows, **cases}
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, default=lambda tensor: tensor.tolist())}"
        for name, value in made.items()
    ]
    Path(out).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def model(folder: str, asked: str, out: str) -> None:
    """Write what a model has at the points that are asked for, plain and under operations."""
    want = torch.load(asked, weights_only=True)
    eager = EagerModel(folder, device="cpu", dtype="float32")
    made: dict[str, Any] = {}

    def captured() -> dict[str, torch.Tensor]:
        cache = capture(eager, want["ids"], want["points"])
        return {point: cache[point][0].clone() for point in want["points"]}

    made["plain"] = captured()
    v, w = want["v"], want["w"]
    specs = {name: spec_of(ops) for name, ops in operations(v, w).items()}
    specs |= {f"add at {p}": spec_of([AddSpec(x, 1.0)], p) for p, x in want["added"].items()}
    made["specs"] = {}
    for name, spec in specs.items():
        with steer(eager, spec):
            made[name] = captured()
        made["specs"][name] = dataclasses.asdict(spec)
    torch.save(made, out)


if __name__ == "__main__":
    if sys.argv[1] == "formulas":
        formulas(sys.argv[2])
    else:
        model(*sys.argv[2:])
