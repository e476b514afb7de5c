# SPDX-License-Identifier: Apache-2.0
"""Reads the lines of `vllm run-batch`: a line that is refused is an error of that line."""

import json
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm.exceptions import VLLMValidationError

_NAMES = ("custom_id", "method", "url")


def read_line(kind: type[BaseModel], text: str) -> Any:
    """Read a line; one whose body is refused has the error as its body.

    Args:
        kind: upstream's model of a line.

    Raises:
        ValueError: it is no JSON, or lacks what its answer is named by.
    """
    try:
        return kind.model_validate_json(text)
    except (VLLMValidationError, ValidationError) as error:
        given = json.loads(text)
        names = {name: given.get(name) for name in _NAMES} if isinstance(given, dict) else {}
        if not names or not all(isinstance(name, str) for name in names.values()):
            raise
        return kind.model_construct(**names, body=error)


def raise_refusal(body: object) -> None:
    """Raise the error that `read_line` has put in place of a body."""
    if isinstance(body, Exception):
        raise body
