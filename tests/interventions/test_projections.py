# SPDX-License-Identifier: Apache-2.0
"""`project` and `reduce` without an engine: what a request may say, where matrices lie, and what a
worker makes of the rows in its arena for requests with any streams."""

from __future__ import annotations

import pickle
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import BF16, HIDDEN, SHAPE, config_of, plan_of
from tests.support.rows import step_rows
from vllm.config.capture import PROJECTION_ROWS, CaptureConfig
from vllm.v1.capture.consumers.logging import LoggingConsumer
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.interventions.capture_groups import CaptureGroup, CaptureGroups
from vllm.v1.interventions.frontend.capture_request import check_global, parse_capture
from vllm.v1.interventions.frontend.selectors import Prompt
from vllm.v1.interventions.frontend.work import Work
from vllm.v1.interventions.messages import StepInterventions, WorkerRequest, WorkerStream
from vllm.v1.interventions.plan import CapturePlan, Plan, Site, TapShape
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.scheduler.admission import MAX_STEP_BYTES
from vllm.v1.interventions.scheduler.projection_pool import ProjectionPool
from vllm.v1.interventions.startup import StageRows
from vllm.v1.interventions.step_rows import Blocks, Members, StepRows
from vllm.v1.interventions.worker.projection_table import ProjectionTable
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.steering.modules import parse_module

pytestmark = pytest.mark.quick

SPECS = {name: ConsumerSpec(name) for name in ("inline", "one", "two")}
CPU = torch.device("cpu")


def matrix(k: int, seed: int = 0, hidden: int = HIDDEN) -> torch.Tensor:
    """float32 [k, hidden]."""
    return torch.randn(k, hidden, generator=torch.Generator().manual_seed(seed))


def parse(shape: TapShape = SHAPE, **consumers: dict[str, Any]) -> CapturePlan:
    asked = {
        name: {"hooks": {"post_block": [1]}, "positions": "all", **request}
        for name, request in consumers.items()
    }
    plan = parse_capture(asked, "capture", shape, Prompt([1, 2, 3], 4, None, Work(1 << 23)), SPECS)
    assert plan is not None
    return plan


# -- what a request may say -------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, HIDDEN])
def test_forms_mean_the_same(k: int) -> None:
    given_as = matrix(k, seed=1).half()
    forms = [
        given_as,
        given_as.double().numpy(),
        given_as.tolist(),
        list(given_as.float()),
    ]
    plans = [parse(inline={"project": form}) for form in forms]
    [digest] = plans[0].projections
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].projections[digest] == given_as.float().numpy().tobytes()
    [stream] = plans[0].streams
    assert (stream.width, stream.dtype, stream.projections) == (k, "float32", [digest])
    other = parse(inline={"project": given_as * 2})
    assert list(other.projections) != [digest]


def test_one_stream_for_each_matrix() -> None:
    one, two = matrix(2, seed=1), matrix(3, seed=2)
    plan = parse(
        inline={"project": one, "hooks": {"post_block": [0, 2]}, "positions": "last_prompt"},
        one={"project": two, "hooks": {"pre_attn": [1]}, "positions": [0]},
        two={"project": one, "hooks": {"post_block": [2, 3]}, "positions": [1]},
    )
    assert [s.width for s in plan.streams] == [2, 3]
    assert [plan.consumers[name].streams for name in SPECS] == [(0,), (1,), (0,)]
    assert plan.streams[0].sites == [("post_block", n) for n in (0, 2, 3)]
    assert plan.streams[1].sites == [("pre_attn", 1)]
    assert plan.sites == [("post_block", 0), ("pre_attn", 1), ("post_block", 2), ("post_block", 3)]
    assert len(plan.projections) == 2
    raw = parse(inline={}, one={"project": one})
    assert [s.projections == [] for s in raw.streams] == [True, False]
    assert raw.streams[0].dtype == SHAPE.dtype


def test_a_matrix_for_each_layer() -> None:
    """In the order of the sites; the same for all is the one matrix."""
    one, two = matrix(2, seed=1), matrix(2, seed=2)
    hooks = {"pre_attn": [3], "post_block": [0, 1, 2]}
    by_layer = {"post_block": {"0-1": one, 2: two}, "pre_attn": {-1: two}}
    plan = parse(inline={"project": by_layer, "hooks": hooks}, two={"project": one})
    assert plan.streams[0].sites == [("post_block", n) for n in (0, 1, 2)] + [("pre_attn", 3)]
    digests = {plan.projections[d]: d for d in plan.projections}
    a, b = (digests[m.numpy().tobytes()] for m in (one, two))
    assert plan.streams[0].projections == [a, a, b, b]
    assert plan.streams[1].projections == [a]
    same = {"post_block": {"0-2": one}, "pre_attn": {3: one.tolist()}}
    [stream] = parse(inline={"project": same, "hooks": hooks}).streams
    assert stream == parse(inline={"project": one, "hooks": hooks}).streams[0]
    other = {"post_block": {"0-1": two, 2: one}, "pre_attn": {-1: one}}
    both = parse(
        inline={"project": by_layer, "hooks": hooks}, one={"project": other, "hooks": hooks}
    )
    assert [s.projections for s in both.streams] == [[a, a, b, b], [b, b, a, a]]
    assert len(both.projections) == 2


def test_modules_by_name_are_their_directions() -> None:
    """Of their base vectors, at each site its own, of length 1; with the twin of another name."""
    vectors = {n: matrix(1, seed=n)[0] for n in range(4)}
    config = config_of()
    modules = {
        "up": {"vectors": {"post_block": {1: vectors[0], 2: 3 * vectors[1]}}},
        "down": {"vectors": {"post_block": {1: vectors[2], 2: vectors[3]}}, "decode_vectors": {}},
    }
    catalog = {
        name: parse_module(given, name, SHAPE, config.steering_config)
        for name, given in modules.items()
    }

    def projections(project: Any) -> list[np.ndarray]:
        asked = {"hooks": {"post_block": [1, 2]}, "positions": "all", "project": project}
        plan = plan_of(config=config, modules=catalog, capture={"inline": asked})
        assert plan is not None and plan.capture is not None
        [stream] = plan.capture.streams
        assert stream.width == 2
        raw = [plan.capture.projections[digest] for digest in stream.projections]
        return [np.frombuffer(data, np.float32).reshape(2, HIDDEN) for data in raw]

    found = projections({"modules": ["up", "down"]})
    for layer, made in zip((1, 2), found, strict=True):
        want = torch.stack([vectors[layer - 1], vectors[layer + 1]])
        want /= want.norm(dim=-1, keepdim=True)
        np.testing.assert_allclose(made, want.numpy(), rtol=1e-6)
    twin = projections({"modules": ("down", "up")})
    assert all(np.array_equal(a, b[::-1]) for a, b in zip(found, twin, strict=True))
    assert all(np.abs(a - b).max() > 0.1 for a, b in zip(found, twin, strict=True))


def test_scores_never_cost_more_than_rows() -> None:
    """Four bytes a score: half as many fit beside a bfloat16 row."""
    assert parse(BF16, inline={"project": matrix(2)}).streams[0].row_bytes == BF16.row_bytes
    with pytest.raises(ValueError, match=r"has 3 rows, allowed are 1-2"):
        parse(BF16, inline={"project": matrix(3)})
    wide = TapShape(hidden_size=PROJECTION_ROWS, dtype="float32", points=SHAPE.points)
    most = matrix(PROJECTION_ROWS, hidden=PROJECTION_ROWS)
    assert parse(wide, inline={"project": most}).streams[0].width == PROJECTION_ROWS
    with pytest.raises(ValueError, match=rf"^capture: its .* {PROJECTION_ROWS + 1} rows together"):
        parse(wide, inline={"project": most}, one={"project": most[:1]})


# -- where matrices lie -----------------------------------------------------------------------


def matrices_sent(pool: ProjectionPool) -> list[tuple[int, bytes]]:
    """(first row, data) of what the coming step's message has."""
    step = StepInterventions(version=0)
    pool.upload(step)
    return step.projections


def test_matrices_come_and_go() -> None:
    """A worker that replays the messages has every matrix of every admitted request."""
    chance = random.Random(5)
    pool, held = ProjectionPool(9), dict[str, CapturePlan]()
    table = torch.zeros(9, HIDDEN)
    matrices = [matrix(1 + i % 4, seed=i) for i in range(7)]
    refused = shared = restored = layered = 0
    for step in range(2000):
        if chance.random() < 0.02:
            table.zero_()
            pool.restore()
            restored += 1
        if held and chance.random() < 0.5:
            name = chance.choice(sorted(held))
            del held[name]
            pool.release(name)
        one, two = chance.sample(matrices, 2)
        plan = parse(inline={"project": one}, one={"project": two})
        if len(one) == len(two):
            by_layer = {"post_block": {0: one, "1-2": two}}
            plan = parse(inline={"project": by_layer, "hooks": {"post_block": [0, 1, 2]}})
            layered += 1
        new = [
            d
            for d in plan.projections
            if d not in {d for p in held.values() for d in p.projections}
        ]
        if pool.fits(Plan(capture=plan)):
            shared += len(new) < 2
            held[f"r{step}"] = plan
            pool.reserve(f"r{step}", Plan(capture=plan))
        else:
            refused += 1
            assert held and new
        for first, data in matrices_sent(pool):
            rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, HIDDEN)
            table[first : first + len(rows)] = rows
        distinct = {d: data for p in held.values() for d, data in p.projections.items()}
        assert pool.in_use == sum(len(data) // (4 * HIDDEN) for data in distinct.values())
        for held_plan in held.values():
            for stream, worker in zip(held_plan.streams, pool.streams(held_plan), strict=True):
                assert worker.projection is not None
                firsts, size = worker.projection
                digests = stream.projections * (len(firsts) if len(stream.projections) == 1 else 1)
                for first, digest in zip(firsts, digests, strict=True):
                    want = held_plan.projections[digest]
                    assert table[first : first + size].numpy().tobytes() == want
    assert refused > 100 and shared > 100 and restored > 10 and layered > 100
    pool.release("nobody")


def test_a_step_sends_no_more_than_fits_a_message() -> None:
    hidden = MAX_STEP_BYTES // 4 // 3
    shape = TapShape(hidden_size=hidden, dtype="float32", points=SHAPE.points)
    pool = ProjectionPool(16)
    plans = [
        parse(shape, inline={"project": np.full((k, hidden), k, np.float32)}) for k in (1, 2, 4)
    ]
    pool.reserve("one", Plan(capture=plans[0]))
    assert pool.fits(Plan(capture=plans[1]))
    pool.reserve("two", Plan(capture=plans[1]))
    assert not pool.fits(Plan(capture=plans[2]))
    assert len(matrices_sent(pool)) == 2
    assert pool.fits(Plan(capture=plans[2])), "a single larger one goes alone"


def test_what_ends_before_it_is_sent_is_not() -> None:
    pool, plan = ProjectionPool(4), parse(inline={"project": matrix(4)})
    pool.reserve("one", Plan(capture=plan))
    pool.reserve("two", Plan(capture=plan))
    pool.release("one")
    assert not pool.fits(Plan(capture=parse(inline={"project": matrix(1)})))
    pool.release("two")
    assert matrices_sent(pool) == []
    assert pool.fits(Plan(capture=parse(inline={"project": matrix(1)})))


# -- what a worker makes of the rows ------------------------------------------------------------

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
    union = sorted({i for part in parts for i in part})

    def drawn(part: list[int], at: tuple[int, int] | None) -> tuple[tuple[int, ...], int] | None:
        if at is None:
            return None
        alike = st.sampled_from([n for n, k in MATRICES if k == at[1]])
        return tuple(draw(st.just(at[0]) | alike) for _ in part), at[1]

    return WorkerRequest(
        firsts=np.zeros(1, np.int64),
        table_rows=np.zeros(1, np.int32),
        programs=np.zeros(1, np.int32),
        capture_sites=tuple(SITES[i] for i in union),
        capture_streams=tuple(
            WorkerStream(tuple(union.index(i) for i in part), drawn(part, at), summed=runs)
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
        for site, into in zip(block.group.sites, block.rows(), strict=True):
            assert arena[into].isnan().all(), "two rows in one place"
            arena[into] = stream[own[site], at]
    assert not arena[:-1].isnan().any(), "the arena has gaps"
    index = np.concatenate([t for members in groups.values() for _, t in members])
    table = ProjectionTable(HIDDEN, CPU)
    table.apply([(row, m.numpy().tobytes()) for (row, _), m in MATRICES.items()])
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
        if not set(request.capture_sites) & set(stage):
            assert chunk is None
            continue
        assert chunk is not None and chunk.version == 7
        assert chunk.positions.tolist() == [100 + n for n in range(mine.start, mine.stop)]
        for values, wanted in zip(chunk.values, request.capture_streams, strict=True):
            sites = [request.capture_sites[i] for i in wanted.sites]
            want = stream[[SITES.index(site) for site in sites if site in stage], mine]
            want = want.transpose(0, 1)
            if wanted.summed:
                inside = Positions.from_flat(list(wanted.summed)).mask(chunk.positions)
                assert values.dtype == torch.float32 and values.shape[0] == 1
                torch.testing.assert_close(values[0], want[torch.from_numpy(inside)].sum(0))
            elif wanted.projection is None:
                assert torch.equal(values, want)
            else:
                firsts, k = wanted.projection
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
            joined_sites = torch.cat(got.values[n :: len(want.values)], dim=1)
            torch.testing.assert_close(one, joined_sites)


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
            torch.testing.assert_close(one, torch.cat(got.values[n :: len(want.values)], dim=1))
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
        capture_sites=tuple(SITES),
        capture_streams=(WorkerStream(tuple(range(len(SITES)))),),
    )
    rows = captured(sites, [every] * 3, [2, 1, 4], torch.randn(len(SITES), 7, HIDDEN))
    assert rows is not None and len(rows.blocks.all) == 1
    storages = {rows.of(str(i)).values[0].untyped_storage().data_ptr() for i in range(3)}  # type: ignore[union-attr]
    assert storages == {rows.tensors()[0].untyped_storage().data_ptr()}


def test_scores_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows become float32 a bounded number at a time; the result is the same."""
    monkeypatch.setattr("vllm.v1.interventions.worker.projection_table.CHUNK_BYTES", 4 * HIDDEN * 3)
    table = ProjectionTable(HIDDEN, CPU)
    table.apply([(2, MATRICES[0, 3].numpy().tobytes())])
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


def test_error_names_the_field() -> None:
    with pytest.raises(ValueError, match=re.escape("capture.one.project[1][0]: must be a number")):
        parse(inline={}, one={"project": [[0.0] * HIDDEN, [None, 0.0, 0.0, 0.0]]})


def test_a_matrix_for_every_request_is_checked_at_start_up() -> None:
    asked = {"hooks": {"post_block": [1]}, "project": matrix(2)}

    def config_of(request: dict[str, Any]) -> CaptureConfig:
        spec = {"consumer": LoggingConsumer, "instance_name": "all", "capture": request}
        return CaptureConfig(capture_consumers=[spec])

    check_global(config_of(asked), SHAPE)
    wrong = config_of({**asked, "project": matrix(HIDDEN + 1)})
    with pytest.raises(ValueError, match=r"capture_consumers\.all\.capture\.project: has 5 rows"):
        check_global(wrong, SHAPE)
    plan = parse_capture(
        None,
        "capture",
        SHAPE,
        Prompt([1], 2, None, Work(1 << 23)),
        {"all": ConsumerSpec("all", capture=asked)},
    )
    assert plan is not None and plan.streams[0].width == 2
