# SPDX-License-Identifier: Apache-2.0
"""What is refused of requests of vLLM-Lens, with `--compat lens`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import HTTPException

from tests.errors.case import Case, path
from tests.support.plans import HIDDEN, SHAPE, config_of, with_layers
from vllm import SamplingParams
from vllm.config import compat as opening_module
from vllm.config.compat import open_doors
from vllm.entrypoints.serve.steering.lens_routes import hooks
from vllm.v1.interventions.frontend.compat import doors, lens
from vllm.v1.interventions.frontend.compat.peers import ARGS
from vllm.v1.interventions.frontend.compat.wire import MAX_BYTES, decoded, encoded
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.makings import AttentionRule

GOOD = torch.ones(2, HIDDEN)
WIRE = encoded(GOOD)
MOST = 1 << 23
STEER = "x.apply_steering_vectors"


def vectors(**changed: Any) -> Any:
    """A vector that is good but for `changed`; None takes a key away."""
    given = {"activations": GOOD, "layer_indices": [0, 1], **changed}
    entry = {key: value for key, value in given.items() if value is not None}
    return asking(apply_steering_vectors=[entry])


def asking(**args: Any) -> Any:
    return lambda: lens.fields_of(args, "x.", SHAPE, Work(MOST))


def unlike() -> None:
    rule: AttentionRule = {"scale": 0.5, "group": 1}
    shape = SHAPE
    for n in (0, 1):
        shape = with_layers(shape, [n], heads={"q": (4, n + 1), "k": (4, n + 1)}, rule=rule)
    lens.fields_of({"output_qk": True}, "x.", shape, Work(MOST))


def sent(**changed: Any) -> Any:
    return lambda: decoded({**WIRE, **changed}, "p")


def hooks_over_http() -> None:
    try:
        asyncio.run(hooks("register"))
    except HTTPException as error:
        assert error.status_code == 501
        raise ValueError(error.detail) from error


def mixed() -> None:
    config = config_of(compat=["lens"])
    params = SamplingParams(extra_args={"output_residual_stream": [0]}, steering=[])
    doors.read_args(params, config)


def opening(*names: str) -> None:
    open_doors(SimpleNamespace(compat=[*names]))  # type: ignore[arg-type]


def without_zstandard() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            opening_module, "find_spec", lambda name: importlib.util.find_spec("no_" + name)
        )
        opening("lens")


AT = f"{STEER}[0]"
LENS = [
    Case(path(STEER), do=asking(apply_steering_vectors="[")),
    Case(path(STEER, "dict"), do=asking(apply_steering_vectors=json.dumps({}))),
    Case(path(AT, "1"), do=asking(apply_steering_vectors=[1])),
    Case(path(AT, "['hook']"), do=vectors(hook=1)),
    Case(path(AT, "'activations'"), do=vectors(activations=None)),
    Case(path(f"{AT}.activations", "list"), do=vectors(activations=[[1.0] * HIDDEN] * 2)),
    Case(path(f"{AT}.activations", "torch.int64"), do=vectors(activations=GOOD.long())),
    Case(path(f"{AT}.activations", "matrix"), do=vectors(activations=np.matrix(GOOD.numpy()))),
    Case(
        path(f"{AT}.activations", "0", "torch.float32"),
        do=vectors(activations=GOOD[:0], layer_indices=[]),
    ),
    Case(path("x.output_residual_stream[0]", "-1"), do=asking(output_residual_stream=[-1])),
    Case(
        path(
            "x.output_qk",
            "0",
            reason="it has no keys of its own, or q, k and z are not all among capture_points",
        ),
        do=asking(output_qk=[0]),
    ),
    Case(path("x.output_qk"), do=unlike),
    Case(path(f"{AT}.layer_indices", "1 entries", "2"), do=vectors(layer_indices=[0])),
    Case(
        path(f"{AT}.position_indices"),
        do=vectors(activations=GOOD[None].expand(2, 2, -1), position_indices=[0, -1]),
    ),
    Case(path(f"{AT}.position_indices"), do=vectors(position_indices=[0, 1])),
    Case(
        path(f"{AT}.activations", allowed=str(MOST)),
        do=vectors(activations=GOOD[:, None].expand(2, MOST, HIDDEN)),
    ),
    Case(path("p.original_dtype"), do=sent(original_dtype="torch.int8")),
    Case(path("p.dtype", "'int8'", "float32", dtype="float32"), do=sent(dtype="int8")),
    Case(path("p.shape"), do=sent(shape=[1, 1, 1, 1])),
    Case(path("p.shape", "80000000000", str(MAX_BYTES)), do=sent(shape=[200000, 100000])),
    Case(path("p.data", allowed="32"), do=sent(data="A" * 9000)),
    Case(path("p.compression", "'gzip'"), do=sent(compression="gzip")),
    Case(path("p.data"), do=sent(data="AAAA")),
    Case(path("steering", "extra_args.output_residual_stream"), do=mixed),
    Case(
        {"given": "['len']", "allowed": "['lens', 'easysteer', 'hotwire', 'interp-engine']"},
        do=lambda: opening("len"),
    ),
    Case({}, do=without_zstandard),
    Case(
        path("/v1/hooks", allowed=ARGS["apply_hooks"].ours, anchor="vllm-lens"), do=hooks_over_http
    ),
]
