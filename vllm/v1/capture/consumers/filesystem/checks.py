# SPDX-License-Identifier: Apache-2.0
"""Checks of the filesystem consumer's options, and of a request's metadata."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.values import plain

_T = TypeVar("_T", bound=str)

MAX_METADATA = 16 << 10
"""The most bytes of a request's metadata, as JSON."""


def need_json(value: Any, path: str) -> dict[str, Any]:
    """Return metadata as a file keeps them: a JSON object, keys made strings.

    Args:
        path: the field it was given in, for errors.

    Raises:
        ValueError: it is no mapping, no JSON, or too long; the message names `path`.
    """
    if not isinstance(value, Mapping):
        reject(path, f"must be a mapping, got {show(value)}")
    try:
        text = json.dumps(dict(value), default=_own, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reject(path, f"cannot be kept as JSON: {str(error)[:200]}")
    if len(text) > MAX_METADATA:
        reject(path, f"has {len(text)} bytes as JSON, at most {MAX_METADATA} are kept")
    made: dict[str, Any] = json.loads(text)
    return made


def _own(value: Any) -> Any:
    made = plain(value)
    if made is value:
        raise TypeError(f"it has a {type(value).__name__}")
    return made


def one_of(option: str, value: Any, allowed: Sequence[_T]) -> _T:
    """Return an option that is one of the values `allowed`.

    Raises:
        ValueError: it is not; the message names the option.
    """
    for known in allowed:
        if value == known:
            return known
    raise ValueError(f"{option}: must be one of {', '.join(allowed)}, got {value!r}")


def number(option: str, value: Any, least: float, most: float) -> float:
    """Return an option that is a number from `least` to `most`; from a command line it is text.

    Raises:
        ValueError: it is not; the message names the option.
    """
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = float("nan")
    if isinstance(value, bool) or not least <= found <= most:
        raise ValueError(f"{option}: must be a number from {least} to {most}, got {value!r}")
    return found


def flag(option: str, value: Any) -> bool:
    """Return an option that is true or false; from a command line it is text.

    Raises:
        ValueError: it is neither; the message names the option.
    """
    known = {"true": True, "false": False}
    found = value if isinstance(value, bool) else known.get(str(value).lower())
    if found is None:
        raise ValueError(f"{option}: must be true or false, got {value!r}")
    return found
