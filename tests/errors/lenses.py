# SPDX-License-Identifier: Apache-2.0
"""What is refused of lenses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import numpy as np
import torch

from tests.errors.case import Case, path
from tests.support.plans import HEADS, SHAPE, VECTOR, config_of
from vllm.config.capture import CaptureConfig
from vllm.v1.capture.lens import LensRows
from vllm.v1.interventions.plan import LensRead
from vllm.v1.interventions.worker import lens_check

STREAM = [("pre_attn", 0), ("post_block", 0), ("post_block", 1)]
OFFERED = msgspec.structs.replace(
    HEADS, lenses={"logit": STREAM, "big": STREAM[1:]}, vocab_size=100, lens_rows=2
)
HOOKS = {"post_block": [1]}
LOGIT = {"name": "logit", "top_k": 3}


class Words:
    """A tokenizer with a token for each word."""

    all_special_ids: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def lens(value: Any, tokenizer: Any = None, hooks: Any = HOOKS, **more: Any) -> dict[str, Any]:
    config = config_of(OFFERED, capture_points=["pre_attn", "post_block", "q"])
    asked = {"hooks": hooks, "lens": value, **more}
    return {"capture": {"inline": asked}, "config": config, "tokenizer": tokenizer}


def token(value: Any, tokenizer: Any = None) -> dict[str, Any]:
    return lens({**LOGIT, "tokens": [5, value]}, tokenizer)


def prove(captures: bool) -> None:
    """A model without any norm, whose head gets something else than its last layer returns."""
    arena, model = torch.ones(2, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))
    interventions = SimpleNamespace(
        shape=SHAPE,
        arena=arena,
        captures=lambda site: captures,
        probing=lambda site, vector: nullcontext(),
    )
    with mock.patch.object(lens_check, "find_layers", return_value={3: model[0]}):
        lens_check.prove_lenses(
            cast("Any", interventions), CaptureConfig(), model, lambda: 2 * arena
        )


def read(name: str) -> object:
    none = np.empty(0)
    rows = LensRows(none, none, torch.empty(0, 2), none, LensRead("logit", 1, (), False))
    return getattr(rows, name)


AT = "capture.inline.lens"
LENSES = [
    Case(path(AT, "'k'"), lens({**LOGIT, "k": 5})),
    Case(path(AT, "5"), lens(5)),
    Case(path(AT), {**lens(LOGIT), "config": config_of()}),
    Case(path(f"{AT}.name", "'small'", "logit, big"), lens({"name": "small"})),
    Case(path(f"{AT}.name", "None", "logit, big"), lens({"top_k": 1})),
    Case(path(f"{AT}.name", "list", "logit, big"), lens({"name": [1]})),
    Case(
        path(f"{AT}.name", name="big", point="pre_attn", layer="0"),
        lens({**LOGIT, "name": "big"}, hooks={"pre_attn": [0], "post_block": "0-1"}),
    ),
    Case(path(f"{AT}.top_k", "-1", "0 to 100"), lens({**LOGIT, "top_k": -1})),
    Case(path(f"{AT}.top_k", "101", "0 to 100"), lens({**LOGIT, "top_k": 101})),
    Case(path(f"{AT}.top_k", "True", "0 to 100"), lens({**LOGIT, "top_k": True})),
    Case(path(f"{AT}.top_k", "2.0", "0 to 100"), lens({**LOGIT, "top_k": 2.0})),
    Case(path(f"{AT}.top_k", str(10**30), "0 to 100"), lens({**LOGIT, "top_k": 10**30})),
    Case(path(f"{AT}.entropy", "1"), lens({**LOGIT, "entropy": 1})),
    Case(path(f"{AT}.tokens", allowed="32"), lens({**LOGIT, "tokens": [1] * 33})),
    Case(path(f"{AT}.tokens", allowed="32"), lens({**LOGIT, "tokens": range(10**30)})),
    Case(path(f"{AT}.tokens", allowed="32"), lens({**LOGIT, "tokens": "Paris"})),
    Case(path(f"{AT}.tokens[1]", "100", "0-99"), token(100)),
    Case(path(f"{AT}.tokens[1]", "-1", "0-99"), token(-1)),
    Case(path(f"{AT}.tokens[1]", "1.5", "256"), token(1.5)),
    Case(path(f"{AT}.tokens[1]", "'" + "a" * 56 + "...", "256"), token("a" * 257, Words())),
    Case(path(f"{AT}.tokens[1]", "'\\ud800'", "256"), token("\ud800", Words())),
    Case(path(f"{AT}.tokens[1]"), token("Paris")),
    Case(path(f"{AT}.tokens[1]", "'a b'", number="2"), token("a b", Words())),
    Case(path(f"{AT}.tokens[1]", "''", number="0"), token("", Words())),
    Case(path(AT), lens({"name": "logit"})),
    Case(path(AT), lens(LOGIT, project=[VECTOR])),
    Case(path(AT), lens(LOGIT, reduce="mean", positions="all_prompt")),
    Case(path(AT), lens(LOGIT, hooks={"q": "all"})),
    Case(
        path("capture.logging.lens"),
        {
            "capture": {"logging": {"hooks": HOOKS, "lens": LOGIT}},
            "config": config_of(OFFERED, capture_consumers=["logging"]),
        },
    ),
    Case({"given": "'entropy'", "allowed": "top_ids, top_logprobs"}, do=lambda: read("entropy")),
    Case(
        {"given": "['tuned']", "allowed": "['logit']"},
        do=lambda: CaptureConfig(capture_consumers=["inline"], capture_lens=["tuned"]),
    ),
    Case({}, do=lambda: CaptureConfig(capture_consumers=["logging"], capture_lens=["logit"])),
    Case({"layer": "3"}, do=lambda: prove(captures=False)),
    Case({"given": "Sequential", "allowed": "0.0001"}, do=lambda: prove(captures=True)),
]
