# SPDX-License-Identifier: Apache-2.0
"""Layers x heads: which attention head is what the next token depends on?

Each head is multiplied by a factor, 0 to ablate it, or gets what it gives in another prompt's run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm.pilot.bench import EngineBench, LateBar
from vllm.pilot.patching import BATCH, Prompt, encoded
from vllm.pilot.picture import place_map
from vllm.v1.capture.figures import axes_of

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.capture.figures import Target


@dataclass(frozen=True)
class HeadSweep:
    """Effect of each head on the next token."""

    metric: str
    """"logprob": log P(answer); "diff": less log P(other)."""
    layers: list[int]
    values: np.ndarray
    """float64 [layers, heads], nats: the metric with this head changed. NaN where a layer has fewer
    heads."""
    plain: float
    """The metric of the prompt as it is."""
    clean: float | None
    """The metric of the clean prompt."""

    @property
    def change(self) -> np.ndarray:
        """The change of the metric by each head, float64 [layers, heads], nats."""
        return self.values - self.plain

    @property
    def strongest(self) -> tuple[int, int]:
        """Layer and head of the largest change, up or down."""
        largest = int(np.nan_to_num(abs(self.change)).argmax())
        at, head = divmod(largest, self.values.shape[1])
        return self.layers[at], head

    def __repr__(self) -> str:
        """Show the strongest heads."""
        size = np.nan_to_num(abs(self.change))
        lines = [f"HeadSweep: {self.metric}, {np.isfinite(self.values).sum()} heads"]
        for flat in np.argsort(-size, axis=None)[:5]:
            at, head = np.unravel_index(flat, size.shape)
            lines.append(f"  layer {self.layers[at]} head {head}: {self.change[at, head]:+.3f}")
        return "\n".join(lines)

    def draw(self, target: "Target", title: str = "") -> None:
        """Draw layers x heads.

        Args:
            target: a file, PNG or SVG by its suffix; or axes of matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
        """
        layers, heads = self.values.shape
        with axes_of(target, 2.5 + 0.45 * heads, 1.6 + 0.3 * layers, title=title) as (axes,):
            names = list(map(str, self.layers))
            label = f"change of {self.metric}, nats"
            place_map(axes, self.change, range(heads), names, "head", label)
            axes.set_ylabel("layer")
            axes.invert_yaxis()


def head_sweep(
    llm: "LLM",
    prompt: Prompt,
    clean: Prompt | None = None,
    *,
    answer: str | int,
    other: str | int | None = None,
    factor: float = 0.0,
    layers: Sequence[int] | Literal["all"] = "all",
    positions: Any = "all_prompt",
) -> HeadSweep:
    """Change one head at a time, and see what it does to the next token.

    Args:
        llm: an engine with `z` in `steering_points` and `scale` in `steering_families`.
        clean: a prompt of as many tokens, whose run gives each head's rows (activation patching);
            then `z` is in `capture_points` too, and each position takes one of
            `max_steering_configs`. With None, heads are multiplied by `factor`.
        answer, other: a text of one token, or its id.
        factor: 0 ablates a head.
        positions: where the head is changed, as in a capture request.

    Raises:
        ValueError: a field is wrong, or the engine refuses it; the message has the field's path.
    """
    bench = EngineBench(llm)
    ids, ids_of_clean = encoded(bench, prompt), encoded(bench, clean)
    assert ids is not None
    tokens = [_token(bench, name, token) for name, token in (("answer", answer), ("other", other))]
    ask = _Ask(llm, [token for token in tokens if token is not None])
    heads = {n: points["z"][0] for n, points in llm.steering.heads().items() if "z" in points}
    if not heads:
        raise ValueError("layers: no layer has heads at z; start with z in steering_points")
    chosen = sorted(heads) if layers == "all" else list(layers)
    if missing := [n for n in chosen if n not in heads]:
        raise ValueError(
            f"layers: {missing} have no heads at z; layers that do are {sorted(heads)}"
        )
    score_of_clean, rows = None, None
    if ids_of_clean is not None:
        if len(ids_of_clean) != len(ids):
            raise ValueError(f"clean: has {len(ids_of_clean)} tokens and prompt {len(ids)}")
        read = {"inline": {"hooks": {"z": chosen}, "positions": positions}}
        [(score_of_clean, rows)] = ask(ids_of_clean, [{"capture": read}])
    [(plain, _)] = ask(ids, [{}])
    values = np.full((len(chosen), max(heads[n] for n in chosen)), np.nan)
    places = [(i, head) for i, n in enumerate(chosen) for head in range(heads[n])]
    cells = iter(places)
    with LateBar(total=len(places), unit="head") as bar:
        while some := list(islice(cells, BATCH)):
            asked = [_changed(chosen[i], head, factor, positions, rows) for i, head in some]
            for cell, (score, _) in zip(some, ask(ids, asked), strict=True):
                values[cell] = score
            bar.update(len(some))
    metric = "logprob" if other is None else "diff"
    return HeadSweep(metric, chosen, values, plain, score_of_clean)


def _token(bench: EngineBench, name: str, token: str | int | None) -> int | None:
    if not isinstance(token, str):
        return token
    ids = bench.encode(token, special=False)
    if len(ids) != 1:
        raise ValueError(f"{name}: {token!r} is {len(ids)} tokens; one is needed, as text or id")
    return ids[0]


def _changed(
    layer: int, head: int, factor: float, positions: Any, rows: Mapping[Any, Any] | None
) -> dict[str, Any]:
    """The fields of a request in which one head is changed; with rows, to what they have."""
    place = {"point": "z", "heads": {layer: [head]}}
    if rows is None:
        return {"steering": [{"op": "scale", "factor": factor, "positions": positions, **place}]}
    found = rows["z", layer]
    place["positions"] = found.positions.tolist()
    values = found.values[:, found.heads.index(head)]
    return {
        "steering": [
            {"op": "scale", "factor": 0.0, **place},
            {"op": "add", "values": values, **place},
        ]
    }


@dataclass(frozen=True)
class _Ask:
    """Requests for the next token alone."""

    llm: "LLM"
    answers: list[int]

    def __call__(
        self, ids: list[int], fields: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[float, Any]]:
        """The score of a prompt under each of some fields, and the rows that were captured."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = [
            SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=self.answers, **each)
            for each in fields
        ]
        prompts = [TokensPrompt(prompt_token_ids=ids) for _ in fields]
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            (found,) = output.outputs
            result = (found.capture_results or {}).get("inline")
            if result is not None and result.status != "ok":
                raise ValueError(f"clean: its rows cannot be captured: {result.error}")
            assert found.logprobs
            first, *less = [found.logprobs[0][token].logprob for token in self.answers]
            yield first - sum(less), result.payload if result else None
