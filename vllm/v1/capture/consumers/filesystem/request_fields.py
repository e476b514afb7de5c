# SPDX-License-Identifier: Apache-2.0
"""The fields of a request to the filesystem consumer, as a Python type."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.capture.file_format import FileLayout
from vllm.v1.capture.small_rows import SmallDtype


@dataclass(frozen=True, kw_only=True, eq=False)
class FilesystemCaptureRequest(Mapping[str, Any]):
    """A request to the filesystem consumer, which `capture={"filesystem": ...}` takes like a dict.

    It is a mapping of the fields that are not None. They are checked when the request starts.
    """

    hooks: Mapping[str, Any] | None = None
    """The layers of each point to capture, `{point: layers}`."""
    attention: Mapping[str, Any] | None = None
    """Fields that say what to capture of attention weights, in place of `hooks` and `positions`."""
    features: Mapping[str, Any] | None = None
    """Activations of an autoencoder's features to capture; `hooks` may be left out."""
    positions: Any = None
    """Positions to capture; "last_prompt" where none are given, except with `attention`, which has
    none."""
    lane: int | None = None
    """The lane to capture, where the stream has several; None for all."""
    request_id: str | int | None = None
    """The id to find it by; None for the engine's id of the request. Its file has it as its name if
    it is safe as one. A request with several prompts or samples publishes
    `{name}-{prompt}-{sample}`, one for each completion."""
    tag: str | None = None
    """The folder; None for "default"."""
    project: Any = None
    """Directions, [k, hidden]: the rows' scores along them are published in the rows' place."""
    reduce: str | None = None
    """"mean" publishes the mean of the rows in their place."""
    layout: FileLayout | None = None
    """Layout of the request; None for the consumer's."""
    dtype: SmallDtype | None = None
    """Form of small rows; None for the consumer's, or the model's dtype."""
    metadata: Mapping[str, Any] | None = None
    """A small JSON object that is kept with the rows: labels, ids of a data set."""

    def __post_init__(self) -> None:
        if self.positions is None and self.attention is None:
            object.__setattr__(self, "positions", "last_prompt")

    def __getitem__(self, key: str) -> Any:
        try:
            value = vars(self)[key]
        except KeyError:
            raise KeyError(key) from None
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self) if vars(self)[field.name] is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
