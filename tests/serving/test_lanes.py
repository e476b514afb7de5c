# SPDX-License-Identifier: Apache-2.0
"""A stream of several lanes (Gemma 3n) behind an engine: vectors of all lanes and of one, rows of
all and of one, in files, in global tiers, with cached prefixes.

The reference is Hugging Face's model with the lanes of its blocks changed.
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
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.capture import reader

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

PROMPT = check.prompts(seed=5, lengths=(17,))[0]
ALL_LANES = tuple(range(LANES))
READ = {"hooks": {"pre_attn": "all", "post_block": "all"}, "positions": "all"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("acts"))


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, root: str) -> Iterator[Pair]:
    row = tiny_models.row("gemma3n")
    path = tiny_models.path(row.name)
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline", f"filesystem:root={root},flush_seconds=0.02"],
        enable_prefix_caching=True,
        block_size=16,
    )
    yield Pair(llm, check.Reference(row, models.load(row, path)))
    shut_down(llm)


def vector(seed: int, rows: int = 0) -> torch.Tensor:
    """float32 [hidden] or [rows, hidden], of the size of the tiny model's lanes."""
    size = (rows, models.HIDDEN) if rows else (models.HIDDEN,)
    return 3.0 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def of(lane: int | None, one: torch.Tensor) -> torch.Tensor:
    """[lanes, hidden]: a vector in one lane, or in all."""
    made = torch.zeros(LANES, models.HIDDEN)
    made[range(LANES) if lane is None else lane] = one
    return made


def add(given: torch.Tensor, **more: Any) -> dict[str, Any]:
    entry = {"op": "add", "point": "post_block", "layers": 1, "vector": given, **more}
    return {"steering": [entry]}


# What is asked for; its site; what it adds, [lanes, hidden]; and what it must not be.
WAYS: dict[str, tuple[dict[str, Any], tuple[str, int], torch.Tensor, torch.Tensor]] = {
    "every lane": (
        {"steering_vectors": {"pre_attn": {1: vector(1)}}},
        ("pre_attn", 1),
        of(None, vector(1)),
        of(1, vector(1)),
    ),
    "lane by lane": (
        {"steering_vectors": {"post_block": {2: {"vector": vector(2, LANES), "scale": 0.5}}}},
        ("post_block", 2),
        0.5 * vector(2, LANES),
        0.5 * vector(2, LANES).flip(0),
    ),
    "lists": (
        {"steering_vectors": {"post_block": {2: vector(3, LANES).tolist()}}},
        ("post_block", 2),
        vector(3, LANES),
        vector(3, LANES).roll(1, 0),
    ),
    "one lane": (
        {"steering_vectors": {"pre_attn": {0: {"vector": vector(4), "lane": 2}}}},
        ("pre_attn", 0),
        of(2, vector(4)),
        of(1, vector(4)),
    ),
    "op on every lane": (
        add(vector(5)), ("post_block", 1), of(None, vector(5)), of(0, vector(5)),
    ),
    "op lane by lane": (
        add(vector(6, LANES)), ("post_block", 1), vector(6, LANES), vector(6, LANES).flip(0),
    ),
    "op on one lane": (
        add(vector(7), lane=1, scale=2.0),
        ("post_block", 1),
        of(1, 2 * vector(7)),
        of(0, 2 * vector(7)),
    ),
}  # fmt: skip


def test_each_way_to_write(pair: Pair) -> None:
    """All in one batch, each as the reference; another lane in its place would be seen."""
    cases = [(PROMPT, fields) for fields, *_ in WAYS.values()]
    written = complete(pair.llm, cases)
    read = complete(pair.llm, cases, log_probs=False, capture=READ)
    for name, logits, rows in zip(WAYS, written, read, strict=True):
        _, site, delta, other = WAYS[name]
        length = len(logits.token_ids)
        want, wrong = (
            pair.reference.run(logits.token_ids, {site: d.flatten().expand(length, -1)})
            for d in (delta, other)
        )
        got = log_probs_of(logits)
        assert check.worst_row(got, want.logits.log_softmax(-1)) < check.WRITE_TOLERANCE, name
        assert check.worst_row(got, wrong.logits.log_softmax(-1)) > check.LEAST_MOVE, name
        assert rows.token_ids == logits.token_ids
        for at, expected in want.rows.items():
            assert check.worst_row(rows.rows[at], expected) < check.READ_TOLERANCE, (name, at)


def test_values_of_positions(pair: Pair) -> None:
    """A vector for each position, in one lane."""
    values, places = vector(8, 2), [9, 3]
    entry = {"op": "add", "point": "pre_attn", "layers": 2, "values": values, "lane": 1}
    fields = {"steering": [{**entry, "positions": places}]}
    [got] = complete(pair.llm, [(PROMPT, fields)])
    deltas = []
    for order in (places, places[::-1]):
        delta = torch.zeros(len(got.token_ids), LANES, models.HIDDEN)
        delta[order, 1] = values
        deltas.append({("pre_attn", 2): delta.flatten(1)})
    want, wrong = (
        pair.reference.run(got.token_ids, d).logits.log_softmax(-1) for d in deltas
    )  # fmt: skip
    assert check.worst_row(log_probs_of(got), want) < check.WRITE_TOLERANCE
    assert check.worst_row(log_probs_of(got), wrong) > check.LEAST_MOVE


def ask(pair: Pair, **fields: Any) -> Any:
    params = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, **fields)
    [output] = pair.llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], params, use_tqdm=False)
    return output.outputs[0]


def test_one_lane_is_read(pair: Pair, root: str) -> None:
    """Inline and in files; `final` has no lanes and is as wide as ever."""
    hooks = {"pre_attn": [0, 3], "post_block": [1]}
    one = {"hooks": hooks, "positions": "all", "lane": 2}
    all_lanes = {"hooks": {**hooks, "final": "all"}, "positions": "all"}
    stored = {"filesystem": {**one, "request_id": "lane", "tag": "t"}}
    results = ask(pair, capture={"inline": [one, all_lanes], **stored}).capture_results
    lane, whole = results["inline[0]"].payload, results["inline[1]"].payload
    assert whole["final", models.LAYERS - 1].values.shape == (len(PROMPT) + 3, models.HIDDEN)
    written = reader.open(root).find("lane", "t")
    for site in [("pre_attn", 0), ("pre_attn", 3), ("post_block", 1)]:
        rows, every = lane[site], whole[site]
        assert rows.heads == (2,) and every.heads == ALL_LANES
        assert every.values.shape == (len(PROMPT) + 3, LANES, models.HIDDEN)
        assert torch.equal(rows.values[:, 0], every.values[:, 2])
        apart = (rows.values[:, 0] - every.values[:, 1]).norm() / rows.values.norm()
        assert apart > check.LEAST_MOVE, "lanes differ"
        assert torch.equal(written.rows(*site).values, rows.values)


def test_scores_and_means_of_lanes(pair: Pair, root: str) -> None:
    """`project` gives a value for each lane and direction, `reduce` a mean of each; `lane` one."""
    hooks = {"pre_attn": [0, 3], "post_block": [1]}
    both, far = vector(20, 2), vector(21, 2)
    apart = {"pre_attn": {0: both, 3: far}, "post_block": {1: both}}
    asked: list[dict[str, Any]] = [
        {"hooks": hooks, "positions": "all", "project": both},
        {"hooks": hooks, "positions": "all", "project": apart, "lane": 2},
        {"hooks": hooks, "positions": [0, 3, 9], "reduce": "mean"},
        {"hooks": hooks, "positions": [0, 3, 9], "reduce": "mean", "lane": 1},
        {"hooks": {"final": "all"}, "positions": "all", "project": far},
        {"hooks": hooks, "positions": "all"},
    ]
    stored = {"scores": asked[0], "mean": asked[2]}
    outputs = [
        ask(pair, capture={"inline": asked, "filesystem": {**one, "request_id": name, "tag": "t"}})
        for name, one in stored.items()
    ]
    scores, scores_of_2, mean, mean_of_1, final, rows = (
        outputs[0].capture_results[f"inline[{i}]"].payload for i in range(len(asked))
    )
    want = pair.reference.run([*PROMPT, *outputs[0].token_ids[:-1]]).rows
    for site in [("pre_attn", 0), ("pre_attn", 3), ("post_block", 1)]:
        lanes = want[site].unflatten(1, (LANES, -1))
        under, of_lanes = lanes @ both.T, lanes[[0, 3, 9]].mean(0, keepdim=True)
        matrix = apart[site[0]][site[1]]
        for got, chosen, expected, wrong in (
            (scores, ALL_LANES, under, under.roll(1, 1)),
            (scores_of_2, (2,), (lanes @ matrix.T)[:, 2:], (lanes @ matrix.T)[:, 1:2]),
            (mean, ALL_LANES, of_lanes, of_lanes.roll(1, 1)),
            (mean_of_1, (1,), of_lanes[:, 1:2], of_lanes[:, 2:]),
            (rows, ALL_LANES, lanes, lanes.roll(1, 1)),
        ):
            values = got[site].values
            assert (values.shape, got[site].heads) == (expected.shape, chosen), site
            assert check.worst_row(values.flatten(1), expected.flatten(1)) < check.READ_TOLERANCE
            assert check.worst_row(values.flatten(1), wrong.flatten(1)) > check.LEAST_MOVE
        for name, inline in (("scores", scores), ("mean", mean)):
            written = reader.open(root).find(name, "t").rows(*site)
            assert torch.equal(written.values, inline[site].values)
            assert written.heads == ALL_LANES
    at = ("final", models.LAYERS - 1)
    assert final[at].values.shape == (len(PROMPT) + 3, 2) and not final[at].heads


def test_global_vectors_modules_and_cached_prefixes(pair: Pair) -> None:
    """A lane of a global tier, and of a module, is a request's own; another lane is another prefix.

    Each is asked for twice, so that the second finds the first one's prefix in the cache."""
    at = {"post_block": {1: {"vector": vector(9), "lane": 0}}}
    other = {"post_block": {1: {"vector": vector(9), "lane": 1}}}
    capture = {"inline": {"hooks": {"post_block": [3]}, "positions": "last_prompt"}}

    def last(**fields: Any) -> torch.Tensor:
        first, again = (
            ask(pair, capture=capture, **fields).capture_results["inline"].payload["post_block", 3]
            for _ in range(2)
        )
        assert check.worst_row(again.values.flatten(1), first.values.flatten(1)) < 1e-5
        rows: torch.Tensor = first.values.flatten()
        return rows

    own, elsewhere, plain = last(steering_vectors=at), last(steering_vectors=other), last()
    pair.llm.steering.set(at)
    tier = last()
    pair.llm.steering.clear()
    pair.llm.steering.register_module("lane0", at)
    module = last(steering_modules=["lane0"])
    pair.llm.steering.unregister_module("lane0")
    assert torch.equal(last(), plain)
    for same in (tier, module):
        assert (same - own).norm() < 1e-5 * own.norm()
    for one, two in ((own, elsewhere), (own, plain), (elsewhere, plain)):
        assert (one - two).norm() > check.LEAST_MOVE * own.norm()


def test_plain_neighbours_keep_their_bits(pair: Pair) -> None:
    """Beside steered requests; a steered one would differ."""
    fields = [fields for fields, *_ in WAYS.values()]
    nothing: list[dict[str, Any]] = [{}] * len(fields)
    batches = []
    for neighbours in (nothing, fields):
        cases = [(PROMPT, {}), *((PROMPT, one) for one in neighbours)]
        pair.llm.reset_prefix_cache()
        batches.append(complete(pair.llm, cases, log_probs=False, capture=READ))
    (alone, *_), (plain, steered, *_) = batches
    for site, rows in alone.rows.items():
        assert torch.equal(rows, plain.rows[site]), site
    assert not torch.equal(alone.rows["pre_attn", 1], steered.rows["pre_attn", 1])
