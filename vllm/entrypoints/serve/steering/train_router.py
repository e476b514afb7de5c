# SPDX-License-Identifier: Apache-2.0
"""Serves `/v1/steering/train`: one training at a time, of pairs that a client sends; off unless
`--steering-train` is given. See docs/http.md."""

import argparse
import re
from http import HTTPStatus
from typing import Any, cast

from fastapi import APIRouter, HTTPException, Request

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.given import Given

from .access import SteeringAccess
from .protocol import read_body
from .train_job import TrainJob

router = APIRouter(prefix="/v1/steering/train", tags=["steering"])

FIELDS = ("pairs", "method", "layers", "epochs", "seed")
METHODS = ("gradient", "bipo")
"""Methods of `vllm steering train` that learn in transformers, and leave a vector."""
MAX_BYTES = 4 << 20
"""The largest body."""
MAX_PAIRS = 1024
MIN_PAIRS = 5
"""Fewer cannot be cut into what is learned from, what ends it and what tests it."""
MAX_LETTERS = 2000
"""Letters of a text of a pair, at most."""
MAX_LAYERS = 8
MAX_EPOCHS = 100
MAX_SEED = (1 << 31) - 1
PAIR = ("prompt", "positive", "negative")
"""The keys of a pair."""
_TEXT = re.compile(f".{{1,{MAX_LETTERS}}}", re.DOTALL)


def need_training(args: argparse.Namespace) -> None:
    """Raise ValueError where `--steering-train` could not hold one training for the server."""
    if not args.steering_train:
        return
    if not args.enable_steering:
        raise ValueError(
            "steering_train: what is trained steers; start the server with --enable-steering"
        )
    if (args.api_server_count or 1) > 1:
        raise ValueError(
            "steering_train: needs one API server process, so that one training runs at a time; "
            "leave out --api-server-count"
        )


def _may_train(request: Request) -> None:
    cast(SteeringAccess, request.app.state.steering_access).need(request)
    if not request.app.state.args.steering_train:
        reject("train", "is off on this server; start it with --steering-train")


def _job(request: Request) -> TrainJob | None:
    return cast("TrainJob | None", request.app.state.train_job)


@router.get("")
async def state(request: Request) -> dict[str, Any]:
    """Return the last training, or that there was none; its texts are its client's, so it takes a
    key."""
    _may_train(request)
    job = _job(request)
    return {"state": "none"} if job is None else job.told()


@router.post("")
async def start(request: Request) -> dict[str, Any]:
    """Start a training of pairs; a 409 where one runs."""
    _may_train(request)
    body = await read_body(request, FIELDS, MAX_BYTES)
    config = cast(AsyncLLM, request.app.state.engine_client).vllm_config
    shape = config.tap_shape
    pairs, options = training_of(body, len(shape.layers) if shape is not None else 0)
    job = _job(request)
    if job is not None and job.state == "running":
        raise HTTPException(
            HTTPStatus.CONFLICT.value,
            detail="train: one runs already; wait for it, or end it with DELETE /v1/steering/train",
        )
    job = request.app.state.train_job = TrainJob(config.model_config.model, pairs, options)
    return {"state": job.state}


@router.delete("")
async def cancel(request: Request) -> dict[str, Any]:
    """End the training that runs, and forget the last one."""
    _may_train(request)
    job, request.app.state.train_job = _job(request), None
    if job is not None:
        await job.cancel()
    return {"state": "none" if job is None else job.state}


def training_of(body: dict[str, Any], num_layers: int) -> tuple[list[dict[str, str]], list[str]]:
    """Return the pairs of a body, and the options of `vllm steering train`.

    Raises:
        ValueError: a field is missing, or of another form or size; the message names it.
    """
    given = Given(body, "").need("pairs", "layers")
    size = f"must be a list of {MIN_PAIRS} to {MAX_PAIRS} pairs of texts, got {{given}}"
    pairs = [_pair(pair) for pair in given["pairs"].entries(size, MIN_PAIRS, MAX_PAIRS)]
    size = f"must be a list of 1 to {MAX_LAYERS} layers to learn at, got {{given}}"
    layer = f"must be a layer, 0 to {num_layers - 1}, got {{given}}"
    layers = [
        one.int(0, num_layers - 1, layer) for one in given["layers"].entries(size, 1, MAX_LAYERS)
    ]
    options = {
        "method": given.get("method", METHODS[0]).choice(
            METHODS, f"must be a method, {', '.join(METHODS)}, got {{given}}"
        ),
        "layers": ",".join(map(str, layers)),
        "epochs": given.get("epochs", 40).int(
            1, MAX_EPOCHS, f"must be an int from 1 to {MAX_EPOCHS}, got {{given}}"
        ),
        "seed": given.get("seed", 0).int(0, MAX_SEED, "must be an int, 0 or more, got {given}"),
    }
    return pairs, [f"--{name}={value}" for name, value in options.items()]


def _pair(given: Given) -> dict[str, str]:
    """A pair of a body: a prompt, what is wanted after it, and what is not."""
    message = f"must be a text of 1 to {MAX_LETTERS} letters"
    pair = given.fields(needed=PAIR)
    return {key: pair[key].text(message, _TEXT) for key in PAIR}
