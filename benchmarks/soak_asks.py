# SPDX-License-Identifier: Apache-2.0
"""What the clients of `benchmarks.serve_soak` ask, and the answer each must get.

Twins come from one offline `LLM`, each ask alone: nothing of HTTP, of other requests or of a second
process can be in them. So that a mix-up cannot pass for an answer, all twins differ, in their texts
and in their rows; so that a greedy choice does not hang on rounding, no ask is taken whose best two
tokens are ever closer than `MARGIN`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm import LLM, SamplingParams
from vllm.entrypoints.serve.steering.client import Rows, Site

TOLERANCE = 1e-4
"""Most a row may differ from its twin, relative to its norm. float32 sums of batches of other
shapes differ by some 1e-6."""
MARGIN = 1e-3
"""Of log-probabilities."""
LEAST_APART = 0.01
"""Least two twins differ, relative."""
_CHARACTERS = string.ascii_letters + " "
_SELECTORS = ("all", "all_prompt", "all_generated", "last_prompt")


@dataclass(frozen=True)
class Ask:
    prompt: str
    chat: bool
    tokens: int
    sent: Mapping[str, Any]
    """Words in which a body says what `steering` does."""
    steering: Mapping[str, Any]
    """Fields of SamplingParams."""
    consumers: tuple[str, ...]
    selection: Mapping[str, Any]
    """`hooks`, `positions` and perhaps `project`, for each consumer."""


@dataclass(frozen=True)
class Twin:
    text: str
    rows: dict[Site, Rows]


@dataclass
class Asks:
    """Distinct asks in pairs, which differ in their prompts only, and their twins."""

    asks: list[Ask] = field(default_factory=list)
    twins: list[Twin] = field(default_factory=list)
    modules: dict[str, Any] = field(default_factory=dict)
    """Name -> vectors, to be registered."""
    allowed: list[int] = field(default_factory=list)
    """Tokens that are one character each: equal texts are equal tokens."""
    least_apart: float = np.inf
    """Least difference of the rows of two asks."""
    least_steered: float = np.inf
    """Least difference of the rows of an ask that are steered, from those without."""
    refused: int = 0
    """Pairs that were drawn and not taken: a margin or a change of rows too small, or a text like
    another's."""

    def body(self, number: int) -> dict[str, Any]:
        """The fields of a body, without prompt and capture."""
        ask = self.asks[number]
        common = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": self.allowed}
        return {**common, "max_tokens": ask.tokens, **ask.sent}


def apart(one: Mapping[Site, Rows], other: Mapping[Site, Rows]) -> float:
    """Largest difference of two rows at the same place, relative to its norm; infinite where sites,
    positions or tokens differ."""
    if one.keys() != other.keys():
        return np.inf
    for site, rows in one.items():
        like = other[site]
        if not np.array_equal(rows.positions, like.positions):
            return np.inf
        if not np.array_equal(rows.token_ids, like.token_ids):
            return np.inf
    return values_apart(one, other)


def values_apart(one: Mapping[Site, Rows], other: Mapping[Site, Rows]) -> float:
    """The same of the values alone; infinite where shapes differ, and for no rows.

    A row that is smaller than the median of its site's is measured by that median: scores may be
    near zero, where the products that they are sums of are not.
    """
    if not one or one.keys() != other.keys():
        return np.inf
    worst = 0.0
    for site, rows in one.items():
        like = other[site]
        if rows.values.shape != like.values.shape or not len(rows.values):
            return np.inf
        norms = np.linalg.norm(like.values, axis=1)
        norms = np.maximum(norms, np.median(norms))
        worst = max(worst, (np.linalg.norm(rows.values - like.values, axis=1) / norms).max())
    return float(worst)


class Drawer:
    """Draws asks and their twins from a seed."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.rng = np.random.default_rng(seed)
        self.made = Asks()
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
        self.made.allowed = [
            i for i, text in enumerate(texts) if len(text) == 1 and text in _CHARACTERS
        ]
        self.layers = llm.llm_engine.model_config.hf_text_config.num_hidden_layers
        self.prefixes = [self._text(36), self._text(36)]
        probe = Ask(
            self._text(12), False, 1, {}, {}, (),
            {"hooks": {"post_block": [self.layers // 2]}, "positions": "all"},
        )  # fmt: skip
        [rows] = self._answer(probe)[0].rows.values()
        norm = float(np.linalg.norm(rows.values, axis=1).mean())
        draws = self.rng.standard_normal((4, rows.values.shape[1]))
        self.vectors = (2 * norm * draws / np.linalg.norm(draws, axis=1)[:, None]).astype("f4")
        for n in range(2):
            self.made.modules[f"soak{n}"] = {"post_block": {n: self.vectors[n]}}

    def draw(self, pairs: int) -> Asks:
        made = self.made
        while len(made.asks) < 2 * pairs:
            common = self._common()
            pair = [Ask(self._prompt(), *common) for _ in range(2)]
            answers = [self._answer(ask) for ask in pair]
            steered = [ask for ask in pair if ask.steering]
            plain = [self._answer(replace(ask, steering={}))[0] for ask in steered]
            moved = [
                values_apart(twin.rows, other.rows)
                for (twin, _), other in zip(answers, plain, strict=False)
            ]
            moved = [by for by in moved if by]
            texts = [twin.text for twin in (*made.twins, *(twin for twin, _ in answers), *plain)]
            if (
                len(set(texts)) < len(texts)
                or min(margin for _, margin in answers) < MARGIN
                or min(moved, default=np.inf) < LEAST_APART
            ):
                made.refused += 1
                continue
            made.asks += pair
            made.twins += [twin for twin, _ in answers]
            made.least_steered = min([made.least_steered, *moved])
        with_rows = [twin.rows for twin in made.twins if twin.rows]
        made.least_apart = min(
            (values_apart(a, b) for i, a in enumerate(with_rows) for b in with_rows[:i]),
            default=np.inf,
        )
        if made.least_apart < LEAST_APART:
            raise RuntimeError(f"with this seed a mix-up of rows could pass: {made.least_apart=}")
        return made

    def _text(self, length: int) -> str:
        return "".join(self.rng.choice(list(_CHARACTERS), size=length))

    def _prompt(self) -> str:
        start = self.prefixes[self.rng.integers(2)] if self.rng.random() < 0.5 else ""
        return start + self._text(int(self.rng.integers(8, 20)))

    def _common(self) -> tuple[Any, ...]:
        """All of an ask but its prompt."""
        rng = self.rng
        sent, steering = self._steering()
        selection: dict[str, Any] = {}
        consumers = [(), ("inline",), ("filesystem",), ("inline", "filesystem")][rng.integers(4)]
        if consumers:
            layers = sorted(rng.choice(self.layers, size=rng.integers(1, 3), replace=False))
            selection["hooks"] = {"post_block": [int(layer) for layer in layers]}
            selection["positions"] = str(rng.choice(_SELECTORS))
            if rng.random() < 0.2:
                selection["project"] = self.vectors[:2]
        return (
            bool(rng.random() < 0.3),
            int(rng.integers(8, 34)),
            sent,
            steering,
            consumers,
            selection,
        )

    def _steering(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw a change: the fields of a body, and those of `SamplingParams` that mean the same."""
        rng = self.rng
        layer, which = int(rng.integers(self.layers)), int(rng.integers(4))
        at = {"post_block": {layer: self.vectors[which]}}
        match rng.integers(6):
            case 0 | 1:
                fields: dict[str, Any] = {}
            case 2:
                fields = {"steering_vectors": at}
            case 3:
                fields = {"prefill_steering_vectors": at, "decode_steering_vectors": at}
                fields[str(rng.choice(list(fields)))] = {"post_block": {0: self.vectors[0]}}
            case 4:
                op = {"op": "ablate", "point": "post_block", "layers": [layer]}
                fields = {"steering": [{**op, "direction": self.vectors[which]}]}
            case _:
                name, scale = f"soak{rng.integers(2)}", float(rng.choice([0.5, 1.0, -1.0]))
                [(where, vector)] = self.made.modules[name]["post_block"].items()
                meant = {"steering_vectors": {"post_block": {where: scale * vector}}}
                return {"steering_modules": [[name, scale]]}, meant
        return fields, fields

    def _answer(self, ask: Ask) -> tuple[Twin, float]:
        """Its twin, and the least difference of the two best tokens."""
        params = SamplingParams(
            temperature=0, max_tokens=ask.tokens, ignore_eos=True, logprobs=2,
            allowed_token_ids=self.made.allowed, **ask.steering,
            capture={"inline": dict(ask.selection)} if ask.selection else None,
        )  # fmt: skip
        if ask.chat:
            said: Any = [{"role": "user", "content": ask.prompt}]
            [output] = self.llm.chat(said, params, use_tqdm=False)
        else:
            [output] = self.llm.generate([ask.prompt], params, use_tqdm=False)
        completion = output.outputs[0]
        margins = []
        for step in completion.logprobs or []:
            best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
            margins.append(best - second)
        results = completion.capture_results or {}
        rows = {
            site: Rows(rows.positions, rows.token_ids, rows.numpy(), rows.versions)
            for site, rows in (results["inline"].payload if results else {}).items()
        }
        return Twin(completion.text, rows), min(margins)


def offline_options() -> dict[str, Any]:
    """Of the `LLM` that makes twins."""
    return {
        "skip_tokenizer_init": False,
        "logprobs_mode": "processed_logprobs",
        "enable_steering": True,
        "steering_families": ["add", "ablate"],
        "capture_consumers": ["inline"],
    }
