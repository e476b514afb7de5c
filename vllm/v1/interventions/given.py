# SPDX-License-Identifier: Apache-2.0
"""Reader of what users say: a value that carries the path of its field to where it is read."""

import math
import re
import sys
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from vllm.config.points import STREAM_POINTS
from vllm.v1.capture.results import CapturedRows
from vllm.v1.interventions.errors import refuse_unknown_keys, reject, show, show_key
from vllm.v1.interventions.likely import likely
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_heads, need_layers, need_point
from vllm.v1.interventions.values import Array, is_array, is_plain, plain, plain_list, says

MAX_SCALE = 1e30
"""Largest number in a request: products stay far inside float64, and the sum is checked again in
the model's dtype."""

_NOTHING: Mapping[str, str] = {}

Select = Callable[[Any, str], Positions]
"""Resolves a value of `positions`, given with its path, to the positions it means."""


class Given:
    """A value as a user gave it, and the path of its field.

    A reader returns the value as Python's own, or refuses it with a message, its own or one that it
    is given.

    Args:
        value: anything.
        path: where it stands, such as `rules[0].need`; "" for a body, whose fields are named alone.
    """

    __slots__ = ("path", "value")

    def __init__(self, value: Any, path: str) -> None:
        self.value = value
        self.path = path

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def __getitem__(self, key: str) -> "Given":
        """The value of a field; None if it is not given."""
        return Given(_values(self.value.get(key)), self._at(key))

    def get(self, key: str, default: Any) -> "Given":
        """The value of a field, or its default, which is read as if it was given."""
        return Given(_values(self.value.get(key, default)), self._at(key))

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def refuse(self, message: str, shown: str = "") -> NoReturn:
        """Raise an `InterventionError` for this field.

        Args:
            message: "{given}" in it becomes the value, shortened.
            shown: what it becomes in its place.
        """
        reject(self.path, message.replace("{given}", shown or show(self.value)))

    def fields(
        self, needed: tuple[str, ...] = (), allowed: tuple[str, ...] = (), of: str = ""
    ) -> "Given":
        """The fields of a mapping, for which nothing but their keys is checked.

        Args:
            of: names the mapping in the error for a needed field that is not given; "" if that is
                an error of the field.
        """
        known = tuple(dict.fromkeys((*needed, *allowed)))
        refuse_unknown_keys(self.mapping(), known, self.path)
        found = {plain(key): entry for key, entry in self.value.items()}
        for key in needed:
            if key not in found and of:
                self.refuse(f"{of} needs {key!r}")
        return Given(found, self.path).need(*needed)

    def need(self, *keys: str) -> "Given":
        """The mapping, which must have some keys."""
        for key in keys:
            if key not in self:
                reject(self._at(key), "is missing")
        return self

    def mapping(self, example: str = "") -> Mapping[Any, Any]:
        """The mapping that the value is; the error for another value shows an example."""
        if not isinstance(self.value, Mapping):
            more = f" ({example})" if example else ""
            self.refuse("must be a mapping, got {given}", show(self.value) + more)
        return self.value

    def items(self) -> Iterator[tuple["Given", "Given"]]:
        """The keys and values of a mapping, both with the path of the value."""
        for key, entry in self.mapping().items():
            at = f"{self.path}.{show_key(key)}"
            yield Given(key, at), Given(_values(entry), at)

    def entries(self, message: str, least: float = 0, most: float = math.inf) -> Iterator["Given"]:
        """The entries of a list, which is counted before."""
        listed = plain_list(self.value)
        if listed is None:
            self.refuse(message)
        # A slice, because a range may be longer than len() can say.
        count = len(listed[: sys.maxsize] if isinstance(listed, range) else listed)
        if not least <= count <= most:
            self.refuse(message, f"{count}")
        return (Given(entry, f"{self.path}[{i}]") for i, entry in enumerate(listed))

    def plain(self) -> Any:
        """The value, as `values.plain` makes it."""
        return plain(self.value)

    def says(self, word: str) -> bool:
        """True if the value is this text."""
        return says(self.value, word)

    def choice(
        self, options: Collection[str], message: str, also: Mapping[str, str] = _NOTHING
    ) -> str:
        """One of some texts; where it is refused, the error names the one that was probably meant.

        Args:
            also: names of other tools -> the options that they mean, for that error.
        """
        value = plain(self.value)
        if not isinstance(value, str) or value not in options:
            self.refuse(message, show(value) + likely(value, options, also))
        return value

    def text(self, message: str, pattern: re.Pattern[str] | None = None) -> str:
        """A text, which matches a pattern as a whole."""
        value = plain(self.value)
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            self.refuse(message)
        return value

    def base64(self, message: str = "must be a string, base64, got {given}") -> bytes:
        """The bytes that a text in base64 stands for."""
        text = self.text(message)
        try:
            return b64decode(text, validate=True)
        except ValueError:
            self.refuse("is not base64")

    def flag(self) -> bool:
        """True or false."""
        value = plain(self.value)
        if not isinstance(value, bool):
            self.refuse("must be true or false, got {given}")
        return value

    def number(self) -> float:
        """A number that is finite and at most `MAX_SCALE` in size."""
        return _number(self.value, self.path)

    def point(self, shape: TapShape, allowed: Sequence[str] = STREAM_POINTS) -> str:
        """A point of the model, as `need_point` reads it."""
        return need_point(self.value, self.path, shape, allowed)

    def layers(self, point: str, shape: TapShape) -> "list[int]":
        """Layers that have a point, as `need_layers` reads them."""
        return need_layers(self.value, point, self.path, shape)

    def heads(self, point: str, shape: TapShape) -> "dict[int, tuple[int, ...]]":
        """Layer -> heads at a point of attention, as `need_heads` reads them."""
        return need_heads(self.value, point, self.path, shape)

    def positions(self, select: Select) -> Positions:
        """The positions that the value means."""
        return select(self.value, self.path)

    def array(self) -> Array:
        """An array or tensor as it is: dense, and of no subclass, for what that says of its values
        would be lost: a mask, a unit."""
        value = self.value
        if is_array(value):
            return value
        name = type(value).__name__
        if isinstance(value, torch.Tensor) and is_plain(value):
            layout = "nested" if value.is_nested else value.layout
            self.refuse(f"must be a dense tensor, got {layout} on {value.device}")
        if isinstance(value, Array):
            more = "which says more of its values"
            self.refuse(f"must be a plain array or tensor, got {name}, {more}")
        self.refuse("must be a list, a numpy array or a torch tensor, got {given}")

    def floats(self) -> torch.Tensor:
        """The values of an array, on the CPU, of a dtype that torch computes in."""
        array = self.array()
        if isinstance(array, torch.Tensor):
            pairs_in_bytes = torch.float4_e2m1fn_x2
            if array.is_floating_point() and array.dtype != pairs_in_bytes:
                return array.detach().cpu().resolve_neg()
        elif array.dtype.kind == "f":
            with np.errstate(over="ignore"):  # of long doubles; who needs finite ones looks
                return torch.from_numpy(array.astype(f"=f{min(array.itemsize, 8)}"))
        self.refuse(f"must be of a float dtype, got {array.dtype}")

    def vector(self, width: int) -> np.ndarray:
        """Finite numbers, float64 [width], from a list or tuple or a 1-D array of floats."""
        value = self.value
        if isinstance(value, list | tuple):
            if len(value) != width:
                self.refuse(f"has {len(value)} values, the model needs {width}")
            # A list of lists would reach numpy's own errors; a bool is an int to Python.
            if set(map(type, value)) != {float}:
                value = [_number(x, f"{self.path}[{i}]") for i, x in enumerate(value)]
            array = np.array(value, np.float64)
        else:
            if list(self.array().shape) != [width]:
                self.refuse(f"has shape {list(value.shape)}, the model needs [{width}]")
            array = self.floats().to(torch.float64).numpy()
        if not np.isfinite(array).all():
            self.refuse(f"is not finite at index {int(np.argmin(np.isfinite(array)))}")
        return array

    def of_lanes(self, hidden: int, lanes: int) -> np.ndarray:
        """A vector as `vector` reads it; for a stream of several lanes it may also be one vector
        for each lane, [lanes, hidden], which is returned flat."""
        value = self.value
        if isinstance(value, list | tuple):
            is_rows = bool(value) and isinstance(value[0], list | tuple)
        else:
            is_rows = self.array().ndim == 2
        if lanes == 1 or not is_rows:
            return self.vector(hidden)
        if len(value) != lanes:
            self.refuse(f"has {len(value)} rows, the model has {lanes} lanes")
        rows = (Given(row, f"{self.path}[{i}]").vector(hidden) for i, row in enumerate(value))
        return np.concatenate([*rows])

    def lane(self, lanes: int) -> "int":
        """One of several lanes of the stream."""
        if lanes == 1:
            self.refuse("this model's stream has one lane; leave it out")
        return self.int(0, lanes - 1, f"must be a lane, 0-{lanes - 1}, got {{given}}")

    # The last: what stands below it in a class means the method by its name.
    def int(
        self,
        least: float = -math.inf,
        most: float = math.inf,
        message: str = "must be an int, got {given}",
    ) -> int:
        """An int from `least` to `most`."""
        value = plain(self.value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(message)
        return value


def _values(entry: Any) -> Any:
    """Captured rows as the tensor of their values: of one row a vector."""
    if isinstance(entry, CapturedRows):
        return entry.values[0] if len(entry) == 1 else entry.values
    return entry


def _number(value: Any, path: str) -> float:
    value = plain(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        reject(path, f"must be a number, got {show(value)}")
    if not abs(value) <= MAX_SCALE:  # so that NaN is refused, too
        reject(path, f"must be finite and at most {MAX_SCALE:g}, got {show(value)}")
    return float(value)
