# SPDX-License-Identifier: Apache-2.0
"""Many samples of Inspect AI on `inspect_fake.py`, for a process with the real package.

    python -m tests.peers.inspect_logs FOLDER

Writes `said.json` to the folder: of each case the size of its log, how often the server was asked,
and of each sample of which rows `load_rows` gave, as digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.peers.inspect_fake import BUSY, CROWD, HIDDEN, TOGETHER, Fake

READ = {"inline": {"hooks": {"post_block": "all"}, "positions": "last_prompt"}}
SAMPLES = 100
LAYER = 5


def added(value: float, scale: float) -> dict[str, Any]:
    """A vector that differs from others only where numpy's text of it leaves numbers out."""
    vector = np.ones(HIDDEN, np.float32)
    vector[HIDDEN // 2] = value
    return {"post_block": {LAYER: {"vector": vector, "scale": scale}}}


def steered(value: float, scale: float) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    fields = {"capture": READ, "steering_vectors": added(value, scale)}
    return ["cached"], fields, {"cache": True}


NAMES = [f"sample {i}" for i in range(SAMPLES)]
CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "plain": (NAMES, {}, {}),
    "captured": (NAMES, {"capture": READ}, {}),
    "crowd": ([f"{CROWD} {i}" for i in range(TOGETHER)], {"capture": READ}, {}),
    "busy": ([f"{BUSY} {i}" for i in range(3)], {"capture": READ}, {}),
    "choices": (["two"], {"capture": READ}, {"num_choices": 2}),
    "first": steered(2.0, 1.0),
    "other vector": steered(3.0, 1.0),
    "other scale": steered(2.0, 0.5),
    "again": steered(2.0, 1.0),
}
"""Prompts, fields of ours, and of Inspect's config."""


def digest(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["INSPECT_CACHE_DIR"] = str(folder / "cache")
    from inspect_ai import Task
    from inspect_ai import eval as run
    from inspect_ai.dataset import Sample
    from inspect_ai.log import read_eval_log
    from inspect_ai.model import GenerateConfig

    from vllm.entrypoints.serve.steering.inspect_provider import load_rows

    fake = Fake()
    said: dict[str, Any] = {}
    for name, (prompts, fields, options) in CASES.items():
        fake.asked.clear()
        config = GenerateConfig(max_tokens=1, extra_body=fields, **options)
        (log,) = run(
            Task([Sample(prompt, target="a") for prompt in prompts], config=config),
            model="vllm-steer/big",
            model_base_url=fake.url,
            model_args={"capture_dir": str(folder / "captures")},
            log_dir=str(folder),
            log_format="json",
            display="none",
            max_connections=TOGETHER,
            max_samples=TOGETHER,
        )
        log = read_eval_log(log.location)
        found: dict[str, list[list[str]]] = {}
        for sample in log.samples or () if "capture" in fields else ():
            metadata = sample.output.metadata or {}
            found[str(sample.input)] = [
                [digest(rows.values) for rows in load_rows(sample.output, log, choice).values()]
                for choice in range(len(metadata["capture"]))
            ]
        said[name] = {
            "status": log.status,
            "size": Path(log.location.removeprefix("file://")).stat().st_size,
            "asked": fake.asked.copy(),
            "rows": found,
        }
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
