# SPDX-License-Identifier: Apache-2.0
"""Serves the fields of request bodies that steer and capture, or refuses them by name.

Upstream ignores unknown fields of a body, so every model of a request body asks here. Ignoring
these fields would answer 200 with unsteered text.
"""

from collections.abc import Callable, Mapping, Set
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, model_validator

from vllm.exceptions import VLLMValidationError
from vllm.v1.interventions.errors import reject, show_key
from vllm.v1.interventions.frontend.compat import peers
from vllm.v1.interventions.frontend.request.capture import MAX_CAPTURES
from vllm.v1.interventions.given_rules import MAX_RULES
from vllm.v1.interventions.likely import FIELDS
from vllm.v1.interventions.plan import INHERIT, PLAN_FIELDS, VECTOR_FIELDS

from .packed import read_capture, read_ops, read_rules, read_vectors

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

READERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(VECTOR_FIELDS, read_vectors),
    "steering_modules": lambda value, path: value,
    "steering": read_ops,
    INHERIT: lambda value, path: value,
    "capture": read_capture,
    "rules": read_rules,
}
"""Field -> reader of it from JSON; the functions take the value and its path."""
assert READERS.keys() == set(PLAN_FIELDS)


ALIKE = 0.75
"""Likeness that an unknown field and one of ours must have, as `difflib` measures it, to be meant
for it. "streaming" is as like "steering" as 0.71."""

MOST_UNKNOWN = 16
"""With more unknown fields a body is no slip of a pen, and comparing takes time."""


class UnservedField(VLLMValidationError):
    """Raised for a field that an endpoint would ignore; a 400.

    It is no ValueError, which pydantic would put into a report of its own.
    """

    def __str__(self) -> str:
        return str(self.args[0])


def refuse_unserved(extra: Mapping[str, Any], served: bool, is_body: bool = True) -> None:
    """Refuse a body with fields that its endpoint would ignore.

    Args:
        extra: the fields of the body that its model does not have.
        served: whether the model's endpoint takes the fields; what they say to other tools is then
            left to it.
        is_body: whether these are fields of a body, and not of an object in it: a body may have
            any number of objects, so names in these are not compared letter by letter.

    Raises:
        UnservedField: there is such a field, one of another tool, or one whose name is nearly that
            of one; the message names the first.
    """
    if not served:
        for field in PLAN_FIELDS:
            if field in extra:
                _unserved(field, field)
        _refuse_found(peers.foreign(extra) or peers.nested(extra))
    if is_body:
        refuse_misspelt(extra.keys())


def _refuse_found(found: peers.Found | None) -> None:
    if found is not None:
        path, said = found
        raise UnservedField(f"{path}: {said}", parameter=path)


def refuse_misspelt(extra_fields: Set[str], path: str = "") -> None:
    """Refuse fields that nothing reads and whose names are nearly those of ours, or are of what
    stands within ours.

    Args:
        path: what stands before a field in errors.

    Raises:
        UnservedField: there is such a field; the message says which was meant.
    """
    if len(extra_fields) > MOST_UNKNOWN:
        return
    for field in sorted(extra_fields - READERS.keys() - peers.KNOWN.keys()):
        name = field[:40].lower()
        meant = FIELDS.get(name) or next(iter(get_close_matches(name, PLAN_FIELDS, 1, ALIKE)), None)
        if meant is not None:
            field = path + show_key(field)
            raise UnservedField(
                f"{field}: is not a field, and would be ignored; {meant!r} is one",
                parameter=field,
            )


def _unserved(path: str, field: str) -> NoReturn:
    raise UnservedField(
        f"{path}: this endpoint does not take {field!r}; steering and capture are served by "
        "/v1/completions, /v1/chat/completions and /inference/v1/generate",
        parameter=path,
    )


def _refuse(cls: type[BaseModel], data: Any) -> Any:
    """Refuse the fields in a body, and in the `sampling_params` in it; return the body."""
    if isinstance(data, Mapping):
        unknown = data.keys() - cls.model_fields.keys()
        refuse_unserved({field: data[field] for field in unknown}, served=False)
        nested = data.get("sampling_params")
        if isinstance(nested, Mapping):
            for field in PLAN_FIELDS:
                if field in nested:
                    _unserved(f"sampling_params.{field}", field)
            _refuse_others(nested)
    return data


def _refuse_others(nested: Mapping[str, Any]) -> None:
    """Refuse what `sampling_params` have of other tools, or misspelt."""
    _refuse_found(peers.foreign(nested, "sampling_params."))
    refuse_misspelt(nested.keys(), "sampling_params.")


XARGS = "vllm_xargs"
"""The field of a body that has what requests say to other tools."""


def _lift(cls: type[BaseModel], data: Any) -> Any:
    """Return a body with the fields in its `sampling_params` beside these."""
    if not isinstance(data, Mapping):
        return data
    unknown = data.keys() - cls.model_fields.keys()
    refuse_unserved({field: data[field] for field in unknown}, served=True)
    if data.get(XARGS) is not None:
        raise UnservedField(
            f"{XARGS}: is not a field of this endpoint, and would be ignored; say it in fields",
            parameter=XARGS,
        )
    nested = data.get("sampling_params")
    if not isinstance(nested, Mapping):
        return data
    _refuse_others(nested)
    lifted = {field: nested[field] for field in PLAN_FIELDS if nested.get(field) is not None}
    for field in lifted:
        if data.get(field) is not None:
            path = f"sampling_params.{field}"
            raise UnservedField(f"{path}: {field!r} is given twice; give one", parameter=path)
    left = {key: value for key, value in nested.items() if key not in lifted}
    return {**data, **lifted, "sampling_params": left}


no_plan_fields: Any = model_validator(mode="before")(_refuse)
"""The validator of a body's model that is not an OpenAIBaseModel, which sets
`_no_plan_fields = no_plan_fields`."""

lift_plan_fields: Any = model_validator(mode="before")(_lift)
"""The validator of a body's model that takes the fields, and has sampling parameters in which they
may stand, too; it sets `_lift_plan_fields = lift_plan_fields`."""

no_xargs: Any = property(lambda self: None)
"""The `vllm_xargs` of such a model, whose sampling parameters have `extra_args` themselves."""


def asked_fields(request: BaseModel) -> dict[str, Any]:
    """Return the fields of a body that steer or capture, as they were sent; null is left out."""
    extra = request.model_extra or {}
    return {field: extra[field] for field in PLAN_FIELDS if extra.get(field) is not None}


def names_modules(asked: Mapping[str, Any]) -> bool:
    """Tell whether fields name modules, which another API server may have registered."""
    if asked.get("steering_modules") is not None:
        return True
    rules, capture = asked.get("rules"), asked.get("capture")
    for rule in rules[:MAX_RULES] if isinstance(rules, list) else ():
        if isinstance(rule, Mapping) and "module" in rule:
            return True
    for each in capture.values() if isinstance(capture, Mapping) else ():
        for one in each[:MAX_CAPTURES] if isinstance(each, list) else [each]:
            project = one.get("project") if isinstance(one, Mapping) else None
            if isinstance(project, Mapping) and "modules" in project:
                return True
    return False


def refuse_rendering(request: BaseModel) -> None:
    """Refuse a body that steers or captures and is only rendered, for another server.

    Raises:
        UnservedField: there is such a field.
    """
    for field in asked_fields(request):
        _unserved(field, field)


def set_plan_fields(params: "SamplingParams", asked: Mapping[str, Any]) -> None:
    """Set the fields of a body on `params`, with their packed arrays read.

    Raises:
        ValueError: an array cannot be read, or a field is too long; the message has its path.
    """
    for field, value in asked.items():
        setattr(params, field, READERS[field](value, field))


def refuse_beams(asked: Mapping[str, Any]) -> NoReturn:
    """Refuse fields that come with beam search.

    Raises:
        ValueError: always; the message names the first field.
    """
    reject(
        next(iter(asked)),
        "is not supported with use_beam_search: a beam is sent anew at each token, with what it "
        "generated as its prompt",
    )


def without_values(request: Any) -> Any:
    """Return a body as it is logged: the fields that steer or capture are left out."""
    asked = asked_fields(request) if isinstance(request, BaseModel) else {}
    if not asked:
        return request
    copy = request.model_copy()
    assert copy.model_extra is not None
    copy.model_extra.update(dict.fromkeys(asked, "..."))
    return copy
