# SPDX-License-Identifier: Apache-2.0
"""What workers make of the rows in their arenas for requests with any streams, raw, projected or
summed, and what the stages and ranks of one step put together."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HIDDEN, SHAPE
from tests.support.projections import matrix
from tests.support.rows import step_rows, taps_of
from vllm.v1.interventions.capture_groups import CaptureGroup, CaptureGroups
from vllm.v1.interventions.makings import AnyMaking, AsIs, Mean, Scores
from vllm.v1.interventions.messages import WorkerRequest
from vllm.v1.interventions.plan import Site, Stream
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.startup import StageRows
from vllm.v1.interventions.step_rows import Blocks, Members, StepRows
from vllm.v1.interventions.worker.rows.arena import RowMap
from vllm.v1.interventions.worker.tables.matrices import ProjectionTable
from vllm.v1.outputs import ModelRunnerOutput

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
SITES: list[Site] = [(point, n) for n in range(3) for point in ("pre_attn", "post_block")]
MATRICES = {(n, k): matrix(k, seed=8 + n) for n, k in ((0, 3), (3, 1), (4, 3))}


@st.composite
def worker_requests(draw: st.DrawFn) -> WorkerRequest:
    """Streams of any sites, as they are, with one of the matrices or with one for each site, or
    the sums of some positions."""
    matrices = draw(st.lists(st.sampled_from([None, None, *MATRICES]), min_size=1, max_size=4))
    positions = st.sampled_from([(), (100, 103), (0, 101, 102, 200)])
    summed = [draw(positions) if at is None else () for at in matrices]
    parts = [
        sorted(draw(st.sets(st.integers(0, len(SITES) - 1), min_size=1, max_size=5)))
        for _ in matrices
    ]

    def drawn(part: list[int], at: tuple[int, int] | None, runs: tuple[int, ...]) -> AnyMaking:
        if at is None:
            return Mean(runs) if runs else AsIs()
        alike = st.sampled_from([n for n, k in MATRICES if k == at[1]])
        places = tuple(draw(st.just(at[0]) | alike) for _ in part)
        return Scores((), at[1], places if len(set(places)) > 1 else places[:1])

    def stream(part: list[int], making: AnyMaking) -> Stream:
        sites, dtype = tuple(SITES[i] for i in part), making.dtype or SHAPE.dtype
        return Stream(sites, making.width(1, HIDDEN), dtype, making=making)

    return WorkerRequest(
        firsts=np.zeros(1, np.int64),
        table_rows=np.zeros(1, np.int32),
        programs=np.zeros(1, np.int32),
        streams=tuple(
            stream(part, drawn(part, at, runs))
            for part, at, runs in zip(parts, matrices, summed, strict=True)
        ),
    )


def captured(
    sites: dict[Site, int],
    requests: list[WorkerRequest],
    tokens: list[int],
    stream: torch.Tensor,
    sender: int = 0,
    senders: int = 1,
) -> StepRows | None:
    """As a worker does it that owns `sites`, or shares them; `stream` is [all sites, tokens,
    hidden]."""
    layouts, first = CaptureGroups(sites, SHAPE, sender, senders), 0
    groups: dict[CaptureGroup, Members] = {}
    kept = [layouts.of(request) for request in requests]
    for i, (layout, count) in enumerate(zip(kept, tokens, strict=True)):
        if layout is not None:
            groups.setdefault(layout, []).append((str(i), np.arange(first, first + count)))
        first += count
    if not groups:
        return None
    blocks = Blocks(groups)
    arena = torch.full((sum(b.num_raw + b.num_rest for b in blocks.all) + 1, HIDDEN), torch.nan)
    own = [SITES.index(site) for site in sites]
    for block, members in zip(blocks.all, groups.values(), strict=True):
        at = np.concatenate([t for _, t in members])
        row_map = RowMap(len(sites), first, CPU)
        row_map.write(block, torch.from_numpy(at))
        dest = row_map.dest
        assert set(dest.ge(0).nonzero().unique(dim=0)[:, 0].tolist()) == block.group.site_set
        for site in block.group.sites:
            into = dest[site, at]
            assert arena[into].isnan().all(), "two rows in one place"
            arena[into] = stream[own[site], at]
    assert not arena[:-1].isnan().any(), "the arena has gaps"
    index = np.concatenate([t for members in groups.values() for _, t in members])
    table = ProjectionTable(HIDDEN, CPU)
    table.write([(row, m.numpy().tobytes()) for (row, _), m in MATRICES.items()])
    rows = step_rows(7, blocks, arena, torch.from_numpy(index) + 100, table)
    arena.fill_(torch.nan)
    needed = sum(b.num_raw for b in blocks.all)
    assert rows.tensors()[-1].shape[0] == needed, (
        "rows left the device that nobody wants as they are"
    )
    return rows


@given(st.lists(st.tuples(worker_requests(), st.integers(1, 4)), min_size=1, max_size=5), st.data())
def test_streams(asked: list[tuple[WorkerRequest, int]], data: st.DataObject) -> None:
    """Each request gets its streams' values, whatever the others want, of the sites of a stage."""
    requests, tokens = [r for r, _ in asked], [n for _, n in asked]
    stage = data.draw(st.sampled_from([SITES, SITES[:2], SITES[3:]]))
    stream = torch.randn(len(SITES), sum(tokens), HIDDEN)
    rows = captured({s: i for i, s in enumerate(stage)}, requests, tokens, stream)
    if data.draw(st.booleans()):
        rows = pickle.loads(pickle.dumps(rows))
    first = 0
    for i, (request, count) in enumerate(asked):
        chunk = rows.of(str(i)) if rows is not None else None
        mine = slice(first, first := first + count)
        if not taps_of(request) & set(stage):
            assert chunk is None
            continue
        assert chunk is not None and chunk.version == 7
        assert chunk.positions.tolist() == [100 + n for n in range(mine.start, mine.stop)]
        for values, wanted in zip(chunk.values, request.streams, strict=True):
            sites = wanted.sites
            want = stream[[SITES.index(site) for site in sites if site in stage], mine]
            want = want.transpose(0, 1)
            if isinstance(wanted.making, Mean):
                inside = Positions.from_flat(list(wanted.making.runs)).mask(chunk.positions)
                assert values.dtype == torch.float32 and values.shape[0] == 1
                torch.testing.assert_close(values[0], want[torch.from_numpy(inside)].sum(0))
            elif isinstance(wanted.making, AsIs):
                assert torch.equal(values, want)
            else:
                assert isinstance(wanted.making, Scores)
                firsts, k = wanted.making.places, wanted.making.size
                firsts *= len(sites) if len(firsts) == 1 else 1
                own = [n for s, n in zip(sites, firsts, strict=True) if s in stage]
                scores = want.new_empty(count, len(own), k)
                for at, n in enumerate(own):
                    scores[:, at] = want[:, at] @ MATRICES[n, k].T
                assert values.dtype == torch.float32
                torch.testing.assert_close(values, scores)
    assert rows is None or rows.of("nobody") is None
    some = data.draw(st.sets(st.sampled_from([str(i) for i in range(len(asked))])))
    parts = [part for chunk in (rows.packed(some) if rows else ()) for part in chunk.by_owner()]
    for part in parts:
        [(name, _)] = part.owners
        alone = rows.of(name) if rows is not None else None
        assert alone is not None and name in some
        assert part.positions.tolist() == alone.positions.tolist()
        assert all(map(torch.equal, part.values, alone.values))
    assert len(parts) == sum(rows is not None and rows.of(name) is not None for name in some)


@given(st.lists(worker_requests(), min_size=1, max_size=4), st.integers(1, len(SITES) - 1))
def test_stages_join(requests: list[WorkerRequest], cut: int) -> None:
    """What two pipeline stages captured, put together, is what one worker would have."""
    tokens = [2] * len(requests)
    stream = torch.randn(len(SITES), sum(tokens), HIDDEN)
    whole, *stages = (
        captured({s: i for i, s in enumerate(part)}, requests, tokens, stream)
        for part in (SITES, SITES[:cut], SITES[cut:])
    )
    outputs = [ModelRunnerOutput([], {}, captured=rows) for rows in stages]
    joined = StageRows().aggregate([*outputs], output_rank=1)
    assert joined is outputs[1] and joined is not None and joined.captured is not None
    assert whole is not None
    for i in range(len(requests)):
        want, got = whole.of(str(i)), joined.captured.of(str(i))
        assert want is not None and got is not None
        assert want.positions.tolist() == got.positions.tolist()
        for n, one in enumerate(want.values):
            torch.testing.assert_close(one, got.stream(n))


@given(
    st.lists(worker_requests(), min_size=1, max_size=4),
    st.integers(1, len(SITES)),
    st.integers(2, 3),
    st.data(),
)
def test_senders_join(
    requests: list[WorkerRequest], cut: int, senders: int, data: st.DataObject
) -> None:
    """What the ranks of one stage or two send of their shares, put together, is what one worker
    would have; in one piece where each has a part of everybody's rows."""
    tokens = [2] * len(requests)
    stream = torch.randn(len(SITES), sum(tokens), HIDDEN)
    whole = captured({s: i for i, s in enumerate(SITES)}, requests, tokens, stream)
    workers = [
        captured({s: i for i, s in enumerate(part)}, requests, tokens, stream, n, senders)
        for part in (SITES[:cut], SITES[cut:])
        for n in range(senders)
    ]
    outputs = [ModelRunnerOutput([], {}, captured=rows) for rows in workers]
    joined = StageRows().aggregate([*outputs], output_rank=senders)
    assert joined is outputs[senders] and joined.captured is not None and whole is not None
    rows = joined.captured
    if data.draw(st.booleans()):
        rows = pickle.loads(pickle.dumps(rows))
    packed = rows.packed([str(i) for i in range(len(requests))]) if rows.packs else []
    parts = {part.owners[0][0]: part for chunk in packed for part in chunk.by_owner()}
    sending = [part for part in workers if part is not None]
    assert rows.packs == all(
        [b.owners for b in part.blocks.all] == [b.owners for b in sending[0].blocks.all]
        for part in sending
    )
    for i in range(len(requests)):
        want, got = whole.of(str(i)), rows.of(str(i))
        assert want is not None and got is not None
        assert want.positions.tolist() == got.positions.tolist()
        for n, one in enumerate(want.values):
            torch.testing.assert_close(one, got.stream(n))
        if rows.packs:
            assert all(map(torch.equal, parts[str(i)].values, got.values))


def test_a_step_without_output_stays_one() -> None:
    """`execute_model` returns None at all stages; a step may capture nothing."""
    assert StageRows().aggregate([None, None], output_rank=1) is None
    last = ModelRunnerOutput([], {})
    assert StageRows().aggregate([ModelRunnerOutput([], {}), last], output_rank=1) is last
    assert last.captured is None


def test_equal_requests_share_a_block() -> None:
    """One dense block, and views of it: nothing is copied for a request of all sites."""
    sites = {site: i for i, site in enumerate(SITES)}
    every = WorkerRequest(
        firsts=np.zeros(1, np.int64),
        table_rows=np.zeros(1, np.int32),
        programs=np.zeros(1, np.int32),
        streams=(Stream(tuple(SITES), HIDDEN, SHAPE.dtype),),
    )
    rows = captured(sites, [every] * 3, [2, 1, 4], torch.randn(len(SITES), 7, HIDDEN))
    assert rows is not None and len(rows.blocks.all) == 1
    storages = {rows.of(str(i)).values[0].untyped_storage().data_ptr() for i in range(3)}  # type: ignore[union-attr]
    assert storages == {rows.tensors()[0].untyped_storage().data_ptr()}


def test_scores_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows become float32 a bounded number at a time; the result is the same."""
    monkeypatch.setattr("vllm.v1.interventions.worker.tables.matrices.CHUNK_BYTES", 4 * HIDDEN * 3)
    table = ProjectionTable(HIDDEN, CPU)
    table.write([(2, MATRICES[0, 3].numpy().tobytes())])
    rows, out = torch.randn(10, HIDDEN).bfloat16(), torch.zeros(10, 3)
    seen: list[int] = []
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda t, n: seen.append(n) or split(t, n))  # type: ignore[func-returns-value]
    table.scores(rows, (2, 3), out)
    assert seen == [3, 3]
    torch.testing.assert_close(out, rows.float() @ MATRICES[0, 3].T)
    table.forget()
    table.scores(rows, (2, 3), out)
    assert not out.any()
