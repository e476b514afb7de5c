# SPDX-License-Identifier: Apache-2.0
"""Operations that steer, each in one record of a table.

An operation is numbers of the formula in `vllm.v1.steering_formula`, some fixed and some that a
user gives, and a vector. How it is read, written to files, scaled and documented follows from its
record.
"""

from dataclasses import dataclass
from typing import Any

INF = float("inf")


@dataclass(frozen=True)
class Number:
    """A number that a user gives.

    Args:
        key: of the operation, in requests and files.
        default: its value where it is not given; None if it must be. An infinite one is no value.
        columns: the formula's numbers that it becomes, fields of `Scalars`; the key if not given.
    """

    key: str
    default: float | None = None
    columns: tuple[str, ...] = ()
    least: float = -INF
    most: float = INF
    of_stream: bool = False
    """True if it is written into the stream, whose dtype it must fit."""
    flag: bool = False
    """True if a user gives true or false for it, 1 or 0 in the formula."""

    @property
    def becomes(self) -> tuple[str, ...]:
        """The formula's numbers that it becomes."""
        return self.columns or (self.key,)


@dataclass(frozen=True)
class Operation:
    """An operation, by what a user gives and what becomes of it."""

    name: str
    numbers: tuple[Number, ...] = ()
    fixed: tuple[tuple[str, float], ...] = ()
    """Numbers of the formula that are the same always."""
    vector: str = ""
    """The key of its vector; "" if it has none."""
    times: str = ""
    """The formula's number that the vector is multiplied with as it is written into the stream."""
    unit: bool = False
    """True if the vector is made to be of length 1."""
    other: str = ""
    """The key of a second direction: the vector is then along the first less the second, both of
    length 1; "" if there is none."""
    reads: str = ""
    """The key of the direction that it reads the row by; "" if it reads by its vector."""
    shift: str = ""
    """The key of what is added to what it reads; "" if there is none."""
    ranked: bool = False
    """True if what it reads by, its vector and its shift are of many terms, which act at once: [r,
    hidden], [hidden, r] and [r]."""
    rows: bool = False
    """True if `values`, one vector for each of `positions`, may stand in place of the vector."""
    one_of: tuple[str, ...] = ()
    """Keys of numbers of which one must be given."""
    scaled: str = ""
    """The formula's number that a module's scale multiplies; "" if none can be."""
    on_stream: bool = True
    """True if it acts on the residual stream."""
    on_heads: bool = False
    """True if it acts on heads of attention."""
    also: tuple[str, ...] = ()
    """Names that it has elsewhere, for errors that say which one was meant."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Keys that must be given, beside those of every operation."""
        vectors = filter(None, (self.reads, self.vector, self.other))
        return (*vectors, *(n.key for n in self.numbers if n.default is None))

    @property
    def optional(self) -> tuple[str, ...]:
        """Keys that may be left out, beside those of every operation."""
        numbers = (n.key for n in self.numbers if n.default is not None)
        return tuple(filter(None, (self.shift, *numbers)))

    @property
    def of_norms(self) -> bool:
        """True if the formula needs the row's norm for it."""
        columns = {column for n in self.numbers for column in n.becomes}
        return bool({"norm", "renorm"} & columns.union(dict(self.fixed)))

    def written(self, numbers: dict[str, float]) -> dict[str, Any]:
        """Return the keys and values that a user gives for some numbers of the formula: the first
        one always, others if they are not their default."""
        said: dict[str, Any] = {}
        for i, number in enumerate(self.numbers):
            value = numbers[number.becomes[0]]
            if abs(value) < INF and (i == 0 or value != number.default):
                said[number.key] = bool(value) if number.flag else value
        return said


_SCALE = Number("scale", 1.0, ("constant",))
_BY_NORM = Number("scale", None, ("norm",))
_STRENGTH = Number("strength", 1.0)
_LO, _HI = Number("lo", -INF, of_stream=True), Number("hi", INF, of_stream=True)
_VALUE = Number("value", None, ("lo", "hi"), of_stream=True)
_ALPHA = Number("alpha", 1.0, ("replace", "constant"), least=0, most=1)
_FACTOR = Number("factor", None, ("constant",))
_ZERO = (("lo", 0.0), ("hi", 0.0))
_FEATURE = (
    Number("bias", 0.0),
    Number("threshold", 0.0, ("above",), least=0),
    Number("value", INF, ("lo", "hi"), of_stream=True),
    _STRENGTH,
    Number("add", 0.0, ("constant",), of_stream=True),
    Number("only_if_active", 0.0, ("active",), flag=True),
)
_MIRROR = (("strength", 2.0), *_ZERO)
_LINEAR = (("above", -INF), *_ZERO)

_LISTED = (
    Operation(
        "add",
        (_SCALE,),
        (),
        "vector",
        "constant",
        rows=True,
        scaled="constant",
        on_heads=True,
        also=("actadd", "activation_addition", "add_vector", "caa", "direct", "steer"),
    ),
    Operation("norm_match", (_BY_NORM,), (), "direction", unit=True, rows=True, scaled="norm"),
    Operation(
        "ablate",
        (_STRENGTH,),
        _ZERO,
        "direction",
        unit=True,
        scaled="strength",
        also=("ablation", "directional_ablation", "erase", "orthogonalize", "project_out"),
    ),
    Operation("clamp", (_LO, _HI, _STRENGTH), (), "direction", unit=True, one_of=("lo", "hi")),
    Operation(
        "pin",
        (_VALUE, _STRENGTH),
        (),
        "direction",
        unit=True,
        also=("adjust_rs", "set", "set_value"),
    ),
    Operation("replace", (_ALPHA,), (), "values", also=("patch", "substitute")),
    Operation("normalize", fixed=(("renorm", 1.0),), also=("norm", "renormalize")),
    Operation("swap", (), _MIRROR, "direction", unit=True, other="other"),
    Operation(
        "feature",
        _FEATURE,
        vector="decoder",
        reads="encoder",
        one_of=("value", "add"),
        also=("clamp_feature", "latent", "sae"),
    ),
    Operation(
        "low_rank",
        (_STRENGTH,),
        _LINEAR,
        vector="B",
        reads="A",
        shift="c",
        ranked=True,
        scaled="strength",
        also=("linear_map", "lora", "loreft", "lowrank", "reft"),
    ),
    Operation("scale", (_FACTOR,), on_stream=False, on_heads=True),
)
OPERATIONS = {operation.name: operation for operation in _LISTED}
"""Name -> operation."""

ALSO = {name: operation.name for operation in _LISTED for name in operation.also}
"""Name of an operation elsewhere -> its name here."""

STREAM_OPERATIONS = tuple(o.name for o in OPERATIONS.values() if o.on_stream)
"""Names of operations on the residual stream."""

HEAD_OPERATIONS = tuple(o.name for o in OPERATIONS.values() if o.on_heads)
"""Names of operations on heads of attention, which are sums and factors and no terms."""

VECTORS = tuple(
    dict.fromkeys(k for o in _LISTED for k in (o.reads, o.vector, o.other, o.shift) if k)
)
"""Keys under which operations have vectors."""
