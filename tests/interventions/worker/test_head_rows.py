# SPDX-License-Identifier: Apache-2.0
"""Heads from attention's tensors to a step's rows, without an engine: taps, arena, groups, outbox;
beside rows and scores of the residual stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.plans import HEADS, HIDDEN, config_of, plan_of, with_layers
from vllm.config.points import CAPTURE_POINTS
from vllm.model_executor.layers import attention_taps
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_taps import HeadTap
from vllm.model_executor.layers.residual_taps import SiteTap
from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.capture_groups import CaptureGroup, CaptureGroups
from vllm.v1.interventions.makings import (
    AnyMaking,
    AsIs,
    Dose,
    Features,
    Heads,
    Mean,
    Norms,
    Rows,
    Scores,
)
from vllm.v1.interventions.messages import WorkerRequest
from vllm.v1.interventions.plan import Site, Stream
from vllm.v1.interventions.step_rows import Blocks, Members, StepRows
from vllm.v1.interventions.worker.attention.layers import attention_of
from vllm.v1.interventions.worker.making.maker import Captured, Material
from vllm.v1.interventions.worker.making.makers import MAKERS
from vllm.v1.interventions.worker.making.shards import Shards
from vllm.v1.interventions.worker.rows.arena import RowMap
from vllm.v1.interventions.worker.rows.outbox import Outbox
from vllm.v1.interventions.worker.tables.matrices import ProjectionTable

pytestmark = pytest.mark.quick

SITES: list[Site] = [(p, n) for n in HEADS.layers for p in HEADS.offers(n) if p in CAPTURE_POINTS]
HEAD_SITES = [site for site in SITES if site[0] in "qkvz"]
ON = torch.tensor(True)
RESIDUAL = [site for site in SITES if site[0] not in "qkvz"]
MAKINGS: list[AnyMaking] = [AsIs(), Norms()]
SCORES = Scores((), 2, (0,))
FEATURES = Features("elsewhere", 8, 2, (), 0.0, False)
MATRIX = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))


def captured_at(count: int) -> Captured:
    """The first tokens of a step of one request."""
    return Captured(torch.arange(count), torch.arange(count))


@st.composite
def requests(draw: st.DrawFn) -> WorkerRequest:
    """Some raw rows, some scores, and two streams of heads of one width each, or of their norms."""
    raw = draw(st.lists(st.sampled_from(RESIDUAL), unique=True, max_size=3))
    scored = draw(st.lists(st.sampled_from(RESIDUAL), unique=True, max_size=2))
    streams = [
        Stream(tuple(raw), HIDDEN, "float32"),
        Stream(tuple(scored), len(MATRIX), "float32", making=SCORES),
    ]
    for _ in range(2):
        sites = draw(st.lists(st.sampled_from(HEAD_SITES), unique=True, max_size=3))
        width = HEADS.parts(sites[0])[1] if sites else 0
        sites = sorted((s for s in sites if HEADS.parts(s)[1] == width), key=SITES.index)
        heads = tuple(
            tuple(sorted(draw(st.permutations(range(HEADS.parts((p, n))[0])))[:2]))
            for p, n in sites
        )
        made = draw(st.sampled_from(MAKINGS))
        streams.append(Stream(tuple(sites), made.width(2, width), "float32", Heads(heads), made))
    zeros = np.zeros(1, np.int64)
    return WorkerRequest(zeros, zeros, zeros, tuple(s for s in streams if s.sites))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(requests(), st.integers(1, 3)), min_size=1, max_size=4), st.booleans())
def test_rows_of_a_step(asked: list[tuple[WorkerRequest, int]], last_stage: bool) -> None:
    """A frontend gets of each stream what taps were given, at the heads that were chosen."""
    own = [site for site in SITES if site[1] >= 1] if last_stage else SITES
    layouts = CaptureGroups({site: i for i, site in enumerate(own)}, HEADS)
    generator = torch.Generator().manual_seed(0)
    total = sum(count for _, count in asked)
    given = {site: torch.randn(total, HEADS.row_width(site), generator=generator) for site in own}
    groups: dict[CaptureGroup, Members] = {}
    tokens, first, kept = [], 0, []
    for i, (request, count) in enumerate(asked):
        kept.append(group := layouts.of(request))
        tokens.append(np.arange(first, first + count))
        first += count
        if group is not None:
            groups.setdefault(group, []).append((str(i), tokens[-1]))
    if not groups:
        return
    blocks = Blocks(groups)
    size = sum(b.num_raw + b.num_rest for b in blocks.all)
    row_map = RowMap(len(own), total, torch.device("cpu"))
    for block, members in zip(blocks.all, groups.values(), strict=True):
        at = np.concatenate([t for _, t in members])
        row_map.write(block, torch.from_numpy(at))
    captured = sum(b.count for b in blocks.all)
    arena = torch.full((size, HIDDEN), torch.nan)
    for site, rows in given.items():
        places = row_map.dest[own.index(site)]
        residual = SiteTap(None, None, places, arena, places, ON)
        tap = residual if site in RESIDUAL else HeadTap(arena, places, ON, HEADS.row_width(site))
        tap.read(rows)
    step = StepRows(1, blocks, HIDDEN, torch.float32)
    projections = ProjectionTable(HIDDEN, torch.device("cpu"))
    projections.write([(0, MATRIX.numpy().tobytes())])
    outbox = Outbox(Landing(1 << 20), Material(arena, projections, {}, Shards()))
    outbox.send(step, captured_at(captured))
    for i, (request, _) in enumerate(asked):
        if kept[i] is None:
            continue
        chunk = step.of(str(i))
        assert chunk is not None
        for stream, values in zip(request.streams, chunk.values, strict=True):
            sites = stream.sites
            here = [j for j, site in enumerate(sites) if site in own]
            assert values.shape[1] == len(here)
            for place, j in enumerate(here):
                want = given[sites[j]][tokens[i]]
                if isinstance(stream.source, Heads):
                    count, chosen = HEADS.parts(sites[j])[0], stream.source.chosen[j]
                    want = want.unflatten(1, (count, -1))[:, list(chosen)]
                    want = want.flatten(1) if stream.making == AsIs() else want.norm(dim=2)
                elif stream.making == SCORES:
                    want = want @ MATRIX.T
                assert torch.allclose(values[:, place], want)


def test_norms_of_heads_of_two_widths_leave_apart() -> None:
    """Layer 1 has heads half as wide, whose norms are as many."""
    wide = with_layers(HEADS, [1], heads={"q": (4, 2), "z": (4, 2)})
    wide = with_layers(wide, [0], heads={"q": (4, 4), "z": (4, 4)})
    asked = {"hooks": {"q": [0, 1], "z": [0], "post_block": [1]}, "norms": True}
    config = config_of(wide, capture_points=list(CAPTURE_POINTS))
    plan = plan_of(config=config, capture={"inline": asked})
    assert plan is not None and plan.capture is not None
    widths = [{wide.parts(site)[1] for site in s.sites} for s in plan.capture.streams if s.sites]
    assert [s.width for s in plan.capture.streams].count(4) == 2
    assert [len(each) for each in widths] == [1] * len(widths)
    apart = {site: i for i, s in enumerate(plan.capture.streams) for site in s.sites}
    assert apart["q", 0] == apart["z", 0] != apart["q", 1]


@pytest.mark.parametrize("making", [Mean(()), SCORES, Scores((), 2, ()), Norms(), FEATURES, Dose()])
def test_a_stream_whose_sites_are_elsewhere_is_empty(making: AnyMaking) -> None:
    """On another stage, or in another part; also where the stream has lanes, so columns."""
    own, other = Stream((("post_block", 1),), HIDDEN, "float32"), ("post_block", 0)
    for source in (Rows(), Heads(((0, 1),))):
        made = Stream((other,), 2, "float32", source, making)
        zeros = np.zeros(1, np.int64)
        group = CaptureGroups({own.sites[0]: 0}, HEADS).of(
            WorkerRequest(zeros, zeros, zeros, (own, made))
        )
        assert group is not None and not group.streams[1].places
        blocks = Blocks({group: [("0", np.arange(3))]})
        arena = torch.zeros(blocks.all[0].num_raw + blocks.all[0].num_rest, HIDDEN)
        table = ProjectionTable(HIDDEN, torch.device("cpu"))
        maker = MAKERS[type(making)](Material(arena, table, {}, Shards()))
        values = maker.make(blocks.all[0], group.streams[1], captured_at(3))
        assert values.shape[1] == 0


def test_heads_of_one_request_are_not_anothers() -> None:
    """The twin: equal sites and other heads are another group."""
    zeros = np.zeros(1, np.int64)

    def ask(head: int) -> WorkerRequest:
        stream = Stream((("q", 0),), 2, "float32", Heads(((head,),)))
        return WorkerRequest(zeros, zeros, zeros, (stream,))

    layouts = CaptureGroups({("q", 0): 0}, HEADS)
    one, same, other = (layouts.of(ask(head)) for head in (1, 1, 2))
    assert one is same and one is not other
    assert one is not None and one.streams[0].columns is not None
    assert one.streams[0].columns.tolist() == [2, 3]


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_have_parts_of_the_heads(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks; with two replicas each pair has the same heads."""
    parts = [torch.full((3, 2, 2), float(rank // replicas)) for rank in range(4)]

    def gather(rows: torch.Tensor) -> torch.Tensor:
        assert torch.equal(rows, parts[1].flatten(1))
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    monkeypatch.setattr(attention_taps, "tensor_model_parallel_all_gather", gather)
    arena, dest = torch.zeros(9, 16 // replicas), torch.tensor([8, 4, 2], dtype=torch.int32)
    HeadTap(arena, dest, ON, 16 // replicas, True, replicas).read(parts[1])
    want = torch.arange(4 // replicas).repeat_interleave(4).float()
    assert torch.equal(arena[4], want) and torch.equal(arena[2], want)
    assert not arena[[0, 1, 3, 5, 6, 7]].any()


class OwnForward(Attention):
    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise NotImplementedError


def attention(cls: type[Attention]) -> Attention:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.num_heads, module.num_kv_heads = 4, 2
    module.head_size, module.head_size_v = 8, 6
    module.kv_sharing_target_layer_name = None
    return module


def test_which_layers_have_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm.v1.interventions.worker.attention.layers.get_tensor_model_parallel_world_size",
        lambda: 2,
    )
    shared = attention(Attention)
    shared.kv_sharing_target_layer_name = "model.layers.0.self_attn.attn"
    layers = {
        0: nn.ModuleList([nn.Linear(1, 1), attention(Attention)]),
        1: nn.ModuleList([attention(Attention), attention(Attention)]),
        2: nn.ModuleList([attention(OwnForward)]),
        3: nn.ModuleList([shared]),
        4: nn.ModuleList([nn.Linear(1, 1)]),
    }
    found = {index: heads.points for index, heads in attention_of(layers).items()}
    assert found == {
        0: {"q": (8, 8), "k": (4, 8), "v": (4, 6), "z": (8, 6)},
        3: {"q": (8, 8), "z": (8, 6)},
    }
