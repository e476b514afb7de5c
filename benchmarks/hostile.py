# SPDX-License-Identifier: Apache-2.0
"""How long a plain request takes while another client sends bodies that are made to be costly.

    python -m benchmarks.hostile [--seconds 6] [--model DIR] [--only NAME ...]

Starts `vllm serve` on the CPU (a tiny random Llama with a long context, if no model is given). One
client asks for one token again and again, on a connection of its own; another sends one hostile
body after the other, each as soon as the last was answered. `plain` bodies are their twins without
our fields. The bound of each row is 250 ms, or twice the worst of an idle server if that is more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx

PROMPT = 32_000
"""Tokens of a long prompt."""
BOUND = 0.25

Body = dict[str, Any]


def bodies(hidden: int, layers: int) -> dict[str, Callable[[], Body]]:
    """Name -> makes a body."""
    vector = [1.0] * hidden
    long = [5] * PROMPT

    def capture(positions: Any, hooks: Any = None, **fields: Any) -> Body:
        inline = {"hooks": hooks or {"post_block": [0]}, "positions": positions}
        return {"capture": {"inline": inline}, **fields}

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

    def unlike(count: int) -> Body:
        """Completions that wait for the one that goes first."""
        return {"n": count, "steering_vectors": {"post_block": {"0": vector}}, "max_tokens": 2}

    everywhere = dict.fromkeys(("pre_attn", "post_attn", "post_block"), "all")
    inline = [5] * ((48 << 20) // (4 * hidden * 3 * layers))  # tokens, whose rows are 48 MiB
    short = {"prompt": [5] * 2000}
    return {
        "plain, long prompt": lambda: {"prompt": long},
        "plain, 2,000 samples": lambda: {"n": 2000, "max_tokens": 2},
        "replace at {} x 2,000": lambda: {"prompt": long, **replace([{}] * 2000, 1)},
        "replace 2,000 rows": lambda: {**short, **replace(list(range(1000)), 1000)},
        "text of 30 MB to find": lambda: {"prompt": long, **capture({"text": "a" * 30_000_000})},
        "240 texts to find": lambda: {"prompt": long, **capture([{"text": "aaaab"}] * 240)},
        "240 runs of tokens": lambda: {"prompt": long, **capture([{"token_ids": [5] * 99}] * 240)},
        "layers all x 400,000": lambda: capture("all", {"post_block": ["all"] * 400_000}),
        "200,000 positions": lambda: {"prompt": long, **capture([0] * 200_000)},
        "1,024 programs": lambda: {**short, "steering": ablations()},
        "1,024 programs, n 128": lambda: {**short, "n": 128, "steering": ablations()},
        "2,000 steered samples": lambda: unlike(2000),
        "48 MiB inline": lambda: {"prompt": inline, **capture("all_prompt", everywhere)},
        "48 MiB inline, stream": lambda: {
            "prompt": inline, "stream": True, **capture("all_prompt", everywhere),
        },
        "48 MiB, plain prompt": lambda: {"prompt": inline},
        "500 steered prompts": lambda: {
            "prompt": [[5, i % 50] for i in range(500)],
            "steering_vectors": {"post_block": {"0": vector}},
        },
    }  # fmt: skip


class Probe:
    """Asks for one token again and again, and notes how long each took."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seconds: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with httpx.Client(timeout=600) as client:
            while not self._stop.is_set():
                started = time.monotonic()
                answer = client.post(self._url, json={"prompt": "Today I went", "max_tokens": 1})
                self.seconds.append(time.monotonic() - started)
                assert answer.status_code == 200, answer.text
                time.sleep(0.01)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def send(url: str, body: Body, seconds: float) -> Counter[str]:
    """Send one body again and again; how it was answered."""
    content = json.dumps({"max_tokens": 1, **body}).encode()
    ended: Counter[str] = Counter()
    until = time.monotonic() + seconds
    with httpx.Client(timeout=600) as client:
        while not ended or time.monotonic() < until:
            headers = {"Content-Type": "application/json"}
            answer = client.post(url, content=content, headers=headers)
            ended[str(answer.status_code)] += 1
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each body")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="+", help="names of bodies")
    args = parser.parse_args()

    from tests.conformance.engine import prepare_environment

    prepare_environment("v1")
    from tests.conformance.models import HIDDEN, LAYERS
    from tests.conftest import TinyModels
    from tests.http.server import save_model, serve

    options = (
        "--enable-steering", "--capture-consumers=inline", "--max-steering-configs=4",
        "--steering-families", "add", "ablate", "replace", "--max-steering-rows=4096",
        "--dtype=float32", "--enforce-eager", "--max-model-len=32768", "--max-num-seqs=32",
        "--kv-cache-memory-bytes=536870912", "--no-enable-prefix-caching", "--seed=0",
        "--hf-overrides", json.dumps({"max_position_embeddings": 32768}),
    )  # fmt: skip
    print(f"{platform.platform()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        model = args.model or save_model(TinyModels(), Path(folder) / "model")
        with serve(model, Path(folder) / "server.log", base=options) as server:
            url = server.url + "/v1/completions"
            with Probe(url):
                time.sleep(2)  # a warm-up
            with Probe(url) as idle:
                time.sleep(args.seconds)
            bound = max(BOUND, 2 * max(idle.seconds))
            print(f"{'':26}{'answers':>14}{'asked':>7}{'median ms':>11}{'worst ms':>10}  within")
            show("idle", "", idle, bound)
            for name, make in bodies(HIDDEN, LAYERS).items():
                if args.only and name not in args.only:
                    continue
                body = make()
                with Probe(url) as probe:
                    ended = send(url, body, args.seconds)
                show(name, " ".join(f"{n}x{status}" for status, n in ended.items()), probe, bound)


def show(name: str, answers: str, probe: Probe, bound: float) -> None:
    times = probe.seconds
    line = (
        f"{name:26}{answers:>14}{len(times):7}{1e3 * median(times):11.0f}{1e3 * max(times):10.0f}"
    )
    print(f"{line}  {'yes' if max(times) <= bound else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
