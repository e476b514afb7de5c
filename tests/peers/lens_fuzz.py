# SPDX-License-Identifier: Apache-2.0
"""Malformed vectors of vLLM-Lens for a server in this process: each is refused by name, or is right
again and acts; none is answered with text that nothing steered.

    python -m tests.peers.lens_fuzz 10000 [--seed 0] [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import msgspec
import torch

from tests.http import fuzz

if __name__ == "__main__":
    ARGS = fuzz.prepared(__doc__ or "", 10_000)  # before vLLM is imported

from tests.http.server import greedy
from tests.support.plans import SHAPE
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.compat import lens, wire
from vllm.v1.interventions.frontend.request.budget import Work

LAYER = 1
DOOR = ("--compat", "lens")
PATHS = ("/v1/completions", "/v1/chat/completions")
JUNK: list[Any] = [
    None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x", "\u0000", [], [[]], {}, {"a": 1},
    [1, 2, 3], "torch.int8", "AAAA", "!!!!", [10**9, 10**9], [-1, 4], [True, 4], "KLUv/SAAAQ==",
]  # fmt: skip


def small(hidden: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A vector as it travels."""
    return {
        "activations": wire.encoded(torch.ones(rows, hidden, dtype=dtype)),
        "layer_indices": list(range(rows)),
    }


def broken(rng: random.Random, hidden: int) -> list[dict[str, Any]]:
    """A request's vectors, with one thing wrong wherever it stands."""
    given = [small(hidden, rng.choice([1, 2]), rng.choice([torch.float32, torch.bfloat16]))]
    given[0] |= {"scale": 2.0, "norm_match": True}
    tensor = given[0]["activations"]
    target = rng.choice([given[0], tensor, tensor])
    key = rng.choice(list(target))
    action = rng.randrange(4)
    if action == 0:
        del target[key]
        if key in ("scale", "norm_match", "compression", "original_dtype"):
            target["more"] = 1
    elif action == 1 and isinstance(target[key], str) and len(target[key]) > 4:
        text = target[key]
        cut = rng.randrange(len(text))
        target[key] = rng.choice([text[:cut], text[:cut] + "*" + text[cut:], text * 2])
    elif action == 2:
        target[rng.choice(["pickle", "path", "__class__"])] = "/etc/passwd"
    else:
        target[key] = rng.choice(JUNK)
    return given


def text_of(rng: random.Random, hidden: int) -> str:
    """The same as the JSON text that travels, which may be cut, or have other bytes in it."""
    text = json.dumps(broken(rng, hidden))
    cut = rng.randrange(len(text))
    match rng.randrange(8):
        case 0:
            return text[:cut]
        case 1:
            return (
                text[:cut] + rng.choice(["\u0000", "[[" * 2000, "}", '"', "9" * 5000]) + text[cut:]
            )
        case _:
            return text


def acts(text: str, hidden: int) -> bool | None:
    """Whether vectors that are right change rows; None where they are to be refused."""
    shape = msgspec.structs.replace(SHAPE, hidden_size=hidden)
    try:
        return "steering" in lens.fields_of({lens.STEER: text}, "", shape, Work(1 << 23))
    except InterventionError:
        return None


async def rows(client: httpx.AsyncClient, path: str, text: str | None) -> httpx.Response:
    """The answer to a request for a layer's rows with vectors, or with none."""
    args = {lens.CAPTURE: f"[{LAYER}]", **({} if text is None else {lens.STEER: text})}
    said = {"messages": [{"role": "user", "content": fuzz.PROMPT}]}
    prompt = said if "chat" in path else {"prompt": fuzz.PROMPT}
    return await client.post(path, json=greedy(**prompt, vllm_xargs=args) | {"max_tokens": 1})


async def fuzz_vectors(client: httpx.AsyncClient, count: int, seed: int) -> Counter[str]:
    """Send `count` malformed vectors; how many were refused, acted, and had nothing to do.

    Raises:
        AssertionError: one was answered otherwise.
    """
    rng = random.Random(seed)
    plain = {path: (await rows(client, path, None)).json()["activations"] for path in PATHS}
    right = json.dumps([small(fuzz.HIDDEN) | {"layer_indices": [LAYER]}])
    steered = {path: (await rows(client, path, right)).json()["activations"] for path in PATHS}
    assert all(steered[path] != plain[path] for path in PATHS)  # the twin
    ended: Counter[str] = Counter()
    for _ in range(count):
        text, path = text_of(rng, fuzz.HIDDEN), rng.choice(PATHS)
        answer = await rows(client, path, text)
        expected = acts(text, fuzz.HIDDEN)
        if expected is None:
            wrong = fuzz.complaint(answer, {"vllm_xargs": 1})
            assert wrong is None, f"{wrong}: {text[:2000]} -> {answer.text[:900]}"
            ended["refused"] += 1
            continue
        assert answer.status_code == 200, f"{text[:2000]} -> {answer.text[:900]}"
        changed = answer.json()["activations"] != plain[path]
        assert changed == expected, f"{text[:2000]} -> changed is {changed}"
        ended["acted" if changed else "had nothing to do"] += 1
    assert (await rows(client, PATHS[0], None)).json()["activations"] == plain[PATHS[0]]
    return ended


async def main(args: argparse.Namespace) -> None:
    started = time.monotonic()
    async with fuzz.server(*DOOR, *args.options) as client:
        ended = await fuzz_vectors(client, args.count, args.seed)
    print(f"{dict(ended)} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    asyncio.run(main(ARGS))
