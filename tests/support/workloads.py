# SPDX-License-Identifier: Apache-2.0
"""Random workloads, and what must come back of each: exactly the rows that were selected.

A workload is drawn from a seed. `serve` drives an engine in this process through it step by step:
requests come, are aborted and are thrown out at the steps the workload says. `check` recomputes
from each request alone which rows must have come back and compares every one with Hugging Face, run
over the final token sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from tests.conformance.models import LAYERS, VOCAB
from tests.conformance.reference import Site
from tests.conformance.runner import READ_TOLERANCE
from tests.support import serving
from tests.support.selected import expected_positions
from tests.support.serving import Ask, Judge, capture, deltas_of, vector, worst_row
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.sampling_params import RequestOutputKind

MOST_STEPS = 2000
EOS = list(range(7, VOCAB, 21))
"""Tokens that end a sequence, see `generation_config.json` of the model; about one in twenty."""

_ids = count()
_KINDS = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)


# -- what is asked --------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One request, when it comes, and when its caller gives it up."""

    ask: Ask
    arrives: int
    """Before which step."""
    aborted: int | None = None


@dataclass(frozen=True)
class Workload:
    jobs: list[Job]
    thrown_out: set[int] = field(default_factory=set)
    """Steps before which all running requests lose what they computed, by a reset of the cache."""


def draw(seed: int) -> Workload:
    """The workload of a seed."""
    rng = np.random.default_rng(seed)
    prefixes = [_tokens(rng, 64) for _ in range(2)]
    pattern = _tokens(rng, int(rng.integers(2, 5))) * 32
    jobs = []
    for _ in range(rng.integers(5, 10)):
        own = _tokens(rng, 32)
        start = [prefixes[0], prefixes[1], pattern, own][rng.integers(4)]
        prompt = [
            *start[: rng.choice([0, 8, 31, 32, 33, 40, 64])],
            *own[: rng.integers(1, 24)],
        ]
        arrives = int(rng.choice([0, 0, int(rng.integers(40))]))
        aborted = arrives + int(rng.integers(1, 30)) if rng.random() < 0.25 else None
        jobs.append(Job(Ask(prompt, _fields(rng, prompt)), arrives, aborted))
    thrown_out = {int(s) for s in rng.integers(3, 40, size=2)} if rng.random() < 0.4 else set()
    return Workload(jobs, thrown_out)


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Without token 0, which is special to the tokenizer."""
    return [int(t) for t in rng.integers(1, VOCAB, size=count)]


def _fields(rng: np.random.Generator, prompt: list[int]) -> dict[str, Any]:
    """What one request says."""
    lengths = [1, 2, int(rng.integers(3, 12)), *rng.integers(12, 60, size=3).tolist()]
    most = lengths[rng.integers(len(lengths))]
    fields: dict[str, Any] = {
        "max_tokens": most,
        "logprobs": None,
        "detokenize": True,
        "ignore_eos": bool(rng.random() < 0.8),
        "output_kind": _KINDS[rng.integers(3)],
        "temperature": float(rng.choice([0.0, 1.0])),
    }
    if rng.random() < 0.25:
        fields |= {"n": int(rng.integers(2, 4)), "temperature": 1.0}
    if rng.random() < 0.3:
        fields["stop"] = [str(s) for s in rng.choice(["9", " t1", "t2", "3 t", "55"], size=2)]
        fields["include_stop_str_in_output"] = bool(rng.random() < 0.5)
    if rng.random() < 0.25:
        fields["stop_token_ids"] = _tokens(rng, 25)
    if rng.random() < 0.2:
        fields["min_tokens"] = int(rng.integers(most + 1))
    if rng.random() < 0.5:
        tier = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
        at = {int(rng.integers(LAYERS)): vector(int(rng.integers(600, 603)))}
        fields[tier[rng.integers(3 if most > 1 else 2)]] = {str(rng.choice(STREAM_POINTS)): at}
    if rng.random() < 0.85:
        points = rng.choice(STREAM_POINTS, size=rng.integers(1, 4), replace=False).tolist()
        layers = "all" if rng.random() < 0.4 else [int(rng.integers(LAYERS))]
        fields |= capture(_selectors(rng, prompt, most), points, layers)
    return fields


def _selectors(rng: np.random.Generator, prompt: list[int], most: int) -> Any:
    """A `positions` value that selects something."""
    if rng.random() < 0.6:
        return _selector(rng, prompt, most)
    chosen = [_selector(rng, prompt, most) for _ in range(rng.integers(1, 4))]
    return [entry for one in chosen for entry in (one if isinstance(one, list) else [one])]


def _selector(rng: np.random.Generator, prompt: list[int], most: int) -> Any:
    length, end = len(prompt), len(prompt) + most - 1
    names = ["last_prompt", "all_prompt", "predicting", "all"]
    names += ["all_generated", "last_generated"] * 2 if most > 1 else []
    first = int(rng.integers(length))
    part = prompt[first : first + int(rng.integers(1, 3))]
    which = str(rng.choice(["first", "last", "all"]))
    kind = rng.integers(8)
    if kind == 0:
        edges = [p for p in (31, 32, 63, 64) if p < end]  # of blocks
        some = rng.integers(end, size=3).tolist()
        return sorted({*some[: rng.integers(1, 4)], *edges[: rng.integers(3)]})
    if kind == 1:
        return [-1, -int(rng.integers(1, length + 1))]
    if kind == 2:
        start = int(rng.integers(end))
        stop = int(rng.integers(start + 1, end + 1))
        return {"start": start, "stop": stop, "step": int(rng.integers(1, 8))}
    if kind == 3:
        return {"start": first - length, "step": int(rng.integers(1, 5))}
    if kind == 4:
        return {"text": " ".join(f"t{t}" for t in part), "which": which}
    if kind == 5:
        return {"token_ids": part, "which": which}
    return names[rng.integers(len(names))]


# -- what that means, without the engine's code ---------------------------------------------


def plain(selector: Any, prompt: list[int], end: int) -> Any:
    """The selector with positions counted from 0 in place of searches and ranges.

    Args:
        end: one past the last position that the request can reach.
    """
    if isinstance(selector, list):
        parts = [plain(s, prompt, end) for s in selector]
        return [e for part in parts for e in (part if isinstance(part, list) else [part])]
    if isinstance(selector, int):
        return selector % len(prompt) if selector < 0 else selector
    if isinstance(selector, str):
        return selector
    if "start" in selector:
        start = selector["start"] % len(prompt) if selector["start"] < 0 else selector["start"]
        return list(range(start, selector.get("stop", end), selector.get("step", 1)))
    words = [f" t{t}" if i else f"t{t}" for i, t in enumerate(prompt)]
    part: Any = selector.get("token_ids") or selector["text"]
    text: Any = prompt if "token_ids" in selector else "".join(words)
    lengths = [1 if "token_ids" in selector else len(word) for word in words]
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    begins = [i for i in range(len(text)) if text[i : i + len(part)] == part]
    begins = {"first": begins[:1], "last": begins[-1:], "all": begins}[selector["which"]]
    return sorted({owner[i] for begin in begins for i in range(begin, begin + len(part))})


# -- what comes back ------------------------------------------------------------------------


@dataclass
class Answer:
    """One completion, put together from the outputs that were given out."""

    token_ids: list[int] = field(default_factory=list)
    sites: dict[Site, list[Any]] = field(default_factory=dict)
    """Site -> `CapturedRows`, to be read one after the other."""
    status: str = ""
    error: str | None = None
    finished: bool = False
    stop_reason: Any = None

    def add(self, completion: Any, delta: bool) -> None:
        assert not self.finished, "an output after the last one"
        self.token_ids = [*(self.token_ids if delta else ()), *completion.token_ids]
        self.finished = completion.finish_reason is not None
        self.stop_reason = completion.stop_reason
        if completion.capture_results is None:
            return
        result = completion.capture_results["inline"]
        self.status, self.error = result.status, result.error
        for site, rows in result.payload.items():
            before = self.sites.get(site, []) if delta else []
            self.sites[site] = [*before, rows]


@dataclass
class Served:
    workload: Workload
    answers: list[dict[int, Answer]]
    """Of each job: sample -> answer."""
    steps: serving.Steps
    cached: int
    """Tokens that came from the prefix cache."""


def serve(llm: LLM, workload: Workload) -> Served:
    """Run a workload on an engine that does nothing else.

    Raises:
        AssertionError: it does not come to an end.
    """
    engine = llm.llm_engine
    assert engine.reset_prefix_cache(), "blocks are still in use"
    answers: list[dict[int, Answer]] = [{} for _ in workload.jobs]
    names = [f"{next(_ids)}-job" for _ in workload.jobs]
    left, step, cached = len(names), 0, 0
    with serving.watching(llm, MOST_STEPS) as steps:
        while left or engine.has_unfinished_requests():
            assert step < MOST_STEPS, f"not done after {step} steps"
            if step in workload.thrown_out:
                engine.reset_prefix_cache(reset_running_requests=True)
            for name, job in zip(names, workload.jobs, strict=True):
                if job.arrives == step:
                    left -= 1
                    engine.add_request(
                        name, {"prompt_token_ids": job.ask.prompt}, job.ask.params(log_probs=False)
                    )
                if job.aborted == step:
                    engine.abort_request([name])
            outputs: list[Any] = engine.step()
            for output in outputs:
                index = names.index(output.request_id)
                job = workload.jobs[index]
                delta = job.ask.fields["output_kind"] == RequestOutputKind.DELTA
                for completion in output.outputs:
                    answers[index].setdefault(completion.index, Answer()).add(completion, delta)
                cached += output.num_cached_tokens or 0
            step += 1
    return Served(workload, answers, steps, cached)


def check(served: Served, judge: Judge) -> None:
    """Every completion has the rows that were selected: each once, in order, and the model's.

    Raises:
        AssertionError: naming the job.
    """
    for i, (job, answers) in enumerate(zip(served.workload.jobs, served.answers, strict=True)):
        fields = {k: v for k, v in job.ask.fields.items() if "vectors" not in k}
        if job.aborted is None:
            assert sorted(answers) == list(range(job.ask.fields.get("n", 1))), f"job {i}"
        for sample, answer in answers.items():
            try:
                assert answer.finished or job.aborted is not None, "no last output"
                _check_completion(job.ask, answer, judge)
            except AssertionError as error:
                raise AssertionError(
                    f"job {i}, sample {sample}: {error}\nprompt of {len(job.ask.prompt)} tokens, "
                    f"{len(answer.token_ids)} generated, arrives {job.arrives}, aborted "
                    f"{job.aborted}, {fields}"
                ) from error


def _check_completion(ask: Ask, answer: Answer, judge: Judge) -> None:
    if "capture" not in ask.fields:
        assert not answer.sites, "rows that nobody asked for"
        return
    spec = ask.fields["capture"]["inline"]
    prompt, generated = len(ask.prompt), len(answer.token_ids)
    selector = plain(spec["positions"], ask.prompt, prompt + ask.fields["max_tokens"] - 1)
    want = expected_positions(selector, prompt, generated)
    named = [s for s in selector if isinstance(s, int)] if isinstance(selector, list) else []
    unreached = [p for p in named if p >= prompt + generated - 1]
    if answer.finished:
        assert answer.status == ("partial_error" if unreached else "ok"), answer.error
    else:
        # Given up: what had come by then is a beginning, and the last row is not yet known.
        without = [s for s in (selector if isinstance(selector, list) else [selector])]
        without = [s for s in without if s != "last_generated"]
        want = expected_positions(without, prompt, generated)
    points = ask.fields["capture"]["inline"]["hooks"]
    sites = {(p, n) for p, at in points.items() for n in (range(LAYERS) if at == "all" else at)}
    if answer.finished:
        assert set(answer.sites) == sites
    sequence = [*ask.prompt, *answer.token_ids][:-1]
    expected: Mapping[Site, torch.Tensor] = {}
    if answer.sites and want:
        expected = judge.reference.run(sequence, deltas_of(ask, len(sequence))).rows
    for site, pieces in answer.sites.items():
        positions = [p for rows in pieces for p in rows.positions.tolist()]
        if answer.finished:
            assert positions == want, f"{site}: positions {positions}, expected {want}"
        else:
            assert positions == want[: len(positions)], f"{site}: {positions} of {want}"
        token_ids = [t for rows in pieces for t in rows.token_ids.tolist()]
        assert token_ids == [sequence[p] for p in positions], f"{site}: token ids {token_ids}"
        if positions:
            error = worst_row(torch.cat([r.values for r in pieces]), expected[site][positions])
            assert error <= READ_TOLERANCE, f"{site}: rows off by {error}"


def tally(served: Served) -> Counter[str]:
    """How often what makes capture hard happened."""
    counts: Counter[str] = Counter(
        workloads=1,
        preempted=len(served.steps.preempted),
        recomputed=len(served.steps.resumed),
        drafted=served.steps.drafted,
        cached=served.cached,
    )
    for job, answers in zip(served.workload.jobs, served.answers, strict=True):
        over = [answer.finished for answer in answers.values()]
        counts["aborted"] += job.aborted is not None and not (over and all(over))
        for answer in answers.values():
            counts["completions"] += 1
            counts["stopped by a string"] += isinstance(answer.stop_reason, str)
            counts["stopped by a token"] += isinstance(answer.stop_reason, int)
            counts["capturing and steered"] += job.ask.steered and bool(answer.sites)
            counts["sites"] += len(answer.sites)
            counts["rows"] += sum(len(rows) for at in answer.sites.values() for rows in at)
    return counts
