# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in for vLLM-Lens's own tests, as its wheel ships them, against `compat=["lens"]`.

Engines and servers are opened for it, and what says "cuda" means the CPU where there is no GPU:
nothing else is changed. Their model's name is a folder of the working directory
(`tests/peers/lens_runs.py`).

`LENS_DEVICE` is "cpu" or "cuda", and `VLLM_USE_V2_MODEL_RUNNER` chooses the runner. `LENS_ENGINE`
is JSON of options of engines in place of theirs, not of servers; its `tensor_parallel_size` is for
those that they want on one device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conformance.engine import prepare_environment


def opened_with(options: dict[str, Any], on_cpu: bool) -> dict[str, Any]:
    """The engine options of a test of theirs, as they are used here."""
    ours = json.loads(os.environ.get("LENS_ENGINE", "{}"))
    if options.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}:
        ours.pop("tensor_parallel_size", None)
    eager = {"enforce_eager": True} if on_cpu else {}
    return {**options, **ours, **eager, "compat": ["lens"]}


def pytest_load_initial_conftests() -> None:
    """Before their modules import vLLM."""
    on_cpu = os.environ["LENS_DEVICE"] == "cpu"
    is_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    prepare_environment("v2" if is_v2 else "v1", "cpu" if on_cpu else "cuda")
    # They ask it whether to shut it down.
    sys.modules.setdefault("ray", SimpleNamespace(is_initialized=lambda: False))  # type: ignore[arg-type]
    import torch
    import transformers

    import vllm
    from tests.conformance.engine import start_cheaply
    from tests.http.server import Server, wait_for
    from vllm import LLM as plain
    from vllm import AsyncEngineArgs

    class LLM(plain):
        def __init__(self, **options: Any) -> None:
            super().__init__(**opened_with(options, on_cpu))

    def opened(**options: Any) -> AsyncEngineArgs:
        return AsyncEngineArgs(**opened_with(options, on_cpu))

    class Popen(subprocess.Popen[Any]):
        """Theirs, but a server is opened, too, and returned when it answers: they wait for two
        minutes, which may be too few where others share two cores."""

        def __init__(self, args: Any, **more: Any) -> None:
            if "vllm.entrypoints.openai.api_server" not in args:
                super().__init__(args, **more)
                return
            url = f"http://localhost:{args[args.index('--port') + 1]}"
            opened = [*args, "--compat=lens", *(["--enforce-eager"] if on_cpu else [])]
            log = Path("server.log").resolve()
            with log.open("wb") as out:
                super().__init__(opened, **{**more, "stdout": out})
            wait_for(Server(url, log, self))

    subprocess.Popen = Popen  # type: ignore[misc, assignment]
    vllm.LLM, vllm.AsyncEngineArgs = LLM, opened  # type: ignore[misc, assignment]
    if not on_cpu:
        return
    start_cheaply()
    load = transformers.AutoModelForCausalLM.from_pretrained
    move = transformers.BatchEncoding.to

    def loaded(*args: Any, device_map: Any = None, **more: Any) -> Any:
        return load(*args, **more)

    def moved(self: Any, device: Any, **more: Any) -> Any:
        return move(self, "cpu" if device == "cuda" else device, **more)

    # transformers finds out by `torch.tensor([])` whether it is in a block of a device, and leaves
    # rotary frequencies unset if that fails: torch notes its functions in the first such block.
    with torch.device("meta"):
        make = torch.tensor
        make([])

    def made(*args: Any, **more: Any) -> torch.Tensor:
        return make(*args, **more | ({"device": "cpu"} if more.get("device") == "cuda" else {}))

    torch.tensor = made
    transformers.AutoModelForCausalLM.from_pretrained = loaded  # type: ignore[method-assign]
    transformers.BatchEncoding.to = moved  # type: ignore[method-assign]
