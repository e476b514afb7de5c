# SPDX-License-Identifier: Apache-2.0
"""Time that a plain request takes while another client sends bodies that are made to be costly.

    python -m benchmarks.hostile [--model DIR] [--seconds 6] [--only NAME ...] [--fields]
                                 [--json FILE]

Starts `vllm serve`, asks it for one token again and again, and has another process send one hostile
body after the other, each as soon as the last was answered. Without --model: a tiny random Llama,
eager, on a CPU. With it: a model of that folder's config.json (nothing else is read, weights are
random and tokens are single letters), with graphs, on what the host has.

With --fields it sends a body for each field of each endpoint and each --compat in place of those
(`tests/support/costly_fields.py` makes them), with 8 MiB of empty objects where the field stands.

"plain" is the twin of each body: the same bytes, its fields of ours under a name that nobody reads,
so what that does to others is upstream's. A body is within the bound if no answer took longer than
250 ms, or than twice the longest of an idle server. Exits with 1 if one is past the bound and past
twice its twin.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

import httpx

from benchmarks import servers
from benchmarks.results import Row, Run, add_arguments, publish, setup
from tests.support.costly_fields import Place, all_places, as_sent

KEY = "let-me-steer"
LONG = 32_000
"""Tokens of a long prompt; on a CPU 4,000, as its model alone would hold everybody up with more."""
BOUND = 250.0
"""Milliseconds that a plain request may take beside any body."""
FIELD_BYTES = 8 << 20
"""What stands in the place of a field."""
OPTIONS = (
    "--enable-steering", "--capture-consumers=inline", "--max-steering-configs=4",
    "--steering-families", "add", "ablate", "replace", "focus", "--max-steering-rows=4096",
    "--capture-points", "pre_attn", "post_attn", "post_block", "q", "z",
    "--max-model-len=32768", "--max-num-seqs=32", "--no-enable-prefix-caching",
    "--hf-overrides", json.dumps({"max_position_embeddings": 32768}),
)  # fmt: skip
ALL = ("--compat", "lens", "easysteer", f"--steering-api-key={KEY}", "--capture-lens=logit")
"""What opens the rest of the fields."""
COMPLETIONS = "/v1/completions"

Body = dict[str, Any]


def bodies(
    hidden: int, layers: int, itemsize: int, num_tokens: int
) -> dict[str, Callable[[], Body]]:
    """Name -> makes a body."""
    vector = [1.0] * hidden
    long, short = [5] * num_tokens, [5] * 2000
    inline = [5] * ((48 << 20) // (itemsize * hidden * 3 * layers))
    """Tokens whose rows are 48 MiB."""

    def capture(positions: Any, hooks: Any = None) -> Body:
        return {"capture": {"inline": {"hooks": hooks or {"post_block": [0]}, **positions}}}

    def at(positions: Any) -> Body:
        return {"prompt": long, **capture({"positions": positions})}

    def ablations() -> list[Body]:
        bits = [[p for p in range(1024) if p >> bit & 1] for bit in range(10)]
        point = ("pre_attn", "post_attn", "post_block")
        return [
            {
                "op": "ablate",
                "point": point[i % 3],
                "layers": "all",
                "direction": [i + 2.0, *vector[1:]],
                "positions": bits[i % 10],
            }
            for i in range(12)
        ]

    def replace(positions: Any, rows: int) -> Body:
        op = {"op": "replace", "point": "pre_attn", "layers": [0], "positions": positions}
        return {"steering": [{**op, "values": [vector] * rows}]}

    ranges = {str(n): {"start": n, "step": 2} for n in range(64)}
    weights = {"heads": {"0": [0]}, "queries": "all_prompt", "keys": ranges, "give": ["mass"]}
    focus = {"op": "focus", "layers": [0], "span": [*range(0, 128, 2)], "factor": 8.0}
    everywhere = dict.fromkeys(("pre_attn", "post_attn", "post_block"), "all")
    rows = {"prompt": inline, **capture({"positions": "all_prompt"}, everywhere)}
    steered = {"steering_vectors": {"post_block": {"0": vector}}}
    return {
        "replace at {} x 2,000": lambda: {"prompt": long, **replace([{}] * 2000, 1)},
        "replace 1,000 rows": lambda: {"prompt": short, **replace([*range(1000)], 1000)},
        "text of 30 MB to find": lambda: at({"text": "a" * 30_000_000}),
        "240 texts to find": lambda: at([{"text": "aaaab"}] * 240),
        "240 runs of tokens": lambda: at([{"token_ids": [5] * 99}] * 240),
        "200,000 positions": lambda: at([0] * 200_000),
        "layers all x 400,000": lambda: {
            "prompt": short, **capture({}, {"post_block": ["all"] * 400_000}),
        },
        "every second row": lambda: at({"start": 0, "step": 2}),
        "64 ranges of weights": lambda: {
            "prompt": long, "capture": {"inline": {"attention": weights}},
        },
        "focus over 64 runs": lambda: {"prompt": long, "steering": [focus]},
        "1,024 programs": lambda: {"prompt": short, "steering": ablations()},
        "1,024 programs, n 128": lambda: {"prompt": short, "n": 128, "steering": ablations()},
        "2,000 samples": lambda: {"prompt": short[:20], "n": 2000, "max_tokens": 2, **steered},
        "500 prompts": lambda: {"prompt": [[5, i % 50] for i in range(500)], **steered},
        "48 MiB inline": lambda: rows,
        "48 MiB inline, stream": lambda: {"stream": True, **rows},
    }  # fmt: skip


def field_bodies(hidden: int) -> dict[str, tuple[str, Callable[[], Body]]]:
    """Name -> endpoint, and what makes a body: one for each field."""

    def made(place: Place) -> Body:
        body = as_sent(place.with_long([{}] * (FIELD_BYTES // 4)))
        match place.legal.endpoint:
            case "/v1/completions":
                return {"prompt": "Today I", **body}
            case "/v1/chat/completions":
                return {"messages": [{"role": "user", "content": "Today I"}], **body}
        return body

    found = all_places([1.0] * hidden).items()
    return {name: (each.legal.endpoint, partial(made, each)) for name, each in found}


def plain(body: Body) -> Body:
    """The twin of a body: as many bytes, and nothing that is ours to do."""
    upstreams = {name: body[name] for name in body.keys() & {"prompt", "n", "stream", "max_tokens"}}
    unread = {name: value for name, value in body.items() if name not in upstreams}
    return {"prompt": "Today I", **upstreams, "unread": unread}


def send(url: str, content: bytes, seconds: float) -> Counter[int]:
    """Send one body again and again, for at least `seconds`; how it was answered."""
    statuses: Counter[int] = Counter()
    until = time.monotonic() + seconds
    headers = {"Content-Type": "application/json", "X-Steering-Key": KEY}
    with httpx.Client(timeout=600, headers=headers) as client:
        while not statuses or time.monotonic() < until:
            statuses[client.post(url, content=content).status_code] += 1
    return statuses


def latencies(url: str, until: Future[Any]) -> list[float]:
    """Milliseconds of one plain request after the other, until something is done."""
    found = []
    with httpx.Client(timeout=600) as client:
        while not until.done():
            started = time.monotonic()
            answer = client.post(url, json={"prompt": "Today I went", "max_tokens": 1})
            found.append(round(1e3 * (time.monotonic() - started), 2))
            assert answer.status_code == 200, answer.text
            time.sleep(0.01)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    servers.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each body, and of its twin")
    parser.add_argument("--only", nargs="+", help="names of bodies")
    parser.add_argument("--fields", action="store_true", help="a body for each field")
    add_arguments(parser)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")  # a client of its own; forks of threads can hang
    more = [] if args.model else ["--max-num-batched-tokens=1024"]
    with (
        servers.served(args, *OPTIONS, *ALL, *more) as (server, model),
        ProcessPoolExecutor(1, spawn) as other,
    ):
        url = server.url + COMPLETIONS
        latencies(url, other.submit(time.sleep, 2))  # a warm-up
        idle = latencies(url, other.submit(time.sleep, args.seconds))
        bound = max(BOUND, 2 * max(idle))
        rows, late = [Row("idle", "plain request", "ms", idle)], []
        itemsize, tokens = (4, LONG // 8) if args.model is None else (2, LONG)
        hidden = model["hidden_size"]
        listed = bodies(hidden, model["num_hidden_layers"], itemsize, tokens)
        makers = {name: (COMPLETIONS, make) for name, make in listed.items()}
        if args.fields:
            makers = field_bodies(hidden)
        for name in args.only or makers:
            endpoint, make = makers[name]
            body, worst = make(), {}
            if endpoint.endswith("completions"):
                body["max_tokens"] = 1
            cases = (("plain", COMPLETIONS, plain(body)), ("hostile", endpoint, body))
            for case, path, sends in cases:
                content = json.dumps(sends).encode()
                sent = other.submit(send, server.url + path, content, args.seconds)
                found = latencies(url, sent)
                worst[case] = max(found)
                answers = ", ".join(f"{n} x {status}" for status, n in sent.result().items())
                facts: dict[str, str | bool] = {"answers": answers, "within": worst[case] <= bound}
                rows.append(Row(case, "plain request", "ms", found, {"body": name}, facts))
                print(f"{name}, {case}: {answers}, worst {worst[case]:.0f} ms", flush=True)
            if worst["hostile"] > max(bound, 2 * worst["plain"]):
                late.append(name)
    options = {**model, "bound": f"{bound:.0f} ms", "past the bound and twice their twin": late}
    publish(Run("hostile", setup(args, **options), rows, ("plain",), paired=False), args.json)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
