# SPDX-License-Identifier: Apache-2.0
"""Malformed bodies for a server in this process: every one must be refused, naming its field.

    python -m tests.http.fuzz 20000 [--seed 0] [--device cuda]

A body is well formed but for one thing that is wrong wherever it stands, so that each check is
reached, the deepest too.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.conformance.engine import prepare_environment
from tests.http.server import CUDA_OPTIONS, KEY, OPTIONS, greedy, save_model

PROMPT = "Today I went"
HIDDEN = 96
Key = str | int

CLIENT_MESSAGE = 2000
"""Most characters of an answer: what a client sent must not come back whole."""


def deep(levels: int) -> Any:
    made: Any = 0
    for _ in range(levels):
        made = [made]
    return made


JUNK: list[Callable[[random.Random], Any]] = [
    lambda rng: float("nan"),
    lambda rng: rng.choice([1, -1]) * float("inf"),
    lambda rng: 10**400,
    lambda rng: -(10 ** rng.randint(40, 400)),
    lambda rng: "nonsense \u00df\u0000" * rng.choice([1, 1, 1000]),
    lambda rng: rng.choice(["../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "..\\x"]),
    lambda rng: {"nope": rng.choice([1, [], {}, None])},
    lambda rng: {f"k{i}": i for i in range(3000)},
    lambda rng: [[[]]],
    lambda rng: deep(rng.choice([3, 50, 400])),
    lambda rng: [{"nope": 1}] * 2000,
    lambda rng: {"dtype": "object", "shape": [1], "data": "gASVBAAAAAAAAACMAWGULg=="},
]
"""Wrong in place of anything."""


def packed(rows: int, **more: Any) -> dict[str, Any]:
    from vllm.entrypoints.serve.steering.client import pack

    return {**pack(np.ones((rows, HIDDEN), np.float32)), **more}


def vector() -> list[float]:
    return [0.5] * HIDDEN


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """(path, fields) that are right; `test_http_fuzz.py` sends them all."""
    op = {"point": "post_block", "layers": [1], "positions": [0, -1]}
    gate = {"probe": vector(), "threshold": 0.0, "sharpness": 1.0, "when": "row"}
    tier = {
        "post_block": {"0": vector(), "1-2": {"vector": vector(), "scale": 2.0, "positions": "all"}}
    }
    at_once = {"pre_attn": packed(2, layers=[0, 3], scales=[1.0, 2.0])}
    hooks = {"post_block": [0, "1-2"], "pre_attn": "all"}
    positions = ["last_prompt", 0, {"start": 0, "stop": 3}, {"text": "went"}]
    asked: list[dict[str, Any]] = [
        {"steering_vectors": tier},
        {"prefill_steering_vectors": at_once},
        {"decode_steering_vectors": {"post_attn": {"2": {"vector": packed(1)}}}},
        {"steering": [{"op": "add", **op, "vector": vector(), "scale": 1.0, "gate": gate}]},
        {"steering": [{"op": "replace", **op, "values": packed(2), "alpha": 0.5}]},
        {"steering": [{"op": "clamp", **op, "direction": vector(), "lo": -1.0, "hi": 1.0}]},
        {"capture": {"inline": {"hooks": hooks, "positions": positions}}},
        {"capture": {"inline": {"hooks": hooks, "positions": {"start": 1, "stop": 4}}}},
    ]
    asked[2]["decode_steering_vectors"]["post_attn"]["2"]["vector"] |= {"shape": [HIDDEN]}
    made = [("/v1/completions", fields) for fields in asked]
    made += [("/v1/chat/completions", fields) for fields in asked]
    steady = {key: value for key, value in tier["post_block"].items() if key == "0"}
    made.append(
        ("/v1/steering/set", {"vectors": {"post_block": steady}, "decode_vectors": at_once})
    )
    made.append(
        ("/v1/steering/modules", {"name": "fuzz", "prefill_vectors": at_once, "ops": [
            {"op": "ablate", "point": "post_block", "layers": [1], "direction": vector()}
        ]})
    )  # fmt: skip
    return made


def nodes(tree: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[Key, ...]]:
    """Paths of everything below `tree`."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list) and len(value) <= 8:
            yield from nodes(value, (*path, key))
        elif isinstance(value, list):
            yield from (((*path, key, i)) for i in (0, len(value) // 2, len(value) - 1))


def follow(tree: Any, path: tuple[Key, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def replace(fields: dict[str, Any], rng: random.Random) -> None:
    """Junk in place of anything."""
    path = rng.choice(list(nodes(fields)))
    follow(fields, path[:-1])[path[-1]] = rng.choice(JUNK)(rng)


def rename(fields: dict[str, Any], rng: random.Random) -> None:
    """A key that is not one, beside or in place of one that is."""
    mappings = [p for p in nodes(fields) if isinstance(follow(fields, p), dict)]
    if not mappings:
        return replace(fields, rng)
    mapping = follow(fields, rng.choice(mappings))
    key = rng.choice(list(mapping))
    value = mapping[key] if rng.random() < 0.5 else mapping.pop(key)
    mapping[rng.choice(["nope", "", "-9", "99", "0-99", "9" * 5000, "\u00df", "__class__"])] = value


def resize(fields: dict[str, Any], rng: random.Random) -> None:
    """A vector of another width."""
    vectors = [
        p for p in nodes(fields)
        if isinstance(follow(fields, p), list) and len(follow(fields, p)) == HIDDEN
    ]  # fmt: skip
    if not vectors:
        return lie(fields, rng)
    *above, last = rng.choice(vectors)
    follow(fields, tuple(above))[last] = [0.5] * rng.choice([0, 1, HIDDEN - 1, HIDDEN + 1, 20000])


def lie(fields: dict[str, Any], rng: random.Random) -> None:
    """A packed array that is not what it says."""
    arrays = [
        p for p in nodes(fields)
        if isinstance(follow(fields, p), dict) and "data" in follow(fields, p)
    ]  # fmt: skip
    if not arrays:
        return replace(fields, rng)
    array = follow(fields, rng.choice(arrays))
    data, shape = array["data"], array["shape"]
    key, value = rng.choice(
        [
            ("data", data[:-4]), ("data", data + "AAAA"), ("data", data[:-1] + "!"), ("data", ""),
            ("data", "\n" + data[1:]), ("data", data[:40] + "=" + data[41:]),
            ("data", "//79fw" + data[6:]), ("data", "AADAfwAA" + data[8:]),
            ("shape", [*shape, 1, 1]), ("shape", []), ("shape", [-s for s in shape]),
            ("shape", [10**9, 10**9]), ("shape", [10**300] * 2), ("shape", [float(shape[0])]),
            ("shape", [True, shape[-1]]), ("shape", [shape[0] + 1, *shape[1:]]), ("shape", [0]),
            ("dtype", "float64"), ("dtype", "float16"), ("dtype", "O"), ("dtype", ""),
            ("layers", [0] * 9), ("layers", [1, 1]), ("layers", [-99, 0]), ("layers", [0, 10**30]),
            ("layers", ["0", "1"]), ("scales", [float("nan")] * 2), ("scales", [1e300, 1.0]),
        ]
    )  # fmt: skip
    array[key] = value


def far(fields: dict[str, Any], rng: random.Random) -> None:
    """A layer or position that is out of reach, or a very long list of them."""
    lists = [
        p for p in nodes(fields)
        if p[-1] in ("layers", "positions") or (len(p) > 1 and p[-2] == "hooks")
    ]  # fmt: skip
    if not lists:
        return rename(fields, rng)
    *above, last = rng.choice(lists)
    follow(fields, tuple(above))[last] = rng.choice(
        [[-1000], [10**30], [2**63], [True], list(range(100_000)), [0, 0.5], "0-999999999", [],
         {"start": 0, "stop": 10**18}, [[0]], ["1", "1"], "all_of_them"]
    )  # fmt: skip


def foreign(fields: dict[str, Any], rng: random.Random) -> None:
    """A field of another tool beside those that are right, or one of ours that nothing reads."""
    from vllm.v1.interventions.frontend.compat.peers import KNOWN, NESTS
    from vllm.v1.interventions.plan import PLAN_FIELDS

    if (chance := rng.random()) < 0.4:
        fields["vllm_xargs"] = {rng.choice(list(KNOWN)): rng.choice(["[1]", 1, [1, 2]])}
    elif chance < 0.8:
        fields[rng.choice(list(KNOWN))] = rng.choice(["happy", True, {"1": 2}, [1.0]])
    else:
        fields[rng.choice(NESTS)] = {rng.choice([*KNOWN, *PLAN_FIELDS]): rng.choice([[], {}, "x"])}


MUTATIONS = (replace, replace, replace, rename, resize, lie, far, foreign)


@asynccontextmanager
async def server(*more: str) -> AsyncIterator[httpx.AsyncClient]:
    """The server's app on a tiny model, without sockets.

    Args:
        more: options of it.
    """
    from tests.conftest import TinyModels
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(TinyModels(), Path(folder) / "model")
        parser = make_arg_parser(FlexibleArgumentParser())
        options = [*OPTIONS, f"--steering-api-key={KEY}", *more]
        args = parser.parse_args(["--model", str(model), *options])
        async with build_async_engine_client(args) as engine:
            app = build_app(args, ("generate",), engine.model_config)
            await init_app_state(engine, app.state, args, ("generate",))
            transport = httpx.ASGITransport(app=app)
            headers = {"X-Steering-Key": KEY, "content-type": "application/json"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://server", headers=headers, timeout=120
            ) as client:
                yield client


async def send(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], stream: bool = False
) -> httpx.Response:
    body = fields
    if "steering/" not in path:
        said = {"messages": [{"role": "user", "content": PROMPT}]}
        body = greedy(**(said if "chat" in path else {"prompt": PROMPT}), stream=stream, **fields)
    return await client.post(path, content=json.dumps(body).encode())


async def tokens(client: httpx.AsyncClient) -> Any:
    answer = await client.post("/v1/completions", json=greedy(prompt=PROMPT, logprobs=3))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def complaint(answer: httpx.Response, fields: dict[str, Any]) -> str | None:
    """What is wrong with an answer; None if it is a refusal that names the field."""
    if not 400 <= answer.status_code < 500:
        return f"status {answer.status_code}"
    error = answer.json()["error"]
    param, message = error["param"], error["message"]
    if param is None or not message.startswith(f"{param}: "):
        return f"param {param!r} is not what the message starts with"
    names = [*fields, "body", "module"]
    if not any(param == name or param.startswith((f"{name}.", f"{name}[")) for name in names):
        return f"param {param!r} names no field that was sent"
    if len(answer.text) > CLIENT_MESSAGE:
        return f"{len(answer.text)} characters"
    return None


async def fuzz(client: httpx.AsyncClient, count: int, seed: int) -> Counter[str]:
    """Send `count` bodies; how often each kind of malformation was refused.

    Raises:
        AssertionError: one was answered otherwise, or something has changed.
    """
    rng = random.Random(seed)
    right = bodies()
    before, state = await tokens(client), (await client.get("/v1/steering")).json()
    refused: Counter[str] = Counter()
    for _ in range(count):
        path, fields = copy.deepcopy(rng.choice(right))
        mutation = rng.choice(MUTATIONS)
        mutation(fields, rng)
        answer = await send(client, path, fields, stream=rng.random() < 0.3)
        if wrong := complaint(answer, fields):
            sent = json.dumps(fields)[:3000]
            raise AssertionError(
                f"{wrong}: {mutation.__name__} {path} {sent} -> {answer.text[:900]}"
            )
        refused[f"{path} {mutation.__name__}"] += 1
    assert await tokens(client) == before
    now = (await client.get("/v1/steering")).json()
    assert now == state, "nothing was changed"
    return refused


async def main(args: argparse.Namespace) -> None:
    started = time.monotonic()
    async with server(*args.options) as client:
        refused = await fuzz(client, args.count, args.seed)
    for kind, times in sorted(refused.items()):
        print(f"{times:6} {kind}")
    print(f"{refused.total()} malformed bodies refused in {time.monotonic() - started:.0f} s")


def prepared(doc: str, count: int) -> argparse.Namespace:
    """The command's arguments, with the `options` of its server; prepares this process."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=count)
    parser.add_argument("--seed", type=int, help="default: the count")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    args.seed = args.count if args.seed is None else args.seed
    args.options = CUDA_OPTIONS if args.device == "cuda" else ()
    prepare_environment("v1" if args.device == "cpu" else "v2", args.device)
    return args


if __name__ == "__main__":
    asyncio.run(main(prepared(__doc__ or "", 20_000)))
