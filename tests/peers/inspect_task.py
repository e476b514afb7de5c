# SPDX-License-Identifier: Apache-2.0
"""Tasks of Inspect AI on a server that steers and captures, for a process with the real package.

    python -m tests.peers.inspect_task URL FOLDER

Writes `said.json` to the folder: of each case its log's path, what the outputs' metadata say, or
how the task failed; and `rows.npz`, what `load_rows` gave.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.serving import vector

LAYER, MODEL, ADAPTED = 1, "tiny", "tiny:adapted"
SITES = [("post_block", LAYER), ("post_block", 3)]
READ = {"inline": {"hooks": {"post_block": [LAYER, 3]}, "positions": "predicting"}}
NAMED = {"inline": {**READ["inline"], "tokens": True}}
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
    "held": (MODEL, {"capture": NAMED, "steering_vectors": added(1.0)}),
    "on server": (MODEL, {"capture": READ, "steering_vectors": added(1.0)}),
    "refused": (MODEL, {"steering_modules": ["nobody"]}),
    "not kept": (MODEL, {"capture": {"inline": {"attention": {"layers": [LAYER]}}}}),
    "kept twice": (MODEL, {"capture": {**READ, "filesystem": READ["inline"]}}),
}
ROWS = {"held": "memory", "on server": "server", "kept twice": "server"}
"""The provider's `rows`, where it is said."""
ROOT = "on-server"
"""Where the server's files are, in the folder."""


def main() -> None:
    from inspect_ai import Task
    from inspect_ai import eval as run
    from inspect_ai.dataset import Sample
    from inspect_ai.log import read_eval_log
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import Score, accuracy, scorer

    from vllm.entrypoints.serve.steering.inspect_provider import load_rows

    url, folder = sys.argv[1], Path(sys.argv[2])
    said: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}

    @scorer(metrics=[accuracy()])
    def seen() -> Any:
        async def score(state: Any, target: Any) -> Score:
            metadata = state.output.metadata
            for held in metadata.get("rows", ()):
                sha256 = metadata["capture"][0]["inline"]["sha256"]
                for (point, layer), rows in held["inline"].items():
                    arrays[f"{sha256}/{point}/{layer}"] = rows.values
            return Score(value=1)

        return score

    for name, (model, fields) in CASES.items():
        body = {"ignore_eos": True, **fields}
        samples = [Sample(prompt, target="a") for prompt in PROMPTS]
        (log,) = run(
            Task(
                samples,
                scorer=seen(),
                config=GenerateConfig(temperature=0, max_tokens=4, extra_body=body),
            ),
            model=f"vllm-steer/{model}",
            model_base_url=f"{url}/v1",
            model_args={
                "capture_dir": str(folder / "captures"),
                **({"rows": ROWS[name]} if name in ROWS else {}),
            },
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
            on_server = ROWS.get(name) == "server"
            kept = (folder / ROOT, 0, "filesystem") if on_server else (log,)
            for (point, layer), rows in load_rows(sample.output, *kept).items():
                arrays[f"{name}/{i}/{point}/{layer}"] = rows.values
                arrays[f"{name}/{i}/{point}/{layer}/tokens"] = np.array(rows.tokens, str)
            if on_server:
                with suppress(ValueError):
                    load_rows(sample.output, log, 0, "filesystem")
                    raise AssertionError("a log has no rows of the server's")
    try:
        get_model(f"vllm-steer/{MODEL}", base_url=f"{url}/v1", rows="elsewhere")
    except ValueError as error:
        said["elsewhere"] = {"error": str(error), "outputs": []}
    (folder / "said.json").write_text(json.dumps(said))
    np.savez(folder / "rows.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
