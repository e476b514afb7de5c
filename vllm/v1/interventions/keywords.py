# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments that upstream's parameters and methods do not have: errors name what was meant.

Python's own text for them names neither the field nor its place. HTTP has the same guesses in
`vllm/entrypoints/serve/steering/body.py`.
"""

from collections.abc import Callable
from enum import Enum
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import msgspec

from vllm.v1.interventions.errors import reject, show, show_key
from vllm.v1.interventions.likely import FIELDS, likely, nearest
from vllm.v1.interventions.plan import PLAN_FIELDS

_C = TypeVar("_C", bound=type)
_E = TypeVar("_E", bound=Enum)

_GENERATED = ("generate", "enqueue", "chat", "enqueue_chat")
_POOLED = ("encode", "embed", "classify", "score")
_BEAMS = (
    "is not supported with beam search: a beam is sent anew at each token, with what it generated "
    "as its prompt"
)
_POOLING = (
    "pooling is neither steered nor captured; capture and steering are fields of SamplingParams, "
    "for LLM.generate, which with max_tokens=1 reads a prompt"
)
_REFUSALS = {"PoolingParams": _POOLING, "BeamSearchParams": _BEAMS}
"""By class of parameters, what is said of all that steers or captures."""


class NamesFields(msgspec.StructMeta):
    """Metaclass of parameters: their constructor says which field an unknown keyword is meant for.

    A right call costs one Python call more.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """Make the parameters.

        Raises:
            TypeError: a keyword is no field; the message names the one that was meant.
        """
        try:
            return super().__call__(*args, **given)
        except TypeError:
            for name in given:
                if name not in cls.__struct_fields__:
                    _refuse_field(cls, name)
            raise


def _refuse_field(params: NamesFields, name: str) -> None:
    says = _REFUSALS.get(params.__name__)
    if says is not None and nearest(name, PLAN_FIELDS, FIELDS) is not None:
        raise TypeError(f"{show_key(name)}: {says}") from None
    if guess := likely(name, params.__struct_fields__, FIELDS):
        says = f"is not a field of {params.__name__}{guess}"
        raise TypeError(f"{show_key(name)}: {says}") from None


def member_of(kinds: type[_E], said: _E | str, path: str) -> _E:
    """Return a member of an enumeration, which may be said by its name in any letters.

    Raises:
        ValueError: there is no such member; the message begins with `path`.
    """
    if not isinstance(said, str):
        return said
    names = [name.lower() for name in kinds.__members__]
    if said.lower() not in names:
        reject(path, f"must be {', '.join(names)}, got {show(said)}{likely(said, names)}")
    return kinds[said.upper()]


def names_fields(engine: _C) -> _C:
    """Decorate an engine's class: methods that run requests say where a field belongs that is
    given to them instead of to their parameters."""
    for name in (*_GENERATED, *_POOLED, "beam_search"):
        if hasattr(engine, name):
            setattr(engine, name, _explained(name, getattr(engine, name)))
    return engine


def _explained(method: str, call: Callable[..., Any]) -> Callable[..., Any]:
    known = signature(call).parameters.keys()

    @wraps(call)
    def explained(*args: Any, **given: Any) -> Any:
        for name in given.keys() - known:
            meant = nearest(name, PLAN_FIELDS, FIELDS)
            if meant is not None:
                raise TypeError(f"{show_key(name)}: {_place(method, meant)}")
        return call(*args, **given)

    return explained


def _place(method: str, field: str) -> str:
    if method in _POOLED:
        return _POOLING
    if method not in _GENERATED:
        return _BEAMS
    return f"is not for {method}; {method}(..., SamplingParams({field}=...)) takes it"
