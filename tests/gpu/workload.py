# SPDX-License-Identifier: Apache-2.0
"""Checks of what a scheduler does to requests, with graphs on, for `tests.gpu.mode`: the prefix
cache, preemption, global tiers that change under way, the model's two forms, and graphs that
capture at few sites."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from tests.conformance import reference as ref
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

if TYPE_CHECKING:
    from tests.gpu.mode import Mode

FORMS_NOISE = 0.1
"""Nats by which a prompt's log-probabilities may differ between the two forms: rounding."""


def prefix_cache(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """The second of equal requests reads its prompt from the cache and its rows are the first's;
    a steered one shares nothing with them."""
    from vllm import SamplingParams

    vector = torch.randn(mode.hidden, generator=torch.Generator().manual_seed(21)) * 2
    steered = {"steering_vectors": {"post_attn": {1: vector}}}
    hooks = {"post_block": "all"}
    cached, rows = [], []
    asked: list[dict[str, Any]] = [{}, {}, steered]
    for fields in asked:
        params = SamplingParams(
            max_tokens=8,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            capture={"inline": {"hooks": hooks, "positions": "all_generated"}},
            **fields,
        )
        prompts: Any = [{"prompt_token_ids": [*t, 7]} for t in tokens]
        outputs: list[Any] = mode.llm.generate(prompts, params, use_tqdm=False)
        cached.append(sum(output.num_cached_tokens or 0 for output in outputs))
        rows.append([o.capture_results["inline"].payload["post_block", 5] for o in outputs])
    near = max(
        float((a.values.float() - b.values.float()).norm() / a.values.float().norm())
        for a, b in zip(rows[0], rows[1], strict=True)
    )
    found = {"cached_tokens": cached[1], "difference": near}
    return {**found, "ok": cached[0] == cached[2] == 0 < cached[1] and near <= 0.03}


def preemption(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """More requests than the cache holds: rows of preempted ones are those of the reference."""
    client: Any = mode.llm.llm_engine.engine_core
    scheduler = client.engine_core.scheduler
    preempt, count = scheduler._preempt_request, Counter[str]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        count["preempted"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    try:
        results = mode.run(tokens, [{}] * len(tokens), max_tokens=60)
    finally:
        del scheduler._preempt_request
    error = mode.read_error(results)
    ok = count["preempted"] > 0 and error <= mode.noise_limit
    return {"preempted": count["preempted"], "error": error, "ok": ok}


def tiers_under_way(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """A global vector set while requests run acts from one step on, at every rank: all rows are the
    reference's, steered where the row's version says so."""
    vector = torch.randn(mode.hidden, generator=torch.Generator().manual_seed(22)) * 2
    site = ("post_attn", 2)
    steps = 0

    def between() -> None:
        nonlocal steps
        steps += 1
        if steps == 12:
            mode.llm.steering.set({site[0]: {site[1]: vector}})

    results = mode.run(tokens, [{}] * len(tokens), max_tokens=40, between=between, versions=True)
    mode.llm.steering.clear()
    worst, steered, plain = 0.0, 0, 0
    for ids, rows in results:
        versions = rows.pop(("version", 0))
        every = versions > versions[0]
        steered, plain = steered + int(every.sum()), plain + int((~every).sum())
        want = ref.write(mode.hf, mode.adapter, ids, site, vector, every).rows
        worst = max(worst, *(mode.worst_row(rows[s], want[s]) for s in want))
    limit = mode.noise_limit
    ok = worst <= limit and steered > 0 and plain > 0
    return {"error": worst, "limit": limit, "rows_before": plain, "rows_after": steered, "ok": ok}


def forms(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """Steps that use nothing run the plain form, others the one with taps; a plain request's
    log-probabilities are the same but for rounding."""
    runner = mode.runner()
    if runner is None:
        return {"out of reach": True, "ok": True}
    used_forms, count = runner.interventions._variants, Counter[bool]()
    choose = used_forms.choose

    def counted(tapped: bool, captures: bool) -> None:
        choose(tapped, captures)
        count[used_forms.tapped] += 1

    vector = torch.randn(mode.hidden, generator=torch.Generator().manual_seed(23)) * 2
    steered = {"steering_vectors": {p: {"all": vector} for p in ("pre_attn", "post_block")}}
    used_forms.choose = counted
    try:
        alone = mode.logprobs(tokens, [{}] * len(tokens))
        plain_steps = dict(count)
        count.clear()
        among = mode.logprobs(tokens, [*[{}] * (len(tokens) - 1), steered])
    finally:
        del used_forms.choose
    pairs = list(zip(alone, among, strict=True))
    noise = max(float((a - b).abs().max()) for a, b in pairs[:-1])
    moved = float((pairs[-1][0] - pairs[-1][1]).abs().max())
    # The steered one may end before the others.
    split = set(plain_steps) == {False} and count[True] > 0
    found = {"plain_steps": plain_steps.get(False, 0), "tapped_steps": count[True]}
    ok = split and noise <= FORMS_NOISE and moved > 5 * FORMS_NOISE
    return {**found, "difference": noise, "identical": noise == 0, "steered_moved": moved, "ok": ok}


def few_sites(mode: Mode, ids: list[int]) -> dict[str, Any]:
    """Rows of one site are the same bits whether all are captured, that one alone, or by graphs
    that capture nowhere else, which are recorded meanwhile; another site's are others."""
    first, other = ("post_block", 0), ("post_block", mode.layers - 1)
    ((answer, everywhere),) = mode.run([ids], [{}], max_tokens=200)
    runs = [mode.run([ids], [{}], {first[0]: [0]}, max_tokens=200)[0] for _ in range(4)]
    same = all(tokens == answer and torch.equal(rows[first], everywhere[first])
               for tokens, rows in runs)  # fmt: skip
    apart = mode.worst_row(runs[-1][1][first], everywhere[other].float())
    found: dict[str, Any] = {"identical": same, "other": apart, "ok": same and apart > 0.3}
    if (runner := mode.runner()) is not None:
        variants = runner.interventions._variants
        manager = variants._graph_owner()
        wanted = frozenset([runner.interventions.capture.sites[first]])
        found["kept"] = wanted in variants._sets.sets
        found["ok"] &= found["kept"] == (variants._late and isinstance(manager, CudaGraphManager))
    return found
