# SPDX-License-Identifier: Apache-2.0
"""What is refused of specifications of EasySteer, with `--compat easysteer`."""

from __future__ import annotations

from typing import Any

from tests.errors.case import Case, path
from tests.support.plans import VECTOR, config_of
from vllm.v1.interventions.frontend.compat import doors
from vllm.v1.interventions.frontend.compat.easysteer import MAX_VECTORS, fields_of

GOOD = {"data": VECTOR, "layers": [1]}
V0, V1 = "s.vectors[0]", "s.vectors[1]"
APPLY = f"{V0}.apply"


def spec(*vectors: Any, **more: Any) -> Any:
    return lambda: fields_of({"vectors": list(vectors), **more}, "s")


def one(**more: Any) -> Any:
    """A vector that is good but for `more`."""
    return spec({**GOOD, **more})


def applied(**apply: Any) -> Any:
    return one(apply=apply)


def mixed() -> None:
    asked = {"steering": {"vectors": [GOOD]}, "steering_vectors": {}}
    doors.read_fields(asked, config_of(compat=["easysteer"]))


EASYSTEER = [
    Case(path("s.vectors", allowed=str(MAX_VECTORS)), do=spec()),
    Case(path("s", "'x'"), do=lambda: fields_of("x", "s")),
    Case(path(V0, "1"), do=spec(1)),
    Case(path(V0, "['mask']"), do=one(mask=1)),
    Case(path("s.vectors"), do=spec(GOOD, {**GOOD, "normalize": True}, conflict="sequential")),
    Case(path("s.conflict", "None"), do=spec(GOOD, GOOD)),
    Case(
        path("s.conflict", "priority"),
        do=spec(GOOD, {**GOOD, "layers": [0]}, conflict="priority"),
    ),
    Case(
        path("s.conflict"),
        do=spec({**GOOD, "apply": {"exclude_prompt_positions": [0]}}, GOOD, conflict="priority"),
    ),
    Case(path("s.conflict"), do=spec(GOOD, GOOD, conflict="error")),
    Case(
        path(f"{APPLY}.prompt", "'all'", phase="prompt"),
        do=applied(prompt="all", prompt_positions=[1]),
    ),
    Case(path(f"{APPLY}.prompt", "'first'"), do=applied(prompt="first")),
    Case(path(APPLY), do=applied(prompt="none", generation="none")),
    Case(path(f"{APPLY}.prompt_positions", "'x'"), do=applied(prompt_positions="x")),
    Case(path(f"{APPLY}.prompt_window", "list"), do=applied(prompt_window=[1])),
    Case(path(f"{APPLY}.generation_tokens"), do=applied(generation_tokens=[1])),
    Case(path(f"{V0}.source", "'/a/b.pt'"), do=spec({"source": "/a/b.pt"})),
    Case(
        path(f"{V0}.source"),
        do=spec({"source": "happy", "apply": {"prompt": "none"}}),
    ),
    Case(path(f"{V0}.source", "['layers']"), do=spec({"source": "happy", "layers": [1]})),
    Case(path(f"{V0}.algorithm", "'loreft'", "direct, erase, replace"), do=one(algorithm="loreft")),
    Case(path(f"{V0}.params", "direct"), do=one(params={"mask": 1})),
    Case(path(f"{V0}.scale", "erase"), do=one(algorithm="erase", scale=2.0)),
    Case(path(f"{V0}.data"), do=one(data=None)),
    Case(path(f"{V0}.layers"), do=one(layers=None)),
    Case(path(f"{V0}.layers"), do=one(data={0: VECTOR})),
    Case(path(f"{V0}.layers", "'x'"), do=one(layers=["x"])),
    Case(path("steering_vectors", "steering"), do=mixed),
]
