# SPDX-License-Identifier: Apache-2.0
"""The error of a request that cannot be honoured exactly, and how its messages show client input.

Every error names the path of the offending field (`steering_vectors.post_block.15.scale`), what
was given and what is allowed. Offline it is a `ValueError`, over HTTP a 400.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from itertools import islice
from typing import Any, NoReturn

from vllm.exceptions import VLLMValidationError
from vllm.v1.interventions.likely import likely_key
from vllm.v1.interventions.values import plain

_MOST_UNKNOWN = 100


class InterventionError(VLLMValidationError, ValueError):
    """A request asks for steering or capture that cannot be done exactly."""

    def __str__(self) -> str:
        return str(self.args[0])


def reject(path: str, message: str) -> NoReturn:
    """Raise an `InterventionError` for the field at `path`."""
    raise InterventionError(f"{path}: {message}", parameter=path)


def show(value: Any) -> str:
    """Show `value` in an error message, bounded: client input may be huge."""
    value = plain(value)
    if not isinstance(value, str | int | float | bool | None):
        return type(value).__name__
    if isinstance(value, int) and value.bit_length() > 128:
        # Python refuses to print very long ones.
        return f"an int of {value.bit_length()} bits"
    # Cut before it is written out, for that may be long too.
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def show_key(key: Any) -> str:
    """Show a mapping's key as a part of a path, bounded."""
    return printable(key[:40]) if isinstance(key, str) else show(key)


def printable(text: str) -> str:
    """Write `text` so that any encoding and any log line can hold it: half of a surrogate pair,
    which no UTF-8 has, and characters that would end a line are escaped."""
    encoded = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in encoded)


def unknown_keys(given: Iterable[Any], known: Container[Any]) -> list[str]:
    """Show keys that are not known: a few, in order, however many there are."""
    unknown = islice((key for key in given if key not in known), _MOST_UNKNOWN)
    return sorted(show_key(key) for key in unknown)[:8]


def need_family(family: str, families: Collection[str], path: str) -> None:
    """Raise ValueError if the engine was started without `family`.

    Args:
        families: those it was started with, of `config.steering.FAMILIES`.
    """
    if family not in families:
        started = ", ".join(sorted(families))
        needs = " (which needs q and z among capture_points, too)" if family == "focus" else ""
        reject(
            path,
            f"the engine was started without {family!r}{needs}; add it to steering_families "
            f"(--steering-families), which has {started}",
        )


def refuse_unknown_keys(
    given: Iterable[Any], known: Sequence[str], path: str, beside: Sequence[str] = ()
) -> None:
    """Raise ValueError for keys of the mapping at `path` that are not known.

    Args:
        beside: other keys that the mapping may have, which `given` lacks.
    """
    if unknown := unknown_keys(given, known):
        allowed = (*beside, *known)
        meant = likely_key(unknown[0], given, allowed)
        reject(path, f"unknown keys {unknown}{meant}, allowed are {', '.join(allowed)}")


def describe(error: BaseException) -> str:
    """Type and message of an exception, in at most `_MAX_ERROR` characters."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    text = text[:_MAX_ERROR].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_ERROR else text[: _MAX_ERROR - 3] + "..."


_MAX_ERROR = 500
