# SPDX-License-Identifier: Apache-2.0
"""Global tiers, changed while requests wait, run, are preempted and come back.

Every answer is judged position by position against Hugging Face, with the tiers that the position's
step ran under (`tests/support/timeline.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import Judge, capture, prompt_of, vector
from tests.support.timeline import Timeline, Vectors
from vllm import LLM
from vllm.config import KVEventsConfig

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

BLOCK = 32
PROMPT = prompt_of(70, 200)
FULL = 64
ROWS = capture("all")

A: Vectors = {"post_block": {1: vector(200)}}
B: Vectors = {"post_block": {1: vector(201)}}
ELSEWHERE: Vectors = {"pre_attn": {2: vector(202)}}
TIERS = ("base", "prefill", "decode")


def start(tiny_models: TinyModels, **options: Any) -> tuple[LLM, Judge]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        enable_prefix_caching=True,
        max_model_len=models.MAX_LENGTH,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        **options,
    )
    return llm, Judge(Reference(row, models.load(row, path)))


@pytest.fixture(scope="module")
def roomy(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Nobody is preempted; prompts are cut into chunks; five run at a time."""
    llm, judge = start(tiny_models, max_num_batched_tokens=48, max_num_seqs=5)
    yield llm, judge
    shut_down(llm)


@pytest.fixture(scope="module")
def small(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Nine usable blocks."""
    llm, judge = start(tiny_models, max_num_batched_tokens=64, num_gpu_blocks_override=10)
    yield llm, judge
    shut_down(llm)


@pytest.fixture
def line(roomy: tuple[LLM, Judge]) -> Iterator[Timeline]:
    yield from timeline(roomy)


@pytest.fixture
def small_line(small: tuple[LLM, Judge]) -> Iterator[Timeline]:
    yield from timeline(small)


def timeline(pair: tuple[LLM, Judge]) -> Iterator[Timeline]:
    llm, judge = pair
    assert llm.reset_prefix_cache()
    line = Timeline(llm, judge)
    yield line
    line.close()


@pytest.mark.v2
@pytest.mark.parametrize("tier", TIERS)
def test_one_tier(line: Timeline, tier: str) -> None:
    """Acts on the positions it is for, beside what a request brings; and not on who opts out."""
    line.set(tier, A)
    own = {"steering_vectors": {"post_block": {1: vector(203)}, "pre_attn": {0: vector(204)}}}
    phases = {
        "prefill_steering_vectors": {"post_block": {1: vector(205)}},
        "decode_steering_vectors": {"post_block": {1: vector(206)}},
    }
    alone = {"steering_inherit_global": False}
    fields: list[dict[str, Any]] = [{}, own, phases, alone, {**own, **alone}, {**own, **phases}]
    # Two with equal contents, one with the globals and one without, must not share a slot.
    names = [line.add(PROMPT, {**f, **ROWS}) for f in fields]
    line.finish()
    for name in names:
        line.check(name)
    one, other = (line.outputs[names[i]].outputs[0] for i in (0, 3))
    assert not serving.same_completion(one, other)


def test_tiers_add_up(line: Timeline) -> None:
    line.set_tiers({"base": A, "prefill": {**B, **ELSEWHERE}, "decode": B})
    fields = [{}, {"steering_vectors": A}, {"decode_steering_vectors": ELSEWHERE}]
    names = [line.add(PROMPT, {**f, **ROWS}) for f in fields]
    line.finish()
    for name in names:
        line.check(name)


def test_set_replace_clear(line: Timeline) -> None:
    """Each change overwrites what it names, and nothing else."""
    tiers = line.llm.steering.state
    line.set("base", {**A, **ELSEWHERE})
    line.set("base", B)  # B is where A was; ELSEWHERE stays
    line.check(line.serve(PROMPT, ROWS))
    assert tiers()["tiers"]["base"]["norms"] == {
        "pre_attn": {2: pytest.approx(24)},
        "post_block": {1: pytest.approx(24)},
    }
    line.set("decode", A)
    line.check(line.serve(PROMPT, ROWS))
    line.set("prefill", A, replace=True)  # of all tiers only this is left
    line.check(line.serve(PROMPT, ROWS))
    assert tiers()["tiers"].keys() == {"prefill"}
    line.set("decode", ELSEWHERE)
    line.clear("prefill")
    line.check(line.serve(PROMPT, ROWS))
    assert tiers()["tiers"].keys() == {"decode"}
    line.clear()
    line.check(line.serve(PROMPT, ROWS))
    assert not tiers()["tiers"]
    versions = [state.version for state in line.globals.states]
    assert versions == list(range(versions[0], versions[0] + len(versions)))


def test_refused_changes_change_nothing(line: Timeline) -> None:
    line.set("base", A)
    before = line.llm.steering.state()
    huge = {"post_block": {1: torch.full((models.HIDDEN,), 3e38)}}
    for tier, vectors in (
        ("base", {"post_block": {1: vector(1)[:-1]}}),
        ("bass", A),
        ("base", {"post_block": {99: vector(1)}}),
        ("decode", huge),
    ):
        with pytest.raises(ValueError, match=r"tier|base|decode"):
            line.llm.steering.set(vectors, tier=tier)
    assert line.llm.steering.state() == before
    line.check(line.serve(PROMPT, ROWS))


@pytest.mark.v2
def test_requests_in_flight(line: Timeline) -> None:
    """One that generates, one amid its prompt, one that waits, and one that comes after."""
    long = {"max_tokens": 40, **ROWS}
    decoding = line.add(PROMPT[:20], long)
    steered = line.add(
        PROMPT[:20], {**long, "decode_steering_vectors": {"post_attn": {1: vector(207)}}}
    )
    plain = line.add(PROMPT[:20], {**long, "steering_inherit_global": False})
    line.until(decoding, 5)
    amid = line.add(prompt_of(90, 208), {**ROWS})
    line.step()
    late = [line.add(prompt_of(30, 209 + i), {"max_tokens": 20, **ROWS}) for i in range(3)]
    line.set_tiers({"base": A, "prefill": ELSEWHERE})
    line.step(6)
    line.set("decode", B)
    line.step(4)
    line.clear("base")
    line.step(3)
    line.clear()
    after = line.add(PROMPT[:20], long)
    line.finish()
    everyone = [decoding, steered, plain, amid, *late, after]
    for name in everyone:
        line.check(name)
    assert len(line.boundaries(decoding)) == 4 and len(line.boundaries(steered)) == 4
    assert line.boundaries(decoding)[0] == 25
    assert 0 < line.boundaries(amid)[0] < 90, "no change fell into a prompt"
    assert line.runs(late[-1])[0][0] > 0, "nobody waited across a change"
    assert line.boundaries(after) == []
    assert not line.preempted and all(len(line.runs(name)) == 1 for name in everyone)


def test_a_change_acts_from_the_next_step_on(line: Timeline) -> None:
    """Set, generate one token, clear: one position ran under it."""
    name = line.add(PROMPT[:20], {"max_tokens": 20, **ROWS})
    line.until(name, 5)
    version = line.set("decode", A)
    line.step()
    line.clear()
    line.finish()
    line.check(name)
    rows = line.outputs[name].outputs[0].capture_results["inline"].payload["post_block", 1]
    assert (rows.versions == version).nonzero()[0].tolist() == [24]


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        pytest.param({}, {"base": A}, 0, id="plain is not served to globals"),
        pytest.param({"base": A}, {}, 0, id="globals are not served to plain"),
        pytest.param({"base": A}, {"base": B}, 0, id="another vector"),
        pytest.param({"prefill": A}, {"decode": A}, 0, id="another tier"),
        pytest.param({"base": A}, {"base": A, "prefill": ELSEWHERE}, 0, id="one more tier"),
        pytest.param({}, {"decode": A}, FULL, id="decode leaves prompts shared"),
        pytest.param({"base": A}, {"base": A, "decode": B}, FULL, id="the same at the prompt"),
        pytest.param({"prefill": A, "decode": B}, {"prefill": A}, FULL, id="decode cleared"),
    ],
)
def test_sharing(line: Timeline, first: Any, second: Any, cached: int) -> None:
    line.set_tiers(first, replace=True)
    assert line.cached(line.serve(PROMPT)) == 0
    line.set_tiers(second, replace=True)
    name = line.serve(PROMPT)
    assert line.cached(name) == cached
    line.check(name)
    line.set_tiers(first, replace=True)
    again = line.serve(PROMPT)
    assert line.cached(again) == FULL, "a change threw blocks away, or spoiled them"
    line.check(again)


def test_opting_out_shares_with_plain(line: Timeline) -> None:
    alone = {"steering_inherit_global": False}
    assert line.cached(line.serve(PROMPT)) == 0
    line.set("base", A)
    for fields, cached in ((alone, FULL), ({}, 0), ({}, FULL), (alone, FULL)):
        name = line.serve(PROMPT, fields)
        assert line.cached(name) == cached
        line.check(name)


@pytest.mark.parametrize(
    ("boundary", "shared"), [(None, 96), (79, FULL), (95, FULL), (96, 96)], ids=str
)
def test_blocks_of_a_request_across_a_change(
    line: Timeline, boundary: int | None, shared: int
) -> None:
    """What it computed before is found under the tiers of before; the block the change fell into
    and all later ones are found by nobody."""
    line.set("base", A)
    name = line.add(PROMPT, {"max_tokens": 50, **ROWS})
    if boundary is not None:
        line.until(name, boundary - len(PROMPT) + 1)
        line.set("base", B)
    line.finish()
    line.check(name)
    assert line.boundaries(name) == ([] if boundary is None else [boundary])
    history = line.sequence(name)
    assert len(history) == 120
    for tiers, cached in (({"base": A}, shared), ({"base": B}, 0), ({}, 0)):
        line.set_tiers(tiers, replace=True)
        follower = line.serve(history, {"max_tokens": 4})
        assert line.cached(follower) == cached
        line.check(follower)


def test_changed_to_and_fro_before_anything_ran(line: Timeline) -> None:
    """A request in flight keeps sharing if no position ran under the other tiers."""
    name = line.add(PROMPT, {"max_tokens": 40, **ROWS})
    line.until(name, 3)
    line.set("base", A)
    line.clear()
    line.finish()
    line.check(name)
    follower = line.serve(line.sequence(name))
    assert line.cached(follower) == 96
    line.check(follower)


def test_hashed_before_the_change(line: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a server another thread hashes a request's blocks, maybe before a change that the
    scheduler sees first."""
    core = serving.core_of(line.llm)
    for tiers in ({}, {"base": A}):
        line.set_tiers(tiers, replace=True)
        line.serve(PROMPT)
    arrived = core.add_request
    for before, after in (({}, {"base": A}), ({"base": A}, {}), ({"base": A}, {"base": B})):
        line.set_tiers(before, replace=True)
        held: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(core, "add_request", lambda *args, held=held: held.append(args))
            name = line.add(PROMPT, ROWS)
            twin = line.add(PROMPT)
        line.set_tiers(after, replace=True)
        for args in held:
            arrived(*args)
        line.finish()
        line.check(name)
        line.check(twin)
        assert line.cached(twin) == FULL, "blocks of the tiers it ran under, or of its neighbour"


def test_preempted_across_changes(small_line: Timeline) -> None:
    """Recomputed under the tiers of then; rows that left before keep theirs."""
    line = small_line
    names = []
    for i in range(7):
        fields: dict[str, Any] = {"max_tokens": 60, **ROWS}
        if i % 3 == 1:
            fields |= {"decode_steering_vectors": {"post_attn": {2: vector(210)}}}
        if i == 5:
            fields |= {"steering_inherit_global": False}
        names.append(line.add(prompt_of(20, 220 + i), fields))
    changes = [{"base": A}, {"prefill": B, "decode": ELSEWHERE}, {}, {"base": B}, {"decode": A}]
    for tiers in changes:
        line.step(14)
        line.set_tiers(tiers, replace=True)
    line.finish()
    assert line.preempted
    for name in names:
        line.check(name)
    resumed = [line.runs(name) for name in names if len(line.runs(name)) > 1]
    assert any(runs[0][20:21] and runs[-1][20] != runs[0][20] for runs in resumed), (
        "nobody generated a token under one state and computed it again under another"
    )


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.v2), 1, 2])
def test_anything_at_any_time(small_line: Timeline, seed: int) -> None:
    """Random arrivals with shared beginnings, changes and steps; and what the KV events say."""
    line, choice = small_line, random.Random(seed)
    scheduler = serving.scheduler_of(line.llm)
    published: list[Any] = []
    scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    stem = prompt_of(80, 230 + seed)
    fields: list[dict[str, Any]] = [
        {},
        {"steering_vectors": {"post_attn": {0: vector(231)}}},
        {"decode_steering_vectors": {"post_block": {1: vector(232)}}},
        {"prefill_steering_vectors": ELSEWHERE},
        {"steering_inherit_global": False},
    ]
    pool = [A, B, ELSEWHERE]
    names: list[str] = []
    try:
        for _ in range(18):
            for _ in range(choice.randrange(3)):
                prompt = [*stem[: choice.randrange(8, 81)], *prompt_of(3, choice.randrange(3))]
                limit = {"max_tokens": choice.randrange(2, 44)}
                rows = capture(choice.choice(["all", "predicting", [-1]]))
                names.append(line.add(prompt, {**choice.choice(fields), **limit, **rows}))
            if choice.random() < 0.6:
                tiers = {tier: choice.choice(pool) for tier in TIERS if choice.random() < 0.4}
                line.set_tiers(tiers, replace=choice.random() < 0.7)
            line.step(choice.randrange(12))
        line.finish()
    finally:
        del scheduler.kv_event_publisher.publish
    for name in names:
        line.check(name)
    assert any(line.cached(name) for name in names) and line.preempted
    assert any(line.boundaries(name) for name in names)
    check_events(published)


def check_events(published: list[Any]) -> None:
    """One hash is one content: tokens and published keys of the block and of all before it. The
    keys must also tell apart what the hashes tell apart: a router knows only them."""
    by_hash: dict[Any, Any] = {}
    by_content: dict[Any, Any] = {}
    stored = [event for event in published if type(event).__name__ == "BlockStored"]
    assert stored
    for event in stored:
        parent = event.parent_block_hash
        keys = event.extra_keys or [None] * len(event.block_hashes)
        for i, (block_hash, extra) in enumerate(zip(event.block_hashes, keys, strict=True)):
            tokens = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            content = (parent, tokens, extra)
            assert by_hash.setdefault(block_hash, content) == content
            assert by_content.setdefault(content, block_hash) == block_hash
            parent = block_hash
    steered = {content[2] for content in by_hash.values() if content[2]}
    assert len(steered) > 3, "the events hardly saw a global tier"
