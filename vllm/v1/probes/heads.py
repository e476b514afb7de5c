# SPDX-License-Identifier: Apache-2.0
"""Heads of probes: numbers that are made of a row's products with the probe's weights.

A worker multiplies rows of several layers with the weights, W x; all that follows is small, and
is made where rules are decided. So a head may read layers of several pipeline stages.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

MAX_UNITS = 256
"""The most rows of weights that a probe has: hidden units, or numbers of a linear head."""
MAX_OUTPUTS = 32
"""The most numbers that a head gives of a row."""

_C = (2 / np.pi) ** 0.5

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "sigmoid": lambda z: (1 + np.tanh(z / 2)) / 2,
    "silu": lambda z: z * (1 + np.tanh(z / 2)) / 2,
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(_C * (z + 0.044715 * z**3))),
}
"""Activations of hidden units by name, elementwise in float64."""


class Head(msgspec.Struct, frozen=True, tag_field="kind", dict=True):
    """Function of a row's products."""

    @property
    def kind(self) -> str:
        """Name of the kind, as files and rules say it."""
        return str(self.__struct_config__.tag)

    @property
    def units(self) -> int:
        """Number of products that it takes, of each site."""
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """Number of numbers that it gives of a row."""
        raise NotImplementedError

    def joined(self, products: np.ndarray) -> np.ndarray:
        """Join the products of several sites, float64 [n, sites, units] -> [n, units]: a product
        with the weights of all sites is the sum of these."""
        joined: np.ndarray = products[:, 0] if products.shape[1] == 1 else products.sum(1)
        return joined

    def numbers(self, joined: np.ndarray) -> np.ndarray:
        """Return the numbers of rows, float64 [n, units] -> [n, outputs]."""
        raise NotImplementedError


class Linear(Head, frozen=True, tag="linear"):
    """W x + b."""

    bias: tuple[float, ...] = (0.0,)

    @property
    def units(self) -> int:
        """One for each number."""
        return len(self.bias)

    @property
    def outputs(self) -> int:
        """One for each bias."""
        return len(self.bias)

    def fields(self) -> dict[str, Any]:
        """Return what a probe's file and a rule have of it."""
        return {"bias": np.array(self.bias, np.float32)}

    def numbers(self, joined: np.ndarray) -> np.ndarray:
        """Add the bias."""
        return joined + np.array(self.bias)


class Mlp(Head, frozen=True, tag="mlp"):
    """V f(W x + b) + c, with one layer of hidden units: the probes of Constitutional Classifiers++
    (arXiv 2601.04603) and of Gemini (arXiv 2601.11516) are linear or of this kind."""

    activation: str
    """Name of f, one of `ACTIVATIONS`."""
    bias: bytes
    """b, float32 [units], native endian."""
    weight: bytes
    """V, float32 [outputs, units]."""
    output_bias: bytes
    """c, float32 [outputs]."""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return b, V and c, float32."""
        bias, last = (np.frombuffer(b, np.float32) for b in (self.bias, self.output_bias))
        return bias, np.frombuffer(self.weight, np.float32).reshape(len(last), len(bias)), last

    @cached_property
    def _wide(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return b, the transposed V, and c in float64."""
        bias, weight, last = (values.astype(float) for values in self.arrays)
        return bias, weight.T, last

    @property
    def units(self) -> int:
        """One for each hidden unit."""
        return len(self.bias) // 4

    @property
    def outputs(self) -> int:
        """One for each row of V."""
        return len(self.output_bias) // 4

    def fields(self) -> dict[str, Any]:
        """Return what a probe's file and a rule have of it."""
        names = ("bias", "output_weight", "output_bias")
        return {"activation": self.activation, **dict(zip(names, self.arrays, strict=True))}

    def numbers(self, joined: np.ndarray) -> np.ndarray:
        """Take the hidden units' activations, times V, plus c."""
        bias, weight, last = self._wide
        made: np.ndarray = ACTIVATIONS[self.activation](joined + bias) @ weight + last
        return made


class Largest(Head, frozen=True, tag="largest"):
    """The largest of several sites' numbers, of those that are numbers: a dose has no weights."""

    @property
    def units(self) -> int:
        """One."""
        return 1

    @property
    def outputs(self) -> int:
        """One."""
        return 1

    def joined(self, products: np.ndarray) -> np.ndarray:
        """Return the largest, [n, 1]."""
        largest: np.ndarray = np.fmax.reduce(products, axis=1)
        return largest

    def numbers(self, joined: np.ndarray) -> np.ndarray:
        """Return it as it is."""
        return joined


AnyHead = Linear | Mlp | Largest
