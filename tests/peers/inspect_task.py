# SPDX-License-Identifier: Apache-2.0
"""Tasks of Inspect AI on a server that steers and captures, for a process with the real package.

    python -m tests.peers.inspect_task URL FOLDER

Writes `said.json` to the folder: of each case its log's path, what the outputs' metadata say, or
how the task failed; and `rows.npz`, what `load_rows` gave.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.serving import vector

LAYER, MODEL, ADAPTED = 1, "tiny", "tiny:adapted"
SITES = [("post_block", LAYER), ("post_block", 3)]
READ = {"inline": {"hooks": {"post_block": [LAYER, 3]}, "positions": "predicting"}}
PROMPTS = ("Today I went", "home")
EPOCHS = 2


def added(scale: float) -> dict[str, Any]:
    """A vector at one layer, as numpy."""
    return {"post_block": {LAYER: {"vector": vector(31).numpy(), "scale": scale}}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (MODEL, {"capture": READ, "steering_vectors": added(0.0)}),
    "steered": (MODEL, {"capture": READ, "steering_vectors": added(1.0)}),
    "adapted": (ADAPTED, {"capture": READ, "steering_vectors": added(0.0)}),
    "adapted, steered": (ADAPTED, {"capture": READ, "steering_vectors": added(1.0)}),
    "refused": (MODEL, {"steering_modules": ["nobody"]}),
}


def main() -> None:
    from inspect_ai import Task
    from inspect_ai import eval as run
    from inspect_ai.dataset import Sample
    from inspect_ai.log import read_eval_log
    from inspect_ai.model import GenerateConfig
    from inspect_ai.scorer import match

    from vllm.entrypoints.serve.steering.inspect_provider import load_rows

    url, folder = sys.argv[1], Path(sys.argv[2])
    said: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, (model, fields) in CASES.items():
        body = {"ignore_eos": True, **fields}
        samples = [Sample(prompt, target="a") for prompt in PROMPTS]
        (log,) = run(
            Task(
                samples,
                scorer=match(),
                config=GenerateConfig(temperature=0, max_tokens=4, extra_body=body),
            ),
            model=f"vllm-steer/{model}",
            model_base_url=f"{url}/v1",
            model_args={"capture_dir": str(folder / "captures")},
            log_dir=str(folder),
            log_format="json",
            display="none",
            epochs=EPOCHS,
        )
        log = read_eval_log(log.location)  # what is on disk
        error = log.error.message if log.error is not None else None
        said[name] = {"log": log.location.removeprefix("file://"), "error": error, "outputs": []}
        for i, sample in enumerate(log.samples or () if error is None else ()):
            said[name]["outputs"].append([sample.input, sample.output.metadata])
            for (point, layer), rows in load_rows(sample.output, log).items():
                arrays[f"{name}/{i}/{point}/{layer}"] = rows.values
    (folder / "said.json").write_text(json.dumps(said))
    np.savez(folder / "rows.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
