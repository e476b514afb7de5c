# SPDX-License-Identifier: Apache-2.0
"""What analyzers refuse of captures and of what they are asked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from tests.errors.case import Case
from vllm.entrypoints.serve.steering.client import Attention, Choice
from vllm.pilot.attention import find_texts, mean_weights
from vllm.pilot.linking import link
from vllm.pilot.reranker import rank, rerank
from vllm.pilot.rows import reduce_rows
from vllm.pilot.tracker import HeadScores, attention_tracker, important_heads
from vllm.v1.capture import AttentionRows, CaptureResult
from vllm.v1.interventions import makings

ONE = np.array([2])


def rows(sum: str = "", weight: float = 1 / 3) -> AttentionRows:
    """Of query 2 over three keys: weights of two heads, or their sum."""
    read = makings.Attention(("weights",), (), (), 0, sum, 3)
    return AttentionRows(
        ONE, ONE, torch.full((1, 3 if sum else 6), weight), ONE, read, heads=(0, 1)
    )


def output(payload: Any, status: Literal["ok", "partial_error"] = "ok") -> Any:
    result = CaptureResult(status=status, error="stopped", payload=payload)
    return SimpleNamespace(capture_results={"inline": result})


WHOLE = output({("attn", 1): rows()})
SUMMED = output({("attn", None): rows("all")})
OF_CLIENT = Choice(attention={"inline": {1: Attention(ONE, ONE, ONE, {}, (0, 1), ("a",))}})
SCORES = HeadScores([(0, 0)], np.ones(1))
OTHERS = HeadScores([(0, 1)], np.ones(1))


def finding(*texts: str) -> Callable[[], object]:
    def cut(prompt: str, return_offsets_mapping: bool) -> dict[str, Any]:
        places = [(i, i + 1) for i in range(len(prompt))]
        return {"input_ids": list(range(len(prompt))), "offset_mapping": places}

    return lambda: find_texts(cut, "a bc a", texts)


ANALYZERS = [
    Case({"given": "'inline'"}, do=lambda: attention_tracker(output({}))),
    Case({"given": "'other'"}, do=lambda: attention_tracker(OF_CLIENT, consumer="other")),
    Case(
        {"given": "'inline'", "reason": "stopped"},
        do=lambda: attention_tracker(output({("attn", 1): rows()}, "partial_error")),
    ),
    Case(
        {"given": "9", "allowed": "[2]"},
        do=lambda: attention_tracker(WHOLE, [0], [1], query=9),
    ),
    Case({"given": "-2", "allowed": "[2]"}, do=lambda: attention_tracker(WHOLE, [0], query=-2)),
    Case({"given": "'b'", "allowed": "['a']"}, do=lambda: attention_tracker(OF_CLIENT, "b")),
    Case({"given": "'mass'"}, do=lambda: attention_tracker(OF_CLIENT, "a")),
    Case({"given": "'weights'"}, do=lambda: attention_tracker(OF_CLIENT, [0])),
    Case({}, do=lambda: attention_tracker(SUMMED, [0], [1])),
    Case({"name": "keys", "given": "[3]", "most": "2"}, do=lambda: attention_tracker(WHOLE, [3])),
    Case({"name": "keys", "given": "[]", "most": "2"}, do=lambda: attention_tracker(WHOLE, [])),
    Case({"given": "'mean'"}, do=lambda: attention_tracker(WHOLE, reduce="mean")),
    Case({"given": "'max'"}, do=lambda: reduce_rows(torch.ones(1, 2), "max")),
    Case({"given": "[(2, 0)]"}, do=lambda: SCORES.of([[0, 0], [2, 0]])),
    Case({}, do=lambda: SCORES.of([])),
    Case({}, do=lambda: important_heads([SCORES], [])),
    Case({}, do=lambda: important_heads([SCORES], [OTHERS])),
    Case({"given": "2"}, do=lambda: mean_weights(rows(weight=np.nan))),
    Case({}, do=lambda: mean_weights(rows(), [])),
    Case({}, do=lambda: rank([], [])),
    Case({"given": "1"}, do=lambda: rank([np.ones(2)] * 2, [np.ones(2), np.full(2, np.inf)])),
    Case({}, do=lambda: rerank(SUMMED, SUMMED, [[0, 1]], [[0]])),
    Case(
        {"name": "documents[1]", "given": "[0, 2]", "most": "1"},
        do=lambda: rerank(SUMMED, SUMMED, [[0], [0, 2]]),
    ),
    Case({}, do=lambda: link(WHOLE, {"a": [0]}, top_p=0)),
    Case({}, do=lambda: link(WHOLE, {"a": [0]}, temperature=float("nan"))),
    Case({}, do=lambda: link(WHOLE, {})),
    Case({}, do=lambda: link(WHOLE, {"a": [0]})),
    Case({}, do=lambda: link(SUMMED, {"a": [0]})),
    Case({"given": "'bc'"}, do=finding("a", "bc", "bc")),
    Case({"given": "''"}, do=finding("")),
]
