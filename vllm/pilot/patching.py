# SPDX-License-Identifier: Apache-2.0
"""Points x layers x positions: at which token and layer is what the next token depends on?

Rows of one prompt's run are put, one at a time, into the run of another (activation patching, or
causal tracing after Meng et al. 2022, arXiv 2202.05262).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.entrypoints.serve.steering.client import SteeringClient
from vllm.entrypoints.serve.steering.sweep_plan import Grid, SweepPlan
from vllm.entrypoints.serve.steering.sweep_request import parse_sweep
from vllm.pilot.bench import Coder, EngineBench, LateBar
from vllm.pilot.picture import place_map, subplots
from vllm.v1.capture.figures import save_figure

if TYPE_CHECKING:
    from vllm import LLM

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a chat."""

BATCH = 1024
"""Cells that an engine is given at once: each holds a row."""


@dataclass(frozen=True)
class PatchSweep:
    """Effect of an operation on the next token, at each place."""

    metric: str
    """"logprob": log P(answer); "diff": less log P(other); "recovered": 0 is what the prompt
    gives, 1 what the clean one does."""
    points: list[str]
    layers: list[int]
    positions: list[int]
    tokens: list[str] | None
    """The text at each of `positions`; None of an engine without a tokenizer."""
    heads: list[int] | None
    """The third axis of `values` at z, where each head is changed at all positions; else None."""
    scales: list[float] | None
    values: np.ndarray
    """float64 [points, layers, positions or heads], and [scales] if these are an axis; nats, or the
    share recovered. NaN where a layer lacks the point or the head."""
    clean: float | None
    """The metric of the clean prompt, nats also where shares are recovered."""
    corrupt: float
    """The metric of the prompt without the operation."""
    noise_floor: float | None
    """The largest change, in nats, where a row is replaced by itself: what rounding does."""

    def __repr__(self) -> str:
        """Show the strongest places."""
        change = np.nan_to_num(self._changes())
        lines = [f"PatchSweep: {self.metric}, {change.size} cells"]
        for flat in np.argsort(-abs(change), axis=None)[:5]:
            point, layer, position, *scale = np.unravel_index(flat, change.shape)
            scaled = f" scale {self.scales[scale[0]]:+g}" if self.scales else ""
            lines.append(
                f"  {self.points[point]} {self.layers[layer]} {self._along[position]}{scaled}: "
                f"{self.values.flat[flat]:+.3f}"
            )
        return "\n".join(lines)

    def draw(self, target: str | Path, title: str = "", scale: float | None = None) -> None:
        """Write positions x layers as a picture, a map for each point; PNG or SVG by the suffix.

        Args:
            scale: which of the scales; the first if none is named.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is no such scale.
        """
        values = self.values
        if self.scales is not None:
            values = values[..., 0 if scale is None else self.scales.index(scale)]
        recovered = self.metric == "recovered"
        shown = values if recovered else values - self.corrupt
        names = [repr(t) for t in self.tokens] if self.tokens else list(map(str, self.positions))
        if self.heads is not None:
            names = self._along
        size = 2.5 + 0.45 * len(self.layers), 1.6 + 0.3 * len(names)
        figure, axes = subplots(len(self.points), *size)
        label = "share recovered" if recovered else f"change of {self.metric}, nats"
        for axis, point, one in zip(axes, self.points, shown, strict=True):
            place_map(axis, one.T, self.layers, names, f"layer ({point})", label)
        if title:
            figure.suptitle(title, fontsize=11)
        save_figure(figure, target)

    @property
    def _along(self) -> list[str]:
        """Names of the third axis."""
        if self.heads is not None:
            return [f"head {head}" for head in self.heads]
        texts = (
            [f" {text!r}" for text in self.tokens] if self.tokens else [""] * len(self.positions)
        )
        return [f"position {at}{text}" for at, text in zip(self.positions, texts, strict=True)]

    def _changes(self) -> np.ndarray:
        return self.values if self.metric == "recovered" else self.values - self.corrupt


def patch_sweep(
    llm: "LLM | SteeringClient | str",
    prompt: Prompt,
    clean: Prompt | None = None,
    *,
    answer: str | int,
    other: str | int | None = None,
    metric: str | None = None,
    points: str | Sequence[str] = ("post_block",),
    layers: Any = "all",
    positions: Any = "all_prompt",
    op: Mapping[str, Any] | None = None,
    scales: Sequence[float] | None = None,
    align: str | None = None,
) -> PatchSweep:
    """Put rows of the clean prompt's run into the prompt's, one place at a time; see docs/http.md.

    Args:
        llm: an engine with `enable_steering`, the family `replace` and the consumer `inline`; or
            the URL or client of a server that was started so.
        clean: a prompt of as many tokens; None where `op` has its own values or vectors.
        answer, other: a text of one token, or its id.
        metric: see `PatchSweep.metric`; by default "diff" with `other`, else "logprob".
        points: points of the stream; or `"z"` alone, whose heads are an axis in place of positions:
            each is changed at all of these. Without `clean` it is multiplied by 0.
        layers, positions: as in a capture request, at z also {layers: heads}; positions are those
            of `prompt`.
        op: in place of `{"op": "replace"}`, an operation of `SamplingParams.steering` without its
            place.
        scales: an axis more, for operations that have a scale.
        align: "end" for prompts of different lengths, which are then compared from their ends.

    Raises:
        ValueError: a field is wrong, the engine refuses it, or there are too many cells; the
            message has the field's path. Over HTTP a `SteeringError`.
    """
    fields = {
        "clean": clean, "answer": answer, "other": other, "metric": metric, "points": points,
        "layers": layers, "positions": positions, "op": op, "scales": scales, "align": align,
    }  # fmt: skip
    given = {name: value for name, value in fields.items() if value is not None}
    if isinstance(llm, str):
        with SteeringClient(llm) as client:
            return _read(client.sweep(prompt, **given))
    if isinstance(llm, SteeringClient):
        return _read(llm.sweep(prompt, **given))
    return _here(llm, prompt, given)


def _here(llm: "LLM", prompt: Prompt, given: Mapping[str, Any]) -> PatchSweep:
    bench = EngineBench(llm)
    ids, clean = (encoded(bench, text) for text in (prompt, given.get("clean")))
    assert ids is not None
    config = llm.llm_engine.vllm_config
    plan = parse_sweep({"prompt": prompt, **given}, ids, clean, config, bench.tokenizer)
    score, rows = None, None
    if clean is not None:
        [(score, rows)] = _ask(llm, plan, clean, [plan.of_clean()])
    [(corrupt, own)] = _ask(llm, plan, ids, [plan.of_prompt()])
    grid = Grid(plan, score, corrupt)
    noise = [plan.of_noise(cell, own) for cell in plan.noise_cells()]
    grid.note_noise([score for score, _ in _ask(llm, plan, ids, noise)])
    cells = plan.cells()
    bar = LateBar(total=plan.num_cells, unit="cell")
    with bar:
        while some := list(islice(cells, BATCH)):
            asked = [plan.of_cell(cell, rows) for cell in some]
            for cell, (score, _) in zip(some, _ask(llm, plan, ids, asked), strict=True):
                grid.add(cell, score)
            bar.update(len(some))
    return _read({**grid.head(), "grid": grid.table()})


def encoded(bench: Coder, prompt: Prompt | None) -> list[int] | None:
    """Return the tokens of a prompt; None of None."""
    if prompt is None or isinstance(prompt, str):
        return None if prompt is None else bench.encode(prompt)
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if len(ids) == len(prompt):
        return ids
    messages = tuple(tuple(entry.items()) for entry in prompt if not isinstance(entry, int))
    return bench.encode(messages, answer=True)


def _ask(
    llm: "LLM", plan: SweepPlan, ids: list[int], fields: list[dict[str, Any]]
) -> Iterator[tuple[float, Any]]:
    """The score of the prompt under each of some fields, and the rows that were captured."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    if not fields:
        return
    params = [SamplingParams(**plan.asks(), **each) for each in fields]
    prompts = [TokensPrompt(prompt_token_ids=ids) for _ in fields]
    for output in llm.generate(prompts, params, use_tqdm=False):
        (found,) = output.outputs
        result = (found.capture_results or {}).get("inline")
        if result is not None and result.status != "ok":
            raise ValueError(f"clean: its rows cannot be captured: {result.error}")
        assert found.logprobs
        yield plan.score(found.logprobs[0]), result.payload if result else None


def _read(answer: Mapping[str, Any]) -> PatchSweep:
    """The answer of a server, or of a grid."""
    names = ("metric", "points", "layers", "positions", "tokens", "scales", "clean")
    corrupt = answer["corrupt"]
    return PatchSweep(
        **{name: answer[name] for name in names},
        values=np.array(answer["grid"], dtype=np.float64),
        heads=answer.get("heads"),
        corrupt=float("nan") if corrupt is None else corrupt,
        noise_floor=answer["noise_floor"],
    )
