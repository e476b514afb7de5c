# SPDX-License-Identifier: Apache-2.0
"""The fields of request bodies that steer and capture: served, or refused by name.

Upstream ignores unknown fields of a body, so every model of a request body asks here. Ignoring
these fields would answer 200 with unsteered text.
"""

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, model_validator

from vllm.exceptions import VLLMValidationError
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.plan import INHERIT, PLAN_FIELDS, VECTOR_FIELDS

from .packed import read_capture, read_ops, read_vectors

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

READERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(VECTOR_FIELDS, read_vectors),
    "steering_modules": lambda value, path: value,
    "steering": read_ops,
    INHERIT: lambda value, path: value,
    "capture": read_capture,
}
assert READERS.keys() == set(PLAN_FIELDS)


class UnservedField(VLLMValidationError):
    """Not a ValueError, which pydantic would make a part of a report of its own."""

    def __str__(self) -> str:
        return str(self.args[0])


def refuse_unserved(extra_fields: Set[str], served: bool) -> None:
    """Raises UnservedField (a 400) naming the first field that would be ignored.

    Args:
        extra_fields: of the body, those its model does not have.
        served: whether the model's endpoint takes the fields.
    """
    if not served:
        for field in PLAN_FIELDS:
            if field in extra_fields:
                _unserved(field, field)


def _unserved(path: str, field: str) -> NoReturn:
    raise UnservedField(
        f"{path}: this endpoint does not take {field!r}; steering and capture are served by "
        "/v1/completions and /v1/chat/completions",
        parameter=path,
    )


def _refuse(cls: type[BaseModel], data: Any) -> Any:
    if isinstance(data, Mapping):
        refuse_unserved(data.keys(), served=False)
        nested = data.get("sampling_params")
        if isinstance(nested, Mapping):
            for field in PLAN_FIELDS:
                if field in nested:
                    _unserved(f"sampling_params.{field}", field)
    return data


no_plan_fields: Any = model_validator(mode="before")(_refuse)
"""For the body of a model that is not an OpenAIBaseModel: `_no_plan_fields = no_plan_fields`."""


def asked_fields(request: BaseModel) -> dict[str, Any]:
    """The fields that a body gives, as they were sent. null is as if it was not given."""
    extra = request.model_extra or {}
    return {field: extra[field] for field in PLAN_FIELDS if extra.get(field) is not None}


def refuse_rendering(request: BaseModel) -> None:
    """Raises UnservedField: what renders a request for another server cannot carry a plan."""
    for field in asked_fields(request):
        _unserved(field, field)


def set_plan_fields(params: "SamplingParams", asked: Mapping[str, Any]) -> None:
    """Give `params` the fields of a body, their packed arrays read.

    Raises:
        ValueError: with the path of the field.
    """
    for field, value in asked.items():
        setattr(params, field, READERS[field](value, field))


def refuse_beams(asked: Mapping[str, Any]) -> NoReturn:
    reject(
        next(iter(asked)),
        "is not supported with use_beam_search: a beam is sent anew at each token, with what it "
        "generated as its prompt",
    )


def without_values(request: Any) -> Any:
    """A body for the log, vectors left out."""
    asked = asked_fields(request) if isinstance(request, BaseModel) else {}
    if not asked:
        return request
    copy = request.model_copy()
    assert copy.model_extra is not None
    copy.model_extra.update(dict.fromkeys(asked, "..."))
    return copy
