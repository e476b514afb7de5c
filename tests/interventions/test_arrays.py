# SPDX-License-Identifier: Apache-2.0
"""Whatever passes for an array is refused by its field, or means the numbers that it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.plans import VECTOR, config_of, plan_of
from vllm.entrypoints.serve.steering.client.arrays import pack, pack_layers, packed_fields, unpack
from vllm.pilot.directions import mean_difference
from vllm.pilot.linear_probe import fit_probe
from vllm.v1.capture import CapturedRows
from vllm.v1.interventions.errors import InterventionError

pytestmark = pytest.mark.quick

ROW = np.array(VECTOR)
OPS: dict[str, Any] = {
    "steering_families": ["add", "replace", "ablate", "gate"],
    "capture_consumers": ["inline"],
}
AT = {"point": "post_block", "layers": [1]}
HOOKS = {"hooks": {"post_block": [1]}}
GATE = {"threshold": 0.0, "sharpness": 1.0}
ABLATE = {**AT, "op": "ablate", "direction": VECTOR}
RULE = {"name": "r", "point": "post_block", "layer": 1, "threshold": 0.0}

FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "steering_vectors.post_block.1": lambda v: {"steering_vectors": {"post_block": {1: v}}},
    "steering_vectors.post_block.1.vector": lambda v: {
        "steering_vectors": {"post_block": {1: {"vector": v, "scale": 2.0}}}
    },
    "steering[0].direction": lambda v: {"steering": [{**ABLATE, "direction": v}]},
    "steering[0].gate.probe": lambda v: {"steering": [{**ABLATE, "gate": {**GATE, "probe": v}}]},
    "rules[0].probe": lambda v: {"rules": [{**RULE, "probe": v}]},
}
"""Fields that have a vector."""
ROWS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "steering[0].values": lambda v: {
        "steering": [{**AT, "op": "replace", "values": v, "positions": [1, 2]}]
    },
    "capture.inline.project": lambda v: {"capture": {"inline": {**HOOKS, "project": v}}},
}
"""Fields that have rows."""


def captured(values: np.ndarray) -> CapturedRows:
    """The rows of a site, as a user gets them; of one row if that is a vector."""
    rows = np.atleast_2d(values)
    at = np.arange(len(rows))
    return CapturedRows(at, at, torch.from_numpy(rows), at)


class Quantity(np.ndarray):
    """An array with a unit, as packages for physics have them."""


class Tagged(torch.Tensor):
    """A tensor that says more of its values."""


class Raising:
    """An array to numpy, that cannot be one."""

    def __array__(self, *args: Any, **more: Any) -> np.ndarray:
        raise RuntimeError("not here")

    def __index__(self) -> int:
        raise RuntimeError("not here either")


def negated(array: np.ndarray) -> torch.Tensor:
    """The same numbers, as a view of others whose sign torch has yet to turn."""
    made = torch.complex(torch.zeros(array.shape).double(), torch.from_numpy(-array)).conj().imag
    assert made.is_neg()
    return made


REFUSED: dict[str, Callable[[np.ndarray], Any]] = {
    "matrix": np.matrix,
    "masked": lambda a: np.ma.array(a, mask=a == a.flat[0]),
    "no mask": np.ma.array,
    "unit": lambda a: a.view(Quantity),
    "structured": lambda a: a.astype([("x", "f8")]),
    "record": lambda a: np.rec.array(a.astype([("x", "f8")])),
    "objects": lambda a: a.astype(object),
    "text": lambda a: a.astype(str),
    "bools": lambda a: a > 0,
    "ints": lambda a: a.astype(int),
    "complex": lambda a: a.astype(complex),
    "raising": lambda a: Raising(),
    "memory": lambda a: memoryview(a.data),
    "tensor subclass": lambda a: torch.from_numpy(a).as_subclass(Tagged),
    "lazy": lambda a: torch.nn.UninitializedParameter(),
    "sparse": lambda a: torch.from_numpy(a).to_sparse(),
    "meta": lambda a: torch.from_numpy(a).to("meta"),
    "complex tensor": lambda a: torch.from_numpy(a).to(torch.complex64),
    "bool tensor": lambda a: torch.from_numpy(a) > 0,
    "quantized": lambda a: torch.quantize_per_tensor(
        torch.from_numpy(a).float(), 0.1, 0, torch.qint8
    ),
    "pairs in bytes": lambda a: torch.zeros(a.shape, dtype=torch.uint8).view(
        torch.float4_e2m1fn_x2
    ),
    "nan": lambda a: a * np.nan,
    "long double": lambda a: a * np.longdouble("1e4000"),
    "arrays of numbers": lambda a: [np.ma.masked for _ in a],
}  # fmt: skip
TAKEN: dict[str, Callable[[np.ndarray], Any]] = {
    "list": lambda a: a.tolist(),
    "float32": lambda a: a.astype(np.float32),
    "big endian": lambda a: a.astype(">f8"),
    "long double": lambda a: a.astype(np.longdouble),
    "strides": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "read only": lambda a: np.broadcast_to(a, a.shape),
    "parameter": lambda a: torch.nn.Parameter(torch.from_numpy(a)),
    "needs grad": lambda a: torch.from_numpy(a.copy()).requires_grad_() * 1.0,
    "bfloat16": lambda a: torch.from_numpy(a).bfloat16(),
    "negative bit": negated,
    "captured": lambda a: CapturedRows(
        np.zeros(1), np.zeros(1), torch.from_numpy(np.atleast_2d(a)), np.zeros(1)
    ).values[slice(None) if a.ndim == 2 else 0],
    "captured rows": captured,
}
"""Twins, which all say `VECTOR`."""


NAMES = np.array(["pre_attn", "post_block"])
NAMED: dict[str, dict[str, Any]] = {
    "steering[0].point": {"steering": [{**ABLATE, "point": NAMES}]},
    "steering[0].op": {"steering": [{**ABLATE, "op": NAMES}]},
    "steering[0].positions": {"steering": [{**ABLATE, "positions": NAMES}]},
    "capture.inline.positions.modality": {
        "capture": {"inline": {**HOOKS, "positions": {"modality": NAMES}}}
    },
    "capture.inline.positions.images": {
        "images": [(1, 2)],
        "capture": {"inline": {**HOOKS, "positions": {"images": NAMES}}},
    },
    "capture.inline.positions.of": {
        "capture": {"inline": {**HOOKS, "positions": {"start": 0, "of": NAMES}}}
    },
    "steering_modules": {"steering_modules": NAMES},
}
"""Fields with an array where a name is meant."""


@pytest.mark.parametrize("field", NAMED)
def test_an_array_of_names_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(InterventionError) as refused:
        sent(NAMED[field])
    assert str(refused.value.parameter) == field


def test_a_vector_is_one_captured_row() -> None:
    """Of several rows it is not clear which one is meant."""
    with pytest.raises(InterventionError, match=r"has shape \[2, 4\], the model needs \[4\]"):
        sent(FIELDS["rules[0].probe"](captured(np.stack([ROW, ROW]))))


def sent(fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(plan_of(config=config_of(**OPS), **fields))


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("field", [*FIELDS, *ROWS])
def test_what_is_no_plain_array_is_refused_by_its_field(field: str, kind: str) -> None:
    array = ROW if field in FIELDS else np.stack([ROW, ROW + 1])
    with pytest.raises(InterventionError) as refused:
        sent((FIELDS | ROWS)[field](REFUSED[kind](array)))
    assert str(refused.value.parameter).startswith(field)


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("field", [*FIELDS, *ROWS])
def test_other_forms_of_an_array_are_the_same_plan(field: str, kind: str) -> None:
    """And that of another array is another."""
    array = ROW if field in FIELDS else np.stack([ROW, ROW + 1])
    ask = (FIELDS | ROWS)[field]
    assert sent(ask(TAKEN[kind](array))) == sent(ask(array))
    assert sent(ask(TAKEN[kind](array * [1, 1, 1, 0.5]))) != sent(ask(array))


def test_arrays_of_a_file_are_arrays(tmp_path: Any) -> None:
    np.save(tmp_path / "a.npy", ROW)
    for ask in FIELDS.values():
        assert sent(ask(np.load(tmp_path / "a.npy", mmap_mode="r"))) == sent(ask(ROW))


@pytest.mark.parametrize(
    "scale",
    [np.ma.masked, np.ma.array(2.0), np.matrix([[2.0]]), torch.ones(()).to_sparse(), Raising(),
     torch.tensor(2.0).as_subclass(Tagged), np.array(2.0, object), np.array(2j)],
)  # fmt: skip
def test_a_number_is_not_made_of_what_says_more(scale: Any) -> None:
    ask = FIELDS["steering_vectors.post_block.1.vector"]
    fields = ask(ROW)
    fields["steering_vectors"]["post_block"][1]["scale"] = scale
    with pytest.raises(InterventionError, match=r"\.scale: must be a number") as refused:
        sent(fields)
    assert refused.value.parameter == "steering_vectors.post_block.1.scale"
    fields["steering_vectors"]["post_block"][1]["scale"] = np.array(2.0, np.longdouble)
    assert sent(fields) == sent(ask(ROW))


@pytest.mark.parametrize("positions", [np.ma.array([1, 2], mask=[0, 1]), np.matrix([1, 2])])
def test_positions_are_not_made_of_what_says_more(positions: Any) -> None:
    entry = {"vector": ROW, "positions": positions}
    with pytest.raises(InterventionError) as refused:
        sent({"steering_vectors": {"post_block": {1: entry}}})
    assert refused.value.parameter == "steering_vectors.post_block.1.positions"


@pytest.mark.parametrize("kind", ["masked", "structured", "objects", "text", "bools", "complex"])
def test_a_client_packs_no_such_array(kind: str) -> None:
    """The path names the field; others are packed."""
    wrong = REFUSED[kind](ROW)
    with pytest.raises(ValueError, match=r"^steering\[0\]\.direction: "):
        packed_fields({"steering": [{"direction": wrong}]})
    with pytest.raises(ValueError, match=r"^vectors\[1\]: "):
        pack_layers({0: ROW, 1: wrong})
    with pytest.raises(ValueError, match=r"^values: "):
        pack(wrong)
    for given in (ROW.astype(">f4"), ROW.astype(np.longdouble), VECTOR, (ROW * 4).astype(int) / 4):
        assert unpack(pack(given)).tolist() == VECTOR


@pytest.mark.parametrize("kind", ["masked", "structured", "objects", "text", "complex"])
def test_the_toolkit_takes_no_such_rows(kind: str) -> None:
    rows = np.stack([ROW, ROW + 1])
    for find in (mean_difference, fit_probe):
        with pytest.raises(ValueError, match=r"^negative: "):
            find(rows + 3, REFUSED[kind](rows))
        find(rows + 3, rows)
