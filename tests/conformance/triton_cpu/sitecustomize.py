# SPDX-License-Identifier: Apache-2.0
"""Makes Triton report a CPU backend, so that vLLM's V2 model runner starts without a GPU.

vLLM looks for an entry "cpu" in `triton.backends.backends` and asks its driver `is_active()`;
Triton asks how to time a kernel's configurations. That is all, since under `TRITON_INTERPRET=1` no
kernel is ever compiled. The interpreter is made faster, too. This file is called sitecustomize
because with its directory on `PYTHONPATH` Python imports it at start-up, which is how the processes
that an engine spawns get it too. Without `TRITON_INTERPRET=1` it does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
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


class _Kept:
    """In place of what would undo the interpreter's changes of Triton's language."""

    @staticmethod
    def restore() -> None:
        pass


def change_language_once() -> None:
    """Let the interpreter put its own functions into Triton's language for a kernel's first launch,
    and leave them there: else it does so, and undoes it, for each launch and each function that a
    kernel calls, which is half of its time."""
    from triton.runtime import interpreter

    change = interpreter._patch_lang

    @cache
    def change_once(kernel: Callable[..., Any]) -> type[_Kept]:
        change(kernel)
        return _Kept

    interpreter._patch_lang = change_once


def compute_as_a_gpu_does() -> None:
    """Let sums and products of integers wrap around, as in a compiled kernel. The interpreter would
    compute each of them a second time, in 64 bits, to compare: a third of its time. And look types
    up once each."""
    from triton.runtime import interpreter

    builder, named = interpreter.interpreter_builder, {}
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_up = interpreter._get_np_dtype

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in named:
            named[name] = look_up(kind.scalar)
        return named[name]

    interpreter._get_np_dtype = numpy_type


if os.environ.get("TRITON_INTERPRET") == "1":
    register_cpu_backend()
    change_language_once()
    compute_as_a_gpu_does()
