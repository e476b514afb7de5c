# SPDX-License-Identifier: Apache-2.0
"""From what a user writes in `steering` to operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import GAPS, SHAPE, VECTOR
from tests.support.terms import FAMILIES, selecting
from vllm.config.operations import STREAM_OPERATIONS
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.operations import Op, parse_ops
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.terms import make_term
from vllm.v1.steering_formula import INF, Scalars

pytestmark = pytest.mark.quick

PROMPT, END = 5, 9
UNIT = [x / np.linalg.norm(VECTOR) for x in VECTOR]
DECODER = [0.5, -1.0, 0.25, 2.0]
GATE = {"probe": VECTOR, "threshold": 0.5, "sharpness": 2.0}


def parse(
    *entries: Any,
    families: frozenset[str] = FAMILIES,
    max_terms: int = 4,
    shape: Any = SHAPE,
) -> list[Op]:
    select = selecting(PROMPT, END)
    return parse_ops(list(entries), "steering", shape, families, select, max_terms)


def entry(op: str, **fields: Any) -> dict[str, Any]:
    return {"op": op, "point": "post_block", "layers": 1, **fields}


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, np.float32).tolist()


@pytest.mark.parametrize(
    ("asked", "scalars", "vector"),
    [
        (entry("add", vector=VECTOR), Scalars(constant=1.0), VECTOR),
        (entry("add", vector=VECTOR, scale=-2), Scalars(constant=-2.0), VECTOR),
        (entry("norm_match", direction=VECTOR, scale=0.3), Scalars(norm=0.3), UNIT),
        (entry("ablate", direction=VECTOR), Scalars(strength=1.0, lo=0.0, hi=0.0), UNIT),
        (entry("ablate", direction=VECTOR, strength=2), Scalars(strength=2, lo=0, hi=0), UNIT),
        (entry("clamp", direction=VECTOR, lo=-1, hi=2.5), Scalars(strength=1, lo=-1, hi=2.5), UNIT),
        (entry("clamp", direction=VECTOR, hi=3), Scalars(strength=1, lo=-INF, hi=3), UNIT),
        (entry("clamp", direction=VECTOR, lo=3), Scalars(strength=1, lo=3, hi=INF), UNIT),
        (entry("pin", direction=VECTOR, value=7), Scalars(strength=1, lo=7, hi=7), UNIT),
        (entry("clamp", direction=VECTOR, lo=3, strength=0.5), Scalars(strength=0.5, lo=3), UNIT),
        (
            entry("pin", direction=VECTOR, value=7, strength=-2),
            Scalars(strength=-2, lo=7, hi=7),
            UNIT,
        ),
        (entry("replace", values=VECTOR), Scalars(replace=1.0, constant=1.0), VECTOR),
        (
            entry("replace", values=np.array(VECTOR), alpha=0.5),
            Scalars(replace=0.5, constant=0.5),
            VECTOR,
        ),
        (entry("normalize"), Scalars(renorm=1.0), [0.0] * 4),
        (
            entry("swap", direction=[3.0, 0, 0, 0], other=[0, 0, 2.0, 0]),
            Scalars(strength=2.0, lo=0.0, hi=0.0),
            [0.5**0.5, 0.0, -(0.5**0.5), 0.0],
        ),
        (
            entry("feature", encoder=VECTOR, decoder=DECODER, value=8, bias=-0.5, threshold=0.25),
            Scalars(strength=1.0, lo=8.0, hi=8.0, bias=-0.5, above=0.25),
            DECODER,
        ),
        (
            entry("feature", encoder=VECTOR, decoder=DECODER, add=3, only_if_active=True),
            Scalars(strength=1.0, constant=3.0, active=1.0),
            DECODER,
        ),
    ],
)
def test_each_operation(asked: dict[str, Any], scalars: Scalars, vector: list[float]) -> None:
    (op,) = parse(asked)
    assert (op.name, op.sites, op.positions) == (asked["op"], [("post_block", 1)], None)
    assert (op.frozen, op.gated) == (False, False)
    (term,) = op.terms
    assert term.scalars == scalars
    assert floats(term.vector) == pytest.approx(vector, rel=1e-7)
    assert term.probe == b""
    assert op.terms_at(0) == op.terms_at(1000) == [term]


def test_a_feature_reads_by_its_encoder_and_is_told_what_to_do() -> None:
    (op,) = parse(entry("feature", encoder=VECTOR, decoder=DECODER, value=0))
    assert floats(op.terms[0].encoder) == pytest.approx(VECTOR, rel=1e-7)
    (other,) = parse(entry("feature", encoder=DECODER, decoder=DECODER, value=0))
    assert op.terms[0].digest != other.terms[0].digest
    with pytest.raises(InterventionError, match="feature needs 'value' or 'add'"):
        parse(entry("feature", encoder=VECTOR, decoder=VECTOR))
    with pytest.raises(InterventionError, match=r"threshold: must be from 0 to inf, got -1"):
        parse(entry("feature", encoder=VECTOR, decoder=VECTOR, value=0, threshold=-1))
    with pytest.raises(InterventionError, match=r"only_if_active: must be true or false, got 1"):
        parse(entry("feature", encoder=VECTOR, decoder=VECTOR, value=0, only_if_active=1))
    with pytest.raises(InterventionError, match=r"encoder: "):
        parse(entry("feature", encoder=VECTOR[:2], decoder=VECTOR, value=0))


DOWN, UP = np.arange(8.0).reshape(2, 4) - 3, np.linspace(-1, 1, 8).reshape(4, 2)


@pytest.mark.parametrize(
    ("A", "B", "c"),
    [
        (DOWN, UP, np.array([0.5, -2.0])),
        (DOWN.tolist(), UP.tolist(), [0.5, -2.0]),
        (torch.from_numpy(DOWN), torch.from_numpy(UP).bfloat16().double(), (0.5, -2)),
        (DOWN, UP, None),
    ],
)
def test_a_low_rank_change_is_a_term_for_each_of_its_rank(A: Any, B: Any, c: Any) -> None:
    more = {} if c is None else {"c": c}
    (op,) = parse(entry("low_rank", A=A, B=B, strength=0.5, **more))
    assert (op.width, op.each, op.positions) == (2, False, None)
    assert op.terms_at(0) == op.terms and len(op.terms) == 2
    for i, term in enumerate(op.terms):
        assert floats(term.encoder) == (-DOWN[i]).tolist()
        assert floats(term.vector) == np.asarray(B)[:, i].astype(np.float32).tolist()
        bias = 0.0 if c is None else -[0.5, -2.0][i]
        assert term.scalars == Scalars(
            strength=0.5, lo=0, hi=0, above=-INF, bias=bias, opens=i == 0, closes=i == 1
        )


def test_a_low_rank_change_counts_as_often_as_its_rank() -> None:
    change = entry("low_rank", A=DOWN, B=UP)
    assert [op.width for op in parse(change, entry("ablate", direction=VECTOR), max_terms=3)] == [
        2, 1,
    ]  # fmt: skip
    with pytest.raises(InterventionError, match=r"\[1\]: comes to 4 ops at post_block 1, .*=3"):
        parse(change, change, max_terms=3)
    with pytest.raises(InterventionError, match=r"A: has 2 rows, allowed are 1-1: each counts"):
        parse(change, max_terms=1)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"A": DOWN[:, :3]}, r"A: has shape \[2, 3\], the model needs \[2, 4\]"),
        ({"A": [*DOWN.tolist()[:1], [1.0]]}, r"A\[1\]: has 1 values, the model needs 4"),
        ({"A": []}, r"A: has 0 rows, allowed are 1-4"),
        ({"A": np.array(1.0)}, r"A: has 0 rows, allowed are 1-4"),
        ({"A": VECTOR}, r"A\[0\]: must be a list"),
        ({"A": "x"}, r"A: must be a list, a numpy array or a torch tensor, got 'x'"),
        ({"A": DOWN * np.inf}, r"A: is not finite at index 0"),
        ({"A": DOWN.astype(int)}, r"A: must be of a float dtype"),
        ({"B": UP.T}, r"B: has shape \[2, 4\] \(transpose it\), the model needs \[4, 2\]"),
        ({"B": UP.tolist()[:3]}, r"B: has shape \[3, ...\], the model needs \[4, 2\]"),
        ({"B": UP * 1e300}, r"B: overflows float32"),
        ({"A": DOWN * 1e300}, r"A: overflows float32"),
        ({"c": [1.0]}, r"c: has 1 values, the model needs 2"),
        ({"c": [1.0, 1e39]}, r"c: overflows float32"),
    ],
)
def test_matrices_that_fit_nothing_are_named(over: dict[str, Any], message: str) -> None:
    with pytest.raises(InterventionError, match=rf"^steering\[0\]\.{message}"):
        parse(entry("low_rank", **{"A": DOWN, "B": UP, **over}))


def test_a_direction_and_itself_have_nothing_to_swap() -> None:
    for other in (VECTOR, np.array(VECTOR) * 3):
        with pytest.raises(InterventionError, match="is zero: it has no direction"):
            parse(entry("swap", direction=VECTOR, other=other))
    with pytest.raises(InterventionError, match=r"other: is zero"):
        parse(entry("swap", direction=VECTOR, other=[0.0] * 4))


@pytest.mark.parametrize("tiny", [1e-200, 1e200])
def test_a_direction_of_any_length_is_a_direction(tiny: float) -> None:
    direction = np.array(VECTOR) * tiny
    (op,) = parse(entry("ablate", direction=direction))
    assert floats(op.terms[0].vector) == pytest.approx(UNIT, rel=1e-7)
    assert direction.tolist() == (np.array(VECTOR) * tiny).tolist()


def test_layers_and_positions() -> None:
    (op,) = parse(entry("normalize", layers="0-2", positions=[7, 2]))
    assert op.sites == [("post_block", n) for n in (0, 1, 2)]
    assert op.positions == Positions.of([2, 7])
    assert [bool(op.terms_at(p)) for p in range(9)] == [p in (2, 7) for p in range(9)]
    (op,) = parse(entry("normalize", point="post_attn", layers="all"))
    assert op.sites == [("post_attn", n) for n in (0, 1, 3)]
    (op,) = parse(entry("normalize", point="pre_attn", layers=[2, 0]), shape=GAPS)
    assert op.sites == [("pre_attn", 0), ("pre_attn", 2)]


def test_several_points_at_once() -> None:
    """ "all" is what each layer has; a list is meant as it is said."""
    (op,) = parse(entry("normalize", point="all", layers="1-2"))
    one = [("pre_attn", 1), ("post_attn", 1), ("post_block", 1)]
    assert op.sites == [*one, ("pre_attn", 2), ("post_block", 2)]
    (op,) = parse(entry("normalize", point="all", layers="all"))
    assert len(op.sites) == sum(len(layer.points) for layer in SHAPE.layers.values())
    (op,) = parse(entry("normalize", point=["post_block", "pre_attn"], layers=[2, 0]))
    pairs = [(n, p) for n in (0, 2) for p in ("pre_attn", "post_block")]
    assert op.sites == [(point, layer) for layer, point in pairs]
    with pytest.raises(InterventionError, match="layer 2 has no point 'post_attn'"):
        parse(entry("normalize", point=["pre_attn", "post_attn"], layers="1-2"))
    with pytest.raises(InterventionError, match=r"layers: layer 9 is out of range"):
        parse(entry("normalize", point="all", layers=9))


ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "values",
    [ROWS, ROWS.tolist(), torch.from_numpy(ROWS).bfloat16(), [*torch.from_numpy(ROWS).half()]],
)
@pytest.mark.parametrize(
    ("positions", "order"),
    [
        ([1, 4, 6], [1, 4, 6]),
        ([6, 1, 4], [6, 1, 4]),
        ((6, 4, 1), [6, 4, 1]),
        (range(8, 2, -2), [8, 6, 4]),
    ],
)
def test_replace_has_a_term_for_each_position(values: Any, positions: Any, order: Any) -> None:
    (op,) = parse(entry("replace", values=values, positions=positions, alpha=0.25))
    assert op.positions == Positions.of(order)
    for position in range(END):
        terms = op.terms_at(position)
        if position not in order:
            assert terms == []
            continue
        (term,) = terms
        assert floats(term.vector) == ROWS[order.index(position)].tolist()
        assert term.scalars == Scalars(replace=0.25, constant=0.25)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ["add", "norm_match"])
def test_additions_with_a_vector_for_each_position(name: str, gated: bool) -> None:
    more = {"gate": GATE} if gated else {}
    rows = ROWS + 1
    (op,) = parse(entry(name, values=rows, positions=[6, 1, 4], scale=2.5, **more))
    one = Scalars(constant=2.5) if name == "add" else Scalars(norm=2.5)
    for position, row in zip([6, 1, 4], rows, strict=True):
        (term,) = op.terms_at(position)
        assert bool(term.probe) == gated
        want = row if name == "add" else row / np.linalg.norm(row)
        assert floats(term.vector) == pytest.approx(want.tolist(), rel=1e-6)
        assert term.scalars[:7] == one[:7]
    assert op.terms_at(0) == []


def test_one_row_replaces_all_positions_or_those_that_are_named() -> None:
    (everywhere,) = parse(entry("replace", values=VECTOR))
    (some,) = parse(entry("replace", values=torch.tensor(VECTOR), positions=[1, 4]))
    (each,) = parse(entry("replace", values=[VECTOR, VECTOR], positions=[1, 4]))
    assert len(everywhere.terms) == len(some.terms) == 1 and len(each.terms) == 2
    assert everywhere.positions is None and some.positions == each.positions
    assert some.terms[0] == each.terms[0] == everywhere.terms[0]


def test_replace_by_name_takes_rows_in_the_order_of_the_positions() -> None:
    values = np.arange(16.0).reshape(4, 4)
    (op,) = parse(entry("replace", values=values, positions="all_generated"))
    terms = [term for p in range(PROMPT, END) for term in op.terms_at(p)]
    assert [floats(term.vector) for term in terms] == values.tolist()


def test_gates() -> None:
    row, last, after = parse(
        entry("add", vector=VECTOR, gate=GATE),
        entry("add", vector=VECTOR, gate=GATE | {"when": "last_prompt"}),
        entry("add", vector=VECTOR, gate=GATE | {"when": "last_prompt"}, positions="all_generated"),
    )
    assert row.terms[0].scalars == Scalars(constant=1.0, threshold=0.5, sharpness=2.0)
    assert floats(row.terms[0].probe) == VECTOR  # not normalised
    assert (row.gated, row.frozen, row.positions) == (True, False, None)
    assert last.terms[0].scalars == row.terms[0].scalars._replace(frozen=1.0)
    assert (last.gated, last.frozen) == (True, True)
    assert last.positions == Positions([(PROMPT - 1, END)])
    assert after.positions == Positions([(PROMPT, END)])
    (deciding,) = after.deciding()
    assert deciding.scalars == Scalars(threshold=0.5, sharpness=2.0, frozen=1.0)
    assert deciding.probe == after.terms[0].probe
    assert deciding.digest != after.terms[0].digest


def test_the_probe_of_a_cosine_is_of_length_1() -> None:
    one, scaled, dot = parse(
        entry("ablate", direction=VECTOR, gate=GATE | {"cosine": True}),
        entry(
            "ablate",
            direction=VECTOR,
            gate=GATE | {"cosine": True, "probe": [7 * x for x in VECTOR]},
        ),
        entry("ablate", direction=VECTOR, gate=GATE | {"cosine": False}),
    )
    assert floats(one.terms[0].probe) == pytest.approx(UNIT, rel=1e-7)
    assert one.terms[0].scalars.cosine == 1 and dot.terms[0].scalars.cosine == 0
    assert floats(scaled.terms[0].probe) == pytest.approx(floats(one.terms[0].probe), rel=1e-6)
    assert floats(dot.terms[0].probe) == VECTOR


def test_digest_is_of_all_that_acts() -> None:
    vector, probe = bytes(range(16)), bytes(range(16, 32))
    terms = [
        make_term(Scalars(), vector),
        make_term(Scalars(), vector, probe),
        make_term(Scalars(), vector[::-1]),
        make_term(Scalars(), vector, vector),
        make_term(Scalars(), vector + probe),
        make_term(Scalars(), b"", vector + probe),
        *(make_term(Scalars()._replace(**{name: 2.0}), vector) for name in Scalars._fields),
    ]
    digests = [term.digest for term in terms]
    assert len(set(digests)) == len(digests)
    assert make_term(Scalars(), vector).digest == digests[0]


def test_operations_at_one_site_are_counted() -> None:
    ops = [entry("normalize", layers=layer) for layer in ("all", 1, [1, 2], 1)]
    assert len(parse(*ops)) == 4
    with pytest.raises(InterventionError, match=r"steering\[4\]: comes to 5 ops at"):
        parse(*ops, entry("normalize", layers="0-1"))
    assert len(parse(*ops, entry("normalize", layers=0))) == 5


def test_each_family_is_asked_for_by_name() -> None:
    asked = {
        "add": entry("add", vector=VECTOR),
        "norm_match": entry("norm_match", direction=VECTOR, scale=1),
        "ablate": entry("ablate", direction=VECTOR),
        "clamp": entry("clamp", direction=VECTOR, lo=0),
        "pin": entry("pin", direction=VECTOR, value=0),
        "replace": entry("replace", values=ROWS, positions=[0, 1, 2]),
        "normalize": entry("normalize"),
        "swap": entry("swap", direction=VECTOR, other=VECTOR[::-1]),
        "feature": entry("feature", encoder=VECTOR, decoder=VECTOR[::-1], add=1),
        "low_rank": entry("low_rank", A=[VECTOR], B=[[x] for x in VECTOR]),
        "gate": entry("add", vector=VECTOR, gate=GATE),
    }
    assert asked.keys() == FAMILIES
    for family, op in asked.items():
        path = r"steering\[0\]\.gate" if family == "gate" else r"steering\[0\]\.op"
        rest = FAMILIES - {family}
        assert len(parse(op, families=frozenset({op["op"], family}))) == 1
        with pytest.raises(InterventionError, match=f"{path}: .*without '{family}'") as error:
            parse(op, families=rest)
        assert family not in str(error.value).rpartition(" has ")[2].split(", ")
    assert set(STREAM_OPERATIONS) < FAMILIES


def replace_with(values: Any, positions: Any = (1, 2, 3), **more: Any) -> dict[str, Any]:
    return entry("replace", values=values, positions=positions, **more)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (5, "steering[0]: must be a mapping, got 5"),
        ({}, "steering[0].op: unknown operation None; operations are add, norm_match"),
        (entry("subtract"), "steering[0].op: unknown operation 'subtract'"),
        (entry("add"), "steering[0]: add needs 'vector'"),
        ({"op": "normalize", "layers": 1}, "steering[0]: normalize needs 'point'"),
        ({"op": "normalize", "point": "pre_attn"}, "steering[0]: normalize needs 'layers'"),
        (entry("pin", direction=VECTOR), "steering[0]: pin needs 'value'"),
        (entry("normalize", scale=1), "steering[0]: unknown keys ['scale'], allowed are op"),
        (entry("add", vector=VECTOR, lo=1), "steering[0]: unknown keys ['lo'], allowed are op"),
        (entry("normalize", point="mid"), "steering[0].point: unknown point 'mid'"),
        (entry("normalize", layers=4), "steering[0].layers: layer 4 is out of range"),
        (entry("normalize", layers=[1, "1"]), "steering[0].layers: names layer 1 twice"),
        (entry("normalize", point="post_attn", layers=2), "steering[0].layers: layer 2 has no"),
        (entry("add", vector=[1.0]), "steering[0].vector: has 1 values"),
        (entry("add", vector=VECTOR, scale="2"), "steering[0].scale: must be a number, got '2'"),
        (entry("add", vector=VECTOR, scale=INF), "steering[0].scale: must be finite"),
        (entry("add", vector=VECTOR, scale=None), "steering[0].scale: must be a number, got None"),
        (entry("add", vector=np.array([1e30] * 4), scale=1e20), "steering[0]: overflows float32"),
        (entry("add", vector=np.array([1e39] * 4)), "steering[0].vector: overflows float32"),
        (entry("ablate", direction=[0.0] * 4), "steering[0].direction: is zero"),
        (entry("ablate", direction=np.full(4, np.nan)), "steering[0].direction: is not finite"),
        (entry("ablate", direction=np.ones(3)), "steering[0].direction: has shape [3]"),
        (entry("clamp", direction=VECTOR), "steering[0]: clamp needs 'lo' or 'hi'"),
        (entry("clamp", direction=VECTOR, lo=2, hi=1), "steering[0].lo: 2 is greater than hi, 1"),
        (entry("clamp", direction=VECTOR, lo=None), "steering[0].lo: must be a number"),
        (replace_with(ROWS, alpha=1.5), "steering[0].alpha: must be from 0 to 1, got 1.5"),
        (entry("replace", values=ROWS), "steering[0]: replace needs 'positions'"),
        (replace_with(ROWS, [1, 2]), "steering[0].values: has 3 rows, positions select 2"),
        (replace_with(ROWS[:, :3]), "steering[0].values: has shape [3, 3], the model needs [n, 4]"),
        (replace_with(ROWS[0, :3]), "steering[0].values: has shape [3], the model needs [4]"),
        (replace_with([1.0, 2.0]), "steering[0].values: has 2 values, the model needs 4"),
        (replace_with([]), "steering[0].values: has 0 rows, positions select 3"),
        (
            replace_with(ROWS[None]),
            "steering[0].values: has shape [1, 3, 4], the model needs [n, 4]",
        ),
        (entry("add", values=ROWS), "steering[0]: add needs 'positions'"),
        (
            entry("add", values=ROWS, vector=VECTOR, positions=[1]),
            "steering[0]: unknown keys ['vector'], allowed are op",
        ),
        (
            entry("norm_match", values=0 * ROWS, scale=1, positions=[1, 2, 3]),
            "steering[0].values[0]: is zero: it has no direction",
        ),
        (
            entry("ablate", direction=VECTOR, values=ROWS, positions=[1, 2, 3]),
            "steering[0]: unknown keys ['values'], allowed are op",
        ),
        (entry("pin", direction=VECTOR, value=1, strength="2"), "steering[0].strength: must be"),
        (replace_with(torch.from_numpy(ROWS).to_sparse()), "steering[0].values: must be a dense"),
        (replace_with(torch.from_numpy(ROWS).to("meta")), "steering[0].values: must be a dense"),
        (replace_with("rows"), "steering[0].values: must be a list, a numpy array or a torch"),
        (replace_with(ROWS.astype(int)), "steering[0].values[0]: must be of a float dtype"),
        (replace_with([VECTOR, VECTOR, [1.0]]), "steering[0].values[2]: has 1 values"),
        (replace_with(ROWS.astype(float) * 1e40), "steering[0].values[0]: overflows float32"),
        (replace_with([VECTOR], [3, 3]), "steering[0].positions: names position 3 twice"),
        (entry("normalize", gate=1), "steering[0].gate: must be a mapping, got 1"),
        (entry("normalize", gate={}), "steering[0].gate: a gate needs 'probe'"),
        (
            entry("normalize", gate=GATE | {"x": 1}),
            "steering[0].gate: unknown keys ['x'], allowed are probe",
        ),
        (
            entry("normalize", gate=GATE | {"when": "now"}),
            "steering[0].gate.when: unknown 'now'; use 'row' or 'last_prompt'",
        ),
        (
            entry("normalize", gate=GATE | {"when": np.ones(2)}),
            "steering[0].gate.when: unknown ndarray; use",
        ),
        (
            entry("normalize", gate=GATE | {"sharpness": True}),
            "steering[0].gate.sharpness: must be a number, got True",
        ),
        (
            entry("normalize", gate=GATE | {"when": "last_prompt"}, positions=[3, 6]),
            "steering[0].positions: position 3 is before the last prompt token",
        ),
    ],
)
def test_errors_name_the_field(asked: Any, message: str) -> None:
    with pytest.raises(InterventionError) as error:
        parse(asked)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("value", [{"op": "normalize"}, "normalize", None, 3])
def test_steering_must_be_a_list(value: Any) -> None:
    with pytest.raises(InterventionError, match=r"^steering: must be a list of operations, got "):
        parse_ops(value, "steering", SHAPE, FAMILIES, selecting(PROMPT, END), 4)


def test_no_operations() -> None:
    assert parse() == []


def test_numbers_must_fit_the_models_dtype() -> None:
    half = type(SHAPE)(hidden_size=4, dtype="float16", layers=SHAPE.layers)
    parse(entry("pin", direction=VECTOR, value=6e4), shape=half)
    for asked in (
        entry("pin", direction=VECTOR, value=7e4),
        entry("add", vector=VECTOR, scale=3e4),
        replace_with(ROWS * 1e4),
    ):
        assert parse(asked)
        with pytest.raises(InterventionError, match="overflows float16"):
            parse(asked, shape=half)
