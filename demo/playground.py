# SPDX-License-Identifier: Apache-2.0
"""`python -m demo.playground`: the demo's model (got once) behind `vllm serve --playground`, on the
CPU and with everything turned on. Prints an address that opens the page with texts for it."""

from __future__ import annotations

import argparse
import base64
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from demo import prompts
from demo.corpus import contrast_prompts
from demo.environment import prepare_environment
from demo.model import find

if TYPE_CHECKING:
    from vllm.entrypoints.serve.steering.client import SteeringClient

OPTIONS = (
    "--playground", "--steering-train", "--enable-steering", "--capture-consumers", "inline",
    "--steering-families", "add", "norm_match", "ablate", "clamp", "pin", "replace", "gate",
    "scale",
    "--steering-points", "pre_attn", "post_attn", "post_block", "z",
    "--capture-points", "pre_attn", "post_attn", "post_block", "q", "z",
    "--capture-lens", "logit", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
    "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(256 << 20),
    "--served-model-name", "demo", "--host", "127.0.0.1",
)  # fmt: skip
"""Of `vllm serve`. Compiling would take longer than looking."""

GARDEN = "{} looked at the {} garden. At noon, {} went back to the"


CITY = "The capital of {} is the city of"


def fields(real: bool) -> dict[str, str | bool]:
    """What stands in the page's fields, by their ids: for a real model, or for the trained one."""
    if real:
        return {
            "direction-name": "cheerful",
            "examples": "\n".join(prompts.CHEERFUL),
            "against": "\n".join(prompts.GLOOMY),
            "prompts": "\n".join(prompts.HELD_OUT[:2]),
            "look-prompt": prompts.SENTENCE,
            "look-lens": "logit",
            "look-tokens": "16",
            "trace-prompt": CITY.format("Italy"),
            "trace-clean": CITY.format("France"),
            "trace-answer": " Paris",
            "trace-other": " Rome",
        }
    cheerful, gloomy = contrast_prompts(16, 0)
    return {
        "direction-name": "cheerful",
        "examples": "\n".join(cheerful),
        "against": "\n".join(gloomy),
        "prompts": "Today I went\nIn April, Nell went back to the",
        "look-prompt": "In April, Nell went back to the",
        "look-lens": "logit",
        "look-tokens": "16",
        "trace-prompt": GARDEN.format("Ada", "frozen", "Ada"),
        "trace-clean": GARDEN.format("Ada", "friendly", "Ada"),
        "trace-answer": " friendly",
        "trace-other": " frozen",
    }


def fragment(real: bool) -> str:
    """The part of a link that says it: see docs/playground.md."""
    text = json.dumps({"v": 1, "fields": fields(real)})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def register(client: SteeringClient, said: dict[str, str | bool]) -> str:
    """Register the direction of the page's texts as a module, so that its slider is there at once:
    half the difference of the mean rows of last tokens, after three fifths of the layers.

    Returns:
        its name.
    """
    layer = 3 * int(client.layers()["num_layers"]) // 5
    read = {"inline": {"hooks": {"post_block": [layer]}, "positions": "last_prompt"}}
    means = []
    for field in ("examples", "against"):
        texts = str(said[field]).splitlines()
        answer = client.complete(texts, max_tokens=1, temperature=0, capture=read)
        rows = [choice.rows["post_block", layer].values[0] for choice in answer.choices]
        means.append(np.mean(rows, axis=0, dtype=np.float64))
    vector = ((means[0] - means[1]) / 2).astype(np.float32)
    name = str(said["direction-name"])
    client.register_module(name, {"post_block": {layer: vector}})
    return name


def main() -> int:
    """Serve until Ctrl+C; the server's exit status."""
    parser = argparse.ArgumentParser(prog="demo.playground", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    prepare_environment(small_model=True)
    # vLLM reads the environment when it is imported.
    from vllm.entrypoints.serve.steering.client import SteeringClient

    model = find(Console())
    key = os.environ.setdefault("VLLM_STEERING_API_KEY", secrets.token_urlsafe(9))
    # The engine in a process of its own, as servers have it.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model.path),
        *OPTIONS,
    ]
    print("Starting the server (a minute) ...", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the server is to end with this program
    server = subprocess.Popen([*command, f"--port={port}"], env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        while server.poll() is None and not _answers(f"{address}/health"):
            time.sleep(0.2)
        if server.poll() is None:
            with SteeringClient(address, steering_key=key, model="demo") as client:
                register(client, fields(model.real))
            print(f"\n{address}/playground#{fragment(model.real)}\n")
            print(f"The steering key, to save modules: {key}. Ctrl+C ends the server.", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        server.terminate()
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
