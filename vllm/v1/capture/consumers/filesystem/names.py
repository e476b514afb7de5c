# SPDX-License-Identifier: Apache-2.0
"""The names of files: which ones a client may choose, and which are made here.

A client's name is refused or taken as it is, never rewritten, so two different names are two files:
also in a store that does not tell upper case from lower, as there is no upper case.
"""

import hashlib
import re
import uuid
from typing import Any

from vllm.v1.interventions.errors import reject, show

_MAX_LENGTH = 100
_SLUG = re.compile(rf"[a-z0-9](?:[a-z0-9._-]{{0,{_MAX_LENGTH - 2}}}[a-z0-9])?", re.ASCII)
_RESERVED = ("--", ".safetensors")
_COMPLETION = re.compile(r"-\d+-\d+\Z", re.ASCII)

DEFAULT_TAG = "default"


def need_tag(value: Any, path: str) -> str:
    """Return a tag that a client chose, once it is checked.

    Args:
        path: the field it was given in, for errors.

    Raises:
        ValueError: it is not a name; the message names `path`.
    """
    return _need(value, path, _wrong_slug(value))


def need_request_id(value: Any, path: str) -> str:
    """Return a request's name that a client chose, once it is checked.

    Args:
        path: the field it was given in, for errors.

    Raises:
        ValueError: it is not a name, or ends as the names of completions do; the message names
            `path`.
    """
    return _need(value, path, _wrong_slug(value) or _wrong_ending(value))


def name_of_engine_id(engine_id: str) -> str:
    """Make the name of a request that was given none, from its id or a hash of it.

    A client may have chosen most of the id, so it is used only where it is a name.
    """
    if not (_wrong_slug(engine_id) or _wrong_ending(engine_id)):
        return engine_id
    digest = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"id-{digest[:32]}"


def completion_name(name: str, prompt: int, sample: int) -> str:
    """Make the name of one completion of a request that has several."""
    return f"{name}-{prompt}-{sample}"


def unused_name(name: str) -> str:
    """Make a name to publish under when `name` is taken; no request can ask for such a name."""
    return f"{name}--{uuid.uuid4().hex[:12]}"


def _need(value: Any, path: str, wrong: str) -> str:
    if wrong:
        reject(path, f"{show(value)} {wrong}")
    assert isinstance(value, str)
    return value


def _wrong_slug(value: Any) -> str:
    """Say why the value is not a name; "" if it is one."""
    if not isinstance(value, str) or not _SLUG.fullmatch(value):
        return (
            f"is not a name: use 1 to {_MAX_LENGTH} lower-case letters, digits, '.', '_' and '-', "
            "with a letter or digit first and last"
        )
    taken = [text for text in _RESERVED if text in value]
    return f"may not contain {taken[0]!r}" if taken else ""


def _wrong_ending(value: str) -> str:
    """Say why a request may not have this name; "" if it may."""
    if not _COMPLETION.search(value):
        return ""
    return "may not end in -NUMBER-NUMBER, which tells the prompts and samples of a request apart"
