# SPDX-License-Identifier: Apache-2.0
"""Makes Triton report a CPU backend, so that vLLM's V2 model runner starts without a GPU.

vLLM looks for an entry "cpu" in `triton.backends.backends` and asks its driver `is_active()`; that
is all it asks, since under `TRITON_INTERPRET=1` no kernel is ever compiled. This file is called
sitecustomize because with its directory on `PYTHONPATH` Python imports it at start-up, which is how
the processes that an engine spawns get it too. Without `TRITON_INTERPRET=1` it does nothing.
"""

from __future__ import annotations

import os


class _InterpreterDriver:
    """The part of a Triton driver that vLLM asks."""

    @staticmethod
    def is_active() -> bool:
        return True


def register_cpu_backend() -> None:
    """Add the "cpu" entry to Triton's backends. Idempotent."""
    from triton.backends import Backend, backends

    # The compiler is never reached under the interpreter.
    backends.setdefault("cpu", Backend(compiler=None, driver=_InterpreterDriver))


if os.environ.get("TRITON_INTERPRET") == "1":
    register_cpu_backend()
