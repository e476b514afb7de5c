# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's lanes behind an engine, against transformers' model: read, written, and each half
block by itself from the captured rows before it, where what is rounded does not add up.

Upstream's class for CPUs needs AMX and bfloat16. Its metadata needs Triton, and the processes of
`--runner v2` interpret that. The class for CUDA runs in float32 on any CPU, without the kernels of
GPUs (`zoo/deepseek_v4.py`). Prompts reach beyond the window, and the longest has as many tokens as
are ever compressed to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.completions import complete
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.conformance.reference import Hooked, Site
from tests.conformance.test_conformance import Pair
from tests.conformance.zoo.sparse import V4_LANES, without_amx
from tests.support.op_deltas import with_ops

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPTS = check.prompts(lengths=(140, 41, 5))


@dataclass(frozen=True)
class Limits:
    """Relative L2 of a row."""

    read: float
    """Of captured ones."""
    write: float
    """Of log-probabilities."""
    half: float
    """Over a half block."""
    apart: float
    """The least error of a row that is another one."""


LIMITS = {
    "bfloat16": Limits(0.03, 0.06, 0.015, 0.15),
    "float32": Limits(check.READ_TOLERANCE, check.WRITE_TOLERANCE, 1e-5, 0.1),
}
ROWS = [
    pytest.param(("deepseek_v4", "bfloat16"), marks=pytest.mark.v2, id="cpu"),
    pytest.param(("deepseek_v4_cuda", "float32"), id="cuda"),
]


@dataclass(frozen=True)
class Limited(Pair):
    """With how near they must be."""

    limits: Limits


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest, tiny_models: TinyModels, runner: Runner
) -> Iterator[Limited]:
    name, dtype = request.param
    if name == "deepseek_v4":
        if why := without_amx():
            pytest.skip(why)
        if runner == "v1":
            pytest.skip("upstream's metadata needs Triton: run with --runner v2")
    row = tiny_models.row(name)
    path = tiny_models.path(row.name)
    options = {"capture_consumers": ["inline"], "steering_families": ["add", "ablate"]}
    with row.upstream():
        llm = make_llm(path, dtype=dtype, enable_steering=True, **options, **row.engine)
        yield Limited(llm, check.Reference(row, models.load(row, path)), LIMITS[dtype])
        shut_down(llm)


@torch.inference_mode()
def halves(
    reference: check.Reference, token_ids: list[int], given: Mapping[Site, torch.Tensor]
) -> dict[Site, torch.Tensor]:
    """post_attn and post_block that follow from these rows of the points before them."""
    made: dict[Site, torch.Tensor] = {}
    handles = []
    for layer, block in enumerate(reference.model.get_submodule("model.layers").children()):

        def before(
            _block: nn.Module, args: tuple[torch.Tensor, ...], layer: int = layer
        ) -> tuple[torch.Tensor, ...]:
            return given["pre_attn", layer].view_as(args[0]), *args[1:]

        def between(
            _hc: nn.Module, args: tuple[torch.Tensor, ...], layer: int = layer
        ) -> None:  # in place, as the skip reads the same tensor
            made["post_attn", layer] = args[0][0].flatten(1).clone()
            args[0].copy_(given["post_attn", layer].view_as(args[0]))

        def after(_block: nn.Module, _args: Any, output: Hooked, layer: int = layer) -> None:
            assert isinstance(output, torch.Tensor)
            made["post_block", layer] = output[0].flatten(1)

        handles += [
            block.register_forward_pre_hook(before),
            block.get_submodule("ffn_hc").register_forward_pre_hook(between),
            block.register_forward_hook(after),
        ]
    reference.model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return made


def test_plain(pair: Limited) -> None:
    [plain] = check.plain_errors(pair.llm, pair.reference, PROMPTS[:2])
    assert plain.error <= pair.limits.read


def test_read(pair: Limited) -> None:
    """Rows of all points, and each half block from them; neither would pass for the row before
    it, nor for one with its lanes in another order."""
    asked: list[tuple[list[int], dict[str, Any]]] = [(prompt, {}) for prompt in PROMPTS]
    capture = check.everything(pair.reference.row)
    for done in complete(pair.llm, asked, log_probs=False, capture=capture):
        expected = pair.reference.run(done.token_ids).rows
        assert done.rows.keys() == expected.keys()
        for site, rows in expected.items():
            assert check.worst_row(done.rows[site], rows) <= pair.limits.read, site
        made = halves(pair.reference, done.token_ids, done.rows)
        assert len(made) == 2 * models.LAYERS
        for (point, layer), rows in made.items():
            got = done.rows[point, layer]
            assert check.worst_row(got, rows) <= pair.limits.half, (point, layer)
            earlier = done.rows["pre_attn" if point == "post_attn" else "post_attn", layer]
            turned = got.unflatten(1, (V4_LANES, -1)).roll(1, 1).flatten(1)
            for other in (earlier, turned):
                assert check.worst_row(other, rows) >= pair.limits.apart, (point, layer)


def test_write(pair: Limited) -> None:
    """Vectors as large as the stream at each point, for each phase, and at all sites at once."""
    written = check.write_errors(pair.llm, pair.reference, PROMPTS[1:])
    assert {r.point for r in written} >= {"pre_attn", "post_attn", "post_block"}
    for result in written:
        assert result.error <= pair.limits.write, result
        assert result.moved is not None and result.moved >= check.LEAST_MOVE, result
    for result in check.steered_read_errors(pair.llm, pair.reference, PROMPTS[1:]):
        assert result.error <= pair.limits.write, result


def test_lanes(pair: Limited) -> None:
    """A vector, and an operation, on one lane at each point: another lane is something else. Beside
    them a plain request gets the bits that it gets beside plain ones."""
    prompt = PROMPTS[1]
    vector = 6.0 * torch.randn(models.HIDDEN, generator=torch.Generator().manual_seed(5))

    def acting(point: str, lane: int) -> list[list[dict[str, Any]]]:
        here = {"point": point, "layers": 1, "lane": lane}
        return [
            [{"op": "add", "vector": vector, "scale": 4.0, **here}],
            [{"op": "ablate", "direction": vector, "strength": 24.0, **here}],
        ]

    cases = [
        both
        for point in pair.reference.row.points
        for both in zip(acting(point, 2), acting(point, 0), strict=True)
    ]
    capture = check.everything(pair.reference.row)
    asked = [(prompt, {}), *((prompt, {"steering": ops}) for ops, _ in cases)]
    plain, *_ = complete(pair.llm, asked[:1] * len(asked), log_probs=False, capture=capture)
    beside, *steered = complete(pair.llm, asked, log_probs=False, capture=capture)
    assert all(torch.equal(beside.rows[site], rows) for site, rows in plain.rows.items())
    for (ops, others), done in zip(cases, steered, strict=True):
        want, wrong = (
            pair.reference.run(
                done.token_ids, with_ops(pair.reference, these, {}, done.token_ids, len(prompt))
            ).rows
            for these in (ops, others)
        )
        for site, rows in want.items():
            assert check.worst_row(done.rows[site], rows) <= pair.limits.write, (ops, site)
        last = "post_block", models.LAYERS - 1
        assert check.worst_row(done.rows[last], wrong[last]) >= pair.limits.apart, ops
