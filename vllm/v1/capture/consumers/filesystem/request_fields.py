# SPDX-License-Identifier: Apache-2.0
"""What a request asks of the filesystem consumer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.capture.file_format import FileLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class FilesystemCaptureRequest(Mapping[str, Any]):
    """The same as a dict of the fields that are not None; checked when the request starts."""

    hooks: Mapping[str, Any]
    """{point: layers}"""
    positions: Any = "last_prompt"
    request_id: str | None = None
    """The published name. None: the engine's id of the request. A request with several prompts or
    samples publishes `{request_id}-{prompt}-{sample}`, one for each completion."""
    tag: str | None = None
    """The folder. None: "default"."""
    project: Any = None
    """[k, hidden]: publish these projections of the rows in their place."""
    layout: FileLayout | None = None
    """None: the consumer's."""

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
