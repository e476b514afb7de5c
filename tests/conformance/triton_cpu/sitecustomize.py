# SPDX-License-Identifier: Apache-2.0
"""Makes Triton report a CPU backend, so that vLLM's V2 model runner starts without a GPU.

vLLM looks for an entry "cpu" in `triton.backends.backends` and asks its driver `is_active()`;
Triton asks how to time a kernel's configurations. That is all, since under `TRITON_INTERPRET=1` no
kernel is ever compiled. This file is called sitecustomize because with its directory on
`PYTHONPATH` Python imports it at start-up, which is how the processes that an engine spawns get it
too. Without `TRITON_INTERPRET=1` it does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class _InterpreterDriver:
    """The part of a Triton driver that vLLM and Triton ask."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def get_benchmarker() -> Callable[..., list[float]]:
        """None is faster than another, and none is run for it."""

        def times(_call: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
            return [0.0 for _ in quantiles]

        return times


def register_cpu_backend() -> None:
    """Add the "cpu" entry to Triton's backends. Idempotent."""
    from triton.backends import Backend, backends

    # The compiler is never reached under the interpreter.
    backends.setdefault("cpu", Backend(compiler=None, driver=_InterpreterDriver))


if os.environ.get("TRITON_INTERPRET") == "1":
    register_cpu_backend()
