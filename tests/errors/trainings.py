# SPDX-License-Identifier: Apache-2.0
"""What is refused of a training over HTTP."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException

from tests.errors.case import Case, path
from tests.errors.http import Sent
from vllm.entrypoints.serve.steering.access import SteeringAccess
from vllm.entrypoints.serve.steering.train_router import need_training, start, training_of

PAIR = {"prompt": "a", "positive": "b", "negative": "c"}


def asked(**changed: Any) -> Any:
    body = {"pairs": [PAIR] * 5, "layers": [1], **changed}
    return lambda: training_of(body, 4)


def started(on: bool, state: str = "running") -> Any:
    """A training asked for by somebody who may, where another is in a state."""
    body = {"pairs": [PAIR] * 5, "layers": [1]}
    request: Any = Sent(json.dumps(body).encode(), {"X-Steering-Key": "k"})
    config = SimpleNamespace(tap_shape=SimpleNamespace(layers=dict.fromkeys(range(4))))
    request.app.state.engine_client.vllm_config = config
    request.app.state.steering_access = SteeringAccess(["k"], bearer=False)
    request.app.state.args = SimpleNamespace(steering_train=on)
    request.app.state.train_job = SimpleNamespace(state=state)

    def begin() -> Any:
        try:
            return asyncio.run(start(request))
        except HTTPException as error:
            raise ValueError(error.detail) from error

    return begin


def served(**args: Any) -> Any:
    given: Any = SimpleNamespace(
        **{"steering_train": True, "enable_steering": True, "api_server_count": None, **args}
    )
    return lambda: need_training(given)


TRAININGS = [
    Case(path("pairs", "4", "5 to 1024"), do=asked(pairs=[PAIR] * 4)),
    Case(path("layers", "0", "1 to 8"), do=asked(layers=[])),
    Case(path("layers[0]", "4", "3"), do=asked(layers=[4])),
    Case(
        path("pairs[1].negative", allowed="2000"),
        do=asked(pairs=[PAIR, {**PAIR, "negative": ""}, *[PAIR] * 4]),
    ),
    Case(path("method", "'reft'", "gradient, bipo"), do=asked(method="reft")),
    Case(path("epochs", "101", "1 to 100"), do=asked(epochs=101)),
    Case(path("seed", "-1"), do=asked(seed=-1)),
    Case({}, do=started(on=False)),
    Case({}, do=started(on=True)),
    Case({}, do=served(enable_steering=False)),
    Case({}, do=served(api_server_count=2)),
]
