# SPDX-License-Identifier: Apache-2.0
"""Fields of a capture request that ask for values made of rows, each with its reading.
A request has one of them at most.

`attention` is not among them: it names rows of its own (`attention.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config.points import BLOCK_POINTS
from vllm.v1.capture.registry import INLINE
from vllm.v1.interventions.frontend.request.autoencoder import features_making, hooks_of_features
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.lens import lens_making
from vllm.v1.interventions.frontend.request.matrices import (
    NOT_OF_STREAM,
    is_of_stream,
    matrices_of,
    matrix_digest,
)
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.makings import (
    AnyMaking,
    AsIs,
    Dose,
    Features,
    Lens,
    Making,
    Mean,
    Norms,
    Scores,
)
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_one_lane


@dataclass(frozen=True)
class Asked:
    """Rows that a capture request names, of which something is made."""

    request: Given
    sites: list[Site]
    heads: Mapping[Site, tuple[int, ...]]
    runs: Positions
    knows_end: bool
    """False if it takes a position that is known only when the answer is over."""
    shape: TapShape
    prompt: Prompt
    takes: Callable[[type[Making]], bool]
    """Tells whether the consumer takes a making that not all take."""
    catalog: ModuleCatalog | None
    """The modules that `project` may name; None outside requests."""
    matrices: dict[str, bytes]
    """Digest -> matrix; gets those of this request."""

    @property
    def of_stream(self) -> bool:
        """True if all rows are as wide as a lane of the residual stream."""
        return is_of_stream(self.sites)


def making_of(asked: Asked) -> AnyMaking:
    """Return the values that a request asks for in place of rows.

    Raises:
        ValueError: the value of a field is wrong, or fields exclude each other.
    """
    making: AnyMaking = AsIs()
    first = ""
    for field in _FIELDS:
        given = asked.request[field.name]
        if field.name not in asked.request or not field.is_asked(given):
            continue
        if first:
            given.refuse(f"cannot be combined with {first!r}; give a list of captures")
        first = field.name
        if field.consumers and not asked.takes(field.making):
            given.refuse(f"is for {field.consumers}")
        if field.check is not None:
            field.check(given, asked)
        making = field.make(given, asked)
    return making


def hooks_of(request: Given, shape: TapShape) -> Given:
    """Return the hooks of a request: those that it gives, or that one of its fields implies.

    Raises:
        ValueError: there are none.
    """
    for field in _FIELDS:
        if "hooks" not in request and field.name in request and field.hooks is not None:
            return Given(field.hooks(request[field.name], shape), request[field.name].path)
    if "hooks" not in request:
        request["hooks"].refuse("is missing: give {point: layers}")
    return request["hooks"]


def _has_value(given: Given) -> bool:
    return given.value is not None


@dataclass(frozen=True)
class _Field:
    """Field of a capture request, `Making.field` of what it asks for."""

    making: type[Making]
    make: Callable[[Given, Asked], AnyMaking]
    check: Callable[[Given, Asked], None] | None = None
    """Raises ValueError if the rows are of a kind that it does not take."""
    is_asked: Callable[[Given], bool] = _has_value
    consumers: str = ""
    """The consumers that take it, in words for an error; empty for all."""
    hooks: Callable[[Given, TapShape], dict[str, Any]] | None = None
    """Returns the hooks of a request that gives none."""

    @property
    def name(self) -> str:
        """Name of the field."""
        return self.making.field


def _scores(given: Given, asked: Asked) -> Scores:
    work, hidden = asked.prompt.work, asked.shape.hidden_size
    matrices = matrices_of(given, asked.shape, asked.sites, work, asked.catalog)
    digests = tuple(matrix_digest(matrix, asked.shape) for matrix in matrices)
    asked.matrices.update(zip(digests, matrices, strict=True))
    return Scores(digests, len(matrices[0]) // (4 * hidden))


def _check_mean(given: Given, asked: Asked) -> None:
    given.choice(("mean",), "must be 'mean', got {given}")
    if not asked.of_stream:
        given.refuse(NOT_OF_STREAM)


def _mean(given: Given, asked: Asked) -> Mean:
    length = len(asked.prompt.token_ids)
    if not asked.knows_end or asked.runs.stop > length:
        given.refuse(
            f"takes positions of the prompt, which has {length} tokens; for the mean of an answer "
            "send it as the end of a prompt"
        )
    return Mean(tuple(asked.runs.flat()))


def _check_lens(given: Given, asked: Asked) -> None:
    if given.value is not None:
        need_one_lane(given.path, asked.shape)
    if asked.heads or not asked.of_stream:
        given.refuse(NOT_OF_STREAM)


def _check_dose(given: Given, asked: Asked) -> None:
    need_one_lane(given.path, asked.shape)
    if other := {point for point, _ in asked.sites}.difference(BLOCK_POINTS):
        given.refuse(f"is of {', '.join(BLOCK_POINTS)}, where vectors are added, not {min(other)}")


_INLINE_ALONE = f"{INLINE!r} alone"

_FIELDS = (
    _Field(
        Mean,
        _mean,
        check=_check_mean,
    ),
    _Field(
        Lens,
        lambda given, asked: lens_making(given, asked.sites, asked.shape, asked.prompt),
        check=_check_lens,
        is_asked=lambda given: True,
        consumers=_INLINE_ALONE,
    ),
    _Field(
        Norms,
        lambda given, asked: Norms(),
        is_asked=lambda given: given.value is not None and given.flag(),
        consumers=_INLINE_ALONE,
    ),
    _Field(
        Dose,
        lambda given, asked: Dose(),
        check=_check_dose,
        is_asked=lambda given: given.value is not None and given.flag(),
        consumers=_INLINE_ALONE,
    ),
    _Field(
        Features,
        lambda given, asked: features_making(given, asked.sites, asked.shape),
        consumers=f"{INLINE!r} and 'filesystem'",
        hooks=hooks_of_features,
    ),
    _Field(Scores, _scores),
)
"""The fields, in the order in which they are read: matrices last, as they are large."""
