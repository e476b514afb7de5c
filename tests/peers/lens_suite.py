# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in for vLLM-Lens's own tests, as its wheel ships them, against `compat=["lens"]`.

Engines are opened for it, and what says "cuda" means the CPU where there is no GPU: nothing else is
changed. Their model's name is a folder of the working directory (`tests/peers/test_lens_suite.py`).
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from tests.conformance.engine import prepare_environment


def pytest_load_initial_conftests() -> None:
    """Before their modules import vLLM."""
    prepare_environment("v1")
    # They ask it whether to shut it down.
    sys.modules.setdefault("ray", SimpleNamespace(is_initialized=lambda: False))  # type: ignore[arg-type]
    import torch
    import transformers

    import vllm
    from vllm import LLM as plain
    from vllm import AsyncEngineArgs

    on_cpu = not torch.cuda.is_available()
    ours: dict[str, Any] = {"compat": ["lens"], **({"enforce_eager": True} if on_cpu else {})}

    class LLM(plain):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, **ours)

    def opened(**options: Any) -> AsyncEngineArgs:
        return AsyncEngineArgs(**options, **ours)

    vllm.LLM, vllm.AsyncEngineArgs = LLM, opened  # type: ignore[misc, assignment]
    if not on_cpu:
        return
    load = transformers.AutoModelForCausalLM.from_pretrained
    move = transformers.BatchEncoding.to

    def loaded(*args: Any, device_map: Any = None, **more: Any) -> Any:
        return load(*args, **more)

    def moved(self: Any, device: Any, **more: Any) -> Any:
        return move(self, "cpu" if device == "cuda" else device, **more)

    transformers.AutoModelForCausalLM.from_pretrained = loaded  # type: ignore[method-assign]
    transformers.BatchEncoding.to = moved  # type: ignore[method-assign]
