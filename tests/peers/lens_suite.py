# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in for vLLM-Lens's own tests, as its wheel ships them, against `compat=["lens"]`.

Engines are opened for it, and what says "cuda" means the CPU where there is no GPU: nothing else is
changed. Their model's name is a folder of the working directory (`tests/peers/lens_runs.py`).

`LENS_DEVICE` is "cpu" or "cuda", and `VLLM_USE_V2_MODEL_RUNNER` chooses the runner. `LENS_ENGINE`
is JSON of engine options in place of theirs; its `tensor_parallel_size` is for engines that they
want on one device.
"""

from __future__ import annotations

import json
import os
import sys
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
    from vllm import LLM as plain
    from vllm import AsyncEngineArgs

    class LLM(plain):
        def __init__(self, **options: Any) -> None:
            super().__init__(**opened_with(options, on_cpu))

    def opened(**options: Any) -> AsyncEngineArgs:
        return AsyncEngineArgs(**opened_with(options, on_cpu))

    vllm.LLM, vllm.AsyncEngineArgs = LLM, opened  # type: ignore[misc, assignment]
    if not on_cpu:
        return
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
