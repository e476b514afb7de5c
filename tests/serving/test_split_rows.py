# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks share the rows of large steps, each those of neighbouring layers; of small
ones the first sends all. The reference is Hugging Face, as for one worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.serving.test_async_scheduling import asynchronous, need_asynchronous
from tests.serving.test_project_serving import check as check_scores
from tests.serving.test_project_serving import matrix, mean, scores
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, core_of, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.v1.capture import reader
from vllm.v1.interventions.frontend.results.inbox import RowInbox
from vllm.v1.interventions.scheduler.relay import RowRelay
from vllm.v1.interventions.step_rows import StepRows

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

STEERED = {"steering_vectors": {"post_attn": {1: vector(70)}}}
ROOM = 8
"""Positions of which one rank can have the rows of all sites; two ranks of twice as many."""
BUFFER = ROOM * len(STREAM_POINTS) * models.LAYERS * models.HIDDEN * 4


@contextmanager
def started(tiny_models: TinyModels, root: Path, **options: Any) -> Iterator[tuple[LLM, Judge]]:
    """An engine of two ranks, with files in `root`."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    with pytest.MonkeyPatch.context() as patch:
        # A forked worker would inherit the threads of this process, but not their locks' owners.
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        llm = make_llm(
            path,
            tensor_parallel_size=2,
            enable_steering=True,
            capture_consumers=["inline", f"filesystem:root={root}"],
            capture_points=[*STREAM_POINTS, "k", "final"],
            capture_buffer_bytes=BUFFER,
            max_num_batched_tokens=24,
            enable_prefix_caching=False,
            **options,
        )
        try:
            yield llm, Judge(check.Reference(row, models.load(row, path)))
        finally:
            shut_down(llm)


@pytest.fixture(scope="module")
def pair(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Judge, Path]]:
    root = tmp_path_factory.mktemp("files")
    with started(tiny_models, root) as (llm, judge):
        yield llm, judge, root


Sent = list[tuple[int, dict[str, list[int]]]]
"""Of a step: each sender's process, and the layers it sent rows of, by request."""


@contextmanager
def watching_senders() -> Iterator[list[Sent]]:
    """Who sent the rows of each step."""
    steps: list[Sent] = []
    begin = RowRelay._begin

    def recorded(relay: Any, rows: StepRows) -> None:
        of_step: Sent = []
        for part in _parts(rows) if rows is not relay._step else ():
            layers = {
                name: sorted({n for s in block.group.streams for n, _ in s.heads})
                for block in part.blocks.all
                for name, _ in block.owners
            }
            pid = part._memory.place.pid
            if not of_step or of_step[-1][0] != pid:
                of_step.append((pid, {}))
            for name, new in layers.items():  # of all parts in which one sender sent them
                of_step[-1][1].setdefault(name, []).extend(new)
        if of_step:
            steps.append(of_step)
        begin(relay, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowRelay, "_begin", recorded)
        yield steps


def _parts(rows: Any) -> list[Any]:
    """These rows, and those that joined them."""
    return [rows, *(part for later in rows._later for part in _parts(later))]


def check_senders(steps: list[Sent]) -> None:
    """Both ranks sent in some steps, each its half of a request's layers; in others the first sent
    all."""
    split, whole = ([s for s in steps if (len(s) > 1) == two] for two in (True, False))
    assert split and whole
    processes = {tuple(pid for pid, _ in step) for step in split}
    [(first, second)] = processes
    assert first != second and {pid for [(pid, _)] in whole} == {first}
    halves = [(a[name], b.get(name, [])) for (_, a), (_, b) in split for name in a]
    assert ([0, 1], [2, 3]) in halves
    assert all(len(a) - len(b) in (0, 1) and max(a) < min([*b, max(a) + 1]) for a, b in halves)
    assert all(b.keys() <= a.keys() for (_, a), (_, b) in split)
    assert [0, 1, 2, 3] in [layers for [(_, of)] in whole for layers in of.values()]


ASKS = [
    Ask(prompt_of(41, 100), capture("all")),
    Ask(prompt_of(30, 101), {**STEERED, **capture([3, 29], ("post_block",), [0])}),
    Ask(prompt_of(30, 102), {**STEERED, **capture("all")}),
    Ask(prompt_of(9, 103), capture("all", ("pre_attn", "post_attn"), [models.LAYERS - 1])),
    Ask(prompt_of(5, 104), {**STEERED, **capture("last_generated", ("post_block",), "all")}),
    Ask(prompt_of(17, 105), capture("predicting", ("k", "post_block"), [1, 2, 3])),
    Ask(prompt_of(9, 106)),
]


def test_both_ranks_send(pair: tuple[LLM, Judge, Path]) -> None:
    """Sites of one rank and of both in one batch, prompts in chunks of more than one could send."""
    llm, judge, _ = pair
    with watching_senders() as steps, serving.watching(llm) as scheduled:
        outputs = serve(llm, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        judge.check(ask, output)
    check_senders(steps)
    assert scheduled.largest_row_count > ROOM * len(STREAM_POINTS) * models.LAYERS
    with pytest.raises(AssertionError, match="rows off by"):
        judge.check(Ask(ASKS[2].prompt, ASKS[0].fields), outputs[2])


def test_requests_alike(pair: tuple[LLM, Judge, Path]) -> None:
    """Their rows go as one piece, of both ranks; each reads its own."""
    llm, judge, _ = pair
    asks = [Ask(prompt_of(7, 110 + i), capture("all")) for i in range(5)]
    with watching_senders() as steps:
        outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    check_senders(steps)
    with pytest.raises(AssertionError):
        judge.check(asks[0], outputs[1])


def test_what_is_made_of_rows(pair: tuple[LLM, Judge, Path]) -> None:
    """Scores, means, branches and the last norm's rows come from whoever has the layer."""
    llm, judge, _ = pair
    hooks = {"attn_out": "all", "mlp_out": "all", "embed": 0, "final": models.LAYERS - 1}
    asks = [
        Ask(prompt_of(41, 120), {**STEERED, **scores(matrix(3))}),
        Ask(prompt_of(41, 121), {**STEERED, **mean("all_prompt")}),
        Ask(prompt_of(30, 122), mean([3, 4, 28], {"post_block": [models.LAYERS - 1]})),
        Ask(prompt_of(30, 123), {"capture": {"inline": {"hooks": hooks, "positions": "all"}}}),
    ]
    with watching_senders() as steps:
        outputs = serve(llm, asks)
    check_scores(judge, asks[0], outputs[0], matrix(3, seed=9))
    for ask, output in zip(asks[1:], outputs[1:], strict=True):
        judge.check(ask, output)
    assert any(len(step) > 1 for step in steps)


def test_files_are_what_memory_has(pair: tuple[LLM, Judge, Path]) -> None:
    llm, judge, root = pair
    asks = [Ask(prompt_of(41, 130 + i), capture("all")) for i in range(2)]
    some = {"hooks": {"pre_attn": [0, 3], "post_block": [1]}, "positions": [2, 5, 6, 38]}
    for ask, fields in zip(asks, (asks[0].fields["capture"]["inline"], some), strict=True):
        ask.fields["capture"]["filesystem"] = fields
    with watching_senders() as steps:
        outputs = serve(llm, asks)
    assert any(len(step) > 1 for step in steps)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
        rows, written = (output.capture_results[name] for name in ("inline", "filesystem"))
        stored = reader.open(str(root)).find(written.payload["request_id"])
        for point, layer in stored.sites:
            kept, own = stored.rows(point, layer), rows.payload[point, layer]
            at = [own.positions.tolist().index(p) for p in kept.positions.tolist()]
            assert at and torch.equal(kept.values, own.values[at])
            assert not torch.equal(kept.values, own.values[[n - 1 for n in at]])


def test_other_workers_are_awaited_in_split_steps_alone(pair: tuple[LLM, Judge, Path]) -> None:
    """A step without rows, or with few, has no message more than upstream's."""
    llm, _, _ = pair
    executor = core_of(llm).model_executor
    awaited: list[bool] = []
    sample = executor.sample_tokens

    def recorded(*args: Any, **kwargs: Any) -> Any:
        awaited.append(executor.step_aggregator is not None)
        return sample(*args, **kwargs)

    few = Ask(prompt_of(5, 140), capture("all", ("post_block",), "all"))
    executor.sample_tokens = recorded
    try:
        serve(llm, [few, Ask(prompt_of(12, 141))])
        assert awaited and not any(awaited)
        serve(llm, [Ask(prompt_of(15, 142), capture("all"))])
    finally:
        del executor.sample_tokens
    assert awaited.count(True) == 1 and not awaited[-1]


@pytest.mark.v2("long")
def test_asynchronous_scheduling(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The next step, split or not, is on its way before this one's replies are read."""
    with asynchronous(), started(tiny_models, tmp_path) as (llm, judge):
        need_asynchronous(llm)
        with watching_senders() as steps:
            outputs = serve(llm, ASKS)
        for ask, output in zip(ASKS, outputs, strict=True):
            judge.check(ask, output)
        check_senders(steps)


@pytest.mark.v2("long")
def test_an_engine_of_its_own_process(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend maps the memory of both ranks."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    num_senders: set[int] = set()
    add = RowInbox.add

    def recorded(inbox: Any, chunks: Any) -> None:
        for chunk in chunks:
            (steps, _) = inbox._link.places
            places = [steps.address_of(v) for v in chunk.values if v.numel()]
            assert all(places), "rows came in ordinary memory"
            num_senders.add(len({place.pid for place in places}))
        add(inbox, chunks)

    monkeypatch.setattr(RowInbox, "add", recorded)
    with started(tiny_models, tmp_path) as (llm, judge):
        outputs = serve(llm, ASKS)
        for ask, output in zip(ASKS, outputs, strict=True):
            judge.check(ask, output)
        # How many steps are split depends on when requests arrive; some are in every run.
        assert num_senders == {1, 2}
        places = llm.llm_engine.engine_core.row_places.steps  # type: ignore[attr-defined]
        assert len({pid for pid, _ in places._mapped}) > 2, "leases, and two landings"


@pytest.mark.long
def test_ranks_of_two_stages(tiny_models: TinyModels, tmp_path: Path, runner: Runner) -> None:
    """Each stage's layers are shared by its ranks."""
    if runner == "v1":
        pytest.skip("upstream has no stages of V1 on a CPU")
    with started(tiny_models, tmp_path, pipeline_parallel_size=2) as (llm, judge):
        with watching_senders() as steps:
            outputs = serve(llm, ASKS)
        for ask, output in zip(ASKS, outputs, strict=True):
            judge.check(ask, output)
    of_all = [[of.get(name) for _, of in s] for s in steps if len(s) == 4 for name in s[0][1]]
    assert [[0], [1], [2], [3]] in of_all
    assert {len({pid for pid, _ in s}) for s in steps} >= {2, 4}
