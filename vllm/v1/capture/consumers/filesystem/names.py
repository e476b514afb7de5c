# SPDX-License-Identifier: Apache-2.0
"""The names of files: which ones a client may choose, and which are made here.

An id is its own name where it is safe as one, else it is made readable and gets its digest. So two
different ids are two files: also in a store that does not tell upper case from lower, as there is
no upper case.
"""

import hashlib
import re
import uuid
from typing import Any

from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.values import plain

_MAX_LENGTH = 100
_SLUG = re.compile(rf"[a-z0-9](?:[a-z0-9._-]{{0,{_MAX_LENGTH - 2}}}[a-z0-9])?", re.ASCII)
_RESERVED = ("--", ".safetensors")
_COMPLETION = re.compile(r"-\d+-\d+\Z", re.ASCII)
_PUBLISHED = re.compile(r"[a-z0-9][a-z0-9._-]*", re.ASCII)
_NOT_READABLE = re.compile(r"[^a-z0-9_]+", re.ASCII)
_MAX_ID = 512
_MAX_READABLE = 60

DEFAULT_TAG = "default"


def need_tag(value: Any, path: str) -> str:
    """Return a tag that a client chose, once it is checked.

    Args:
        path: the field it was given in, for errors.

    Raises:
        ValueError: it is not a name; the message names `path`.
    """
    if wrong := _wrong_slug(value):
        reject(path, f"{show(value)} {wrong}")
    return str(value)


def need_request_id(value: Any, path: str) -> str:
    """Return the id that a client gave a request, as text.

    Args:
        path: the field it was given in, for errors.

    Raises:
        ValueError: it is no text or int; the message names `path`.
    """
    given = plain(value)
    identity = str(given) if isinstance(given, str | int) and not isinstance(given, bool) else ""
    if not 0 < len(identity) <= _MAX_ID:
        reject(path, f"{show(value)} is not an id: use 1 to {_MAX_ID} characters, or an int")
    return identity


def name_of(identity: str) -> str:
    """Make the name of the file of a request, from the id that it was given, or the engine's.

    An id that is no name, or ends as the names of completions do, gets `--` and a digest; no name
    that a client can choose has that.
    """
    if not (_wrong_slug(identity) or _COMPLETION.search(identity)):
        return identity
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
    readable = _NOT_READABLE.sub("-", identity.lower())[:_MAX_READABLE].strip("-_")
    return f"{readable or 'id'}--{digest[:32]}"


def is_published(name: str) -> bool:
    """Tell whether a file may have this name, so that it is safe as a part of a path."""
    return bool(_PUBLISHED.fullmatch(name))


def completion_name(name: str, prompt: int, sample: int) -> str:
    """Make the name of one completion of a request that has several."""
    return f"{name}-{prompt}-{sample}"


def unused_name(name: str) -> str:
    """Make a name to publish under when `name` is taken; no request can ask for such a name."""
    return f"{name}--{uuid.uuid4().hex[:12]}"


def _wrong_slug(value: Any) -> str:
    """Say why the value is not a name; "" if it is one."""
    if not isinstance(value, str) or not _SLUG.fullmatch(value):
        return (
            f"is not a name: use 1 to {_MAX_LENGTH} lower-case letters, digits, '.', '_' and '-', "
            "with a letter or digit first and last"
        )
    taken = [text for text in _RESERVED if text in value]
    return f"may not contain {taken[0]!r}" if taken else ""
