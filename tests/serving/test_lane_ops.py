# SPDX-License-Identifier: Apache-2.0
"""Operations on a stream of several lanes (Gemma 3n) behind an engine: each lane by itself, on all
lanes or one, gated, in order and at positions.

The reference is Hugging Face's model with the lanes of its blocks changed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.completions import complete, log_probs_of
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.test_conformance import Pair
from tests.conformance.zoo.sandwich import LANES
from tests.support.op_deltas import with_ops
from vllm.config.operations import STREAM_OPERATIONS, VECTORS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = check.prompts(seed=6, lengths=(19,))[0]
PLACES = [7, 2, 11]
NEIGHBOUR_TOLERANCE = 1e-5
"""Batches of two sizes round differently."""
READ = {"hooks": {"pre_attn": "all", "post_block": "all"}, "positions": "all"}

Ops = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("eager", marks=pytest.mark.v2),
        pytest.param("compiled", marks=pytest.mark.long),
    ],
)
def pair(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Compiled from nothing: an artifact of an earlier run could hide what is traced today."""
    row = tiny_models.row("gemma3n")
    path = tiny_models.path(row.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("compiled")))
        llm = make_llm(
            path,
            enforce_eager=request.param == "eager",
            enable_steering=True,
            steering_families=[*STREAM_OPERATIONS, "gate"],
            max_steering_ops=4,
            capture_consumers=["inline"],
            enable_prefix_caching=True,
            block_size=16,
        )
        yield Pair(llm, check.Reference(row, models.load(row, path)))
        shut_down(llm)


def made(seed: int, *shape: int) -> torch.Tensor:
    """float32 [*shape, hidden], numbers of about 3."""
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(*shape, models.HIDDEN, generator=generator)


def op(name: str, seed: int, *shape: int, **more: Any) -> dict[str, Any]:
    """An operation whose vectors are of every lane, or of `shape` (LANES,) one for each."""
    fields: dict[str, dict[str, Any]] = {
        "add": {"vector": made(seed, *shape), "scale": 0.7},
        "norm_match": {"direction": made(seed, *shape), "scale": 0.8},
        "ablate": {"direction": made(seed, *shape), "strength": 6.0},
        "clamp": {"direction": made(seed, *shape), "lo": 22.0, "hi": 25.0},
        "pin": {"direction": made(seed, *shape), "value": -24.0},
        "replace": {
            "values": made(seed, len(PLACES), *shape), "positions": PLACES, "alpha": 0.9,
        },
        "normalize": {},
        "swap": {"direction": made(seed, *shape), "other": made(seed + 60, *shape)},
        "feature": {
            "encoder": made(seed, *shape) / 3,
            "decoder": made(seed + 60, *shape) / 3,
            "bias": 2.0,
            "value": 24.0,
        },
        "low_rank": {
            "A": made(seed, 2) / 3,
            "B": made(seed + 60, 2).T / 9,
            "c": torch.tensor([2.0, -1.0]),
        },
    }  # fmt: skip
    return {"op": name, "point": "post_block", "layers": 1, **fields[name], **more}


def gate(seed: int, *shape: int, when: str = "row") -> dict[str, Any]:
    """More than half open on average, and different from row to row and lane to lane."""
    probe = made(seed, *shape) / 3
    return {"probe": probe, "threshold": -2.0, "sharpness": 0.5, "when": when}


def cases() -> dict[str, tuple[Ops, Ops]]:
    """What is asked for, and what it must not be."""
    found: dict[str, tuple[Ops, Ops]] = {}
    for seed, name in enumerate(STREAM_OPERATIONS):
        # `normalize` alone undoes nothing.
        first = [op("add", 50, LANES, vector=9 * made(50, LANES))] if name == "normalize" else []
        ways = {
            "every lane": (op(name, seed), op(name, seed, lane=1)),
            "one lane": (op(name, seed, lane=2), op(name, seed, lane=0)),
            "gated": (
                op(name, seed, gate=gate(seed + 20)),
                op(name, seed, gate=gate(seed + 20, LANES)),
            ),
        }
        if name not in ("normalize", "low_rank"):  # matrices are of every lane, or of one
            each = op(name, seed, LANES)
            turned = {key: each[key].flip(-2) for key in VECTORS if key in each}
            ways["lane by lane"] = each, {**each, **turned}
        found |= {f"{name} {way}": ([*first, a], [*first, b]) for way, (a, b) in ways.items()}
    kept = gate(30, LANES, when="last_prompt")
    # What would act as vectors do, before all operations, stands behind one: the order is kept.
    along = made(40, LANES)[1]  # a pin after it would undo this one
    order = [op("pin", 40, LANES), op("add", 41, lane=1, vector=along, scale=4.0)]
    order.append(op("ablate", 42, lane=1))
    of_all, of_each = made(43), made(44, LANES)
    row = {"op": "replace", "point": "pre_attn", "layers": [2, 3]}
    return found | {
        "in order": (order, [order[1], order[0], order[2]]),
        "kept gate": (
            [op("pin", 31, LANES, gate=kept, value=40.0)],
            [op("pin", 31, LANES, gate={**kept, "when": "row"}, value=40.0)],
        ),
        "kept gate of one lane": (
            [op("pin", 32, lane=1, gate=gate(33, when="last_prompt"), value=60.0)],
            [op("pin", 32, lane=1, gate=gate(33), value=60.0)],
        ),
        "one row for all": (
            [{**row, "values": of_each}],
            [{**row, "values": of_all}],
        ),
        "lists": (
            [op("replace", 43, LANES, values=made(45, 3, LANES).tolist())],
            [op("replace", 43, LANES, values=made(45, 3, LANES).flip(1))],
        ),
    }  # fmt: skip


def test_each_operation_is_of_each_lane(pair: Pair) -> None:
    """All in one batch, beside a request that asks for nothing and gets what it gets alone."""
    wanted = cases()
    given = [(PROMPT, {}), *((PROMPT, {"steering": ops}) for ops, _ in wanted.values())]
    [alone] = complete(pair.llm, given[:1], log_probs=False, capture=READ)
    pair.llm.reset_prefix_cache()
    _, *written = complete(pair.llm, given)
    plain, *read = complete(pair.llm, given, log_probs=False, capture=READ)
    for site, expected in alone.rows.items():
        assert check.worst_row(plain.rows[site], expected) < NEIGHBOUR_TOLERANCE, site
    for name, logits, rows in zip(wanted, written, read, strict=True):
        want, wrong = (
            pair.reference.run(tokens, with_ops(pair.reference, ops, {}, tokens, len(PROMPT)))
            for tokens in [logits.token_ids]
            for ops in wanted[name]
        )
        got = log_probs_of(logits)
        assert check.worst_row(got, want.logits.log_softmax(-1)) < check.WRITE_TOLERANCE, name
        assert check.worst_row(got, wrong.logits.log_softmax(-1)) > check.LEAST_MOVE, name
        assert rows.token_ids == logits.token_ids
        for at, expected in want.rows.items():
            assert check.worst_row(rows.rows[at], expected) < check.READ_TOLERANCE, (name, at)
