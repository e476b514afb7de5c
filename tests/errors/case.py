# SPDX-License-Identifier: Apache-2.0
"""Something refused, and what its message must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tests.support.plans import plan_of
from vllm.exceptions import VLLMValidationError
from vllm.v1.capture import CaptureResult
from vllm.v1.interventions.errors import InterventionError


@dataclass
class Case:
    """Something refused, and what the message says of it."""

    says: dict[str, str]
    ask: dict[str, Any] = field(default_factory=dict)
    """Arguments of `plan_of`."""
    do: Callable[[], object] | None = None
    """In place of `plan_of`."""

    def message(self) -> str:
        """The error's text.

        Raises:
            AssertionError: there was no error, or a request got one of the wrong type.
        """
        try:
            returned = self.do() if self.do is not None else plan_of(**self.ask)
        except ValidationError as error:  # of the engine's options
            return error.errors()[0]["msg"].removeprefix("Value error, ")
        except (
            ValueError, LookupError, RuntimeError, TimeoutError, VLLMValidationError
        ) as error:  # fmt: skip
            if self.do is None:
                assert isinstance(error, InterventionError)
                assert error.parameter == self.says["path"]
            return str(error)
        if isinstance(returned, CaptureResult):
            assert returned.error is not None
            return returned.error
        raise AssertionError(f"no error: {self}")


def path(path: str, given: str = "", allowed: str = "", **more: str) -> dict[str, str]:
    named = {"path": path, "given": given, "allowed": allowed, **more}
    return {name: text for name, text in named.items() if text}
