# SPDX-License-Identifier: Apache-2.0
"""What of vLLM-Hook reads attention: its configurations as captures, its analyzers over
`vllm.pilot`.

Which tokens are instruction, data or documents is said when it is analyzed, so what is captured
are weights of all keys: the engine's own, where the original computes them again from q and k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import RequestOutput
from vllm.pilot.reranker import rank, received
from vllm.pilot.tracker import attention_tracker

TRACKER, RERANKER = "attn_tracker", "core_reranker"
_FORMS = {f"{r}{n}": (r, bool(n)) for r in ("sum", "max") for n in ("", "_normalize")}


def qk_of(config: Mapping[str, Any], analyzer: str | None) -> dict[str, Any]:
    """Return the field that `params.important_heads` and `hookq` mean.

    The tracker reads the last prompt token at the important heads; the re-ranker every prompt
    token, summed over all heads of their layers, as the original does. Without an analyzer it is q
    and k of these layers. With no important heads it is all heads of all layers.

    Raises:
        ValueError: something in it is not known.
    """
    hookq, params = config.get("hookq", {}), config.get("params", {})
    mode = hookq.get("hookq_mode", "all_tokens")
    if mode not in ("last_token", "all_tokens") or hookq.keys() - {"hookq_mode"}:
        raise ValueError(f"hookq: hookq_mode must be last_token or all_tokens, got {hookq!r}")
    if analyzer == RERANKER and mode != "all_tokens":
        raise ValueError("hookq.hookq_mode: core_reranker reads all_tokens")
    heads: Any = params.get("important_heads", "all")
    if heads != "all" and not (
        isinstance(heads, list)
        and heads
        and all(isinstance(h, list) and len(h) == 2 for h in heads)
    ):
        raise ValueError("params.important_heads: must be a list of [layer, head], or left out")
    layers = heads if heads == "all" else sorted({layer for layer, _ in heads})
    queries = "last_prompt" if mode == "last_token" else "all_prompt"
    if analyzer is None:
        read = [{"hooks": {"q": layers}, "positions": queries}]
        return {"capture": {"inline": [*read, {"hooks": {"k": layers}, "positions": "all_prompt"}]}}
    if analyzer == TRACKER:
        asked = {"heads": heads, "queries": "last_prompt", "give": ["weights"]}
    else:
        asked = {"heads": layers, "queries": queries, "give": ["weights"], "sum": "all"}
    return {"capture": {"inline": {"attention": asked}}}


def tracked(outputs: Sequence[RequestOutput], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"score": [one for each prompt]}`: low of a prompt injection.

    Args:
        spec: `input_range`, ((i0, i1), (d0, d1)) of instruction and data as slices, or a list of
            these by prompt; `attn_func`, "sum" or "max", each also with "_normalize"
            ("sum_normalize" by default).

    Raises:
        ValueError: something else is asked for, or a range is empty.
    """
    form = spec.get("attn_func", "sum_normalize")
    if "input_range" not in spec or spec.keys() - {"input_range", "attn_func"}:
        raise ValueError(f"analyzer_spec: {TRACKER} takes 'input_range' and 'attn_func'")
    if form not in _FORMS:
        raise ValueError(f"analyzer_spec.attn_func: must be one of {list(_FORMS)}, got {form!r}")
    ranges = spec["input_range"]
    if isinstance(ranges[0][0], int):
        ranges = [ranges] * len(outputs)
    if len(ranges) != len(outputs):
        raise ValueError(f"analyzer_spec.input_range: has {len(ranges)}, of {len(outputs)} prompts")
    reduce, normalize = _FORMS[form]
    scores = []
    for output, both in zip(outputs, ranges, strict=True):
        length = len(output.prompt_token_ids or ())
        of_instruction, of_data = (range(*slice(*one).indices(length)) for one in both)
        found = attention_tracker(
            output, of_instruction, of_data, reduce=reduce, normalize=normalize
        )
        scores.append(found.score)
    return {"score": scores}


def reranked(outputs: Sequence[RequestOutput], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"scores": [one for each document], "ranking": [their numbers, the best first]}`.

    Args:
        outputs: of the prompt with the query, and of that with "N/A".
        spec: `query_spec` and `na_spec`, each (spans of documents, query_start,
            after_instruction, query_end), ends included. Query tokens are those from query_start
            to query_end; after_instruction is a place among them, and changes nothing.

    Raises:
        ValueError: there are not two outputs, or a specification is of another form.
    """
    if spec.keys() != {"query_spec", "na_spec"}:
        raise ValueError(f"analyzer_spec: {RERANKER} takes 'query_spec' and 'na_spec'")
    if len(outputs) != 2:
        raise ValueError(f"analyze: {RERANKER} compares two prompts, {len(outputs)} were read")
    parts = []
    for output, name in zip(outputs, ("query_spec", "na_spec"), strict=True):
        documents, start, after, end = spec[name]
        if not start <= after <= end:
            raise ValueError(f"analyzer_spec.{name}: after_instruction must be within the query")
        spans = [range(first, last + 1) for first, last in documents]
        parts.append(received(output, spans, range(start, end + 1)))
    ranking = rank(*parts)
    return {"scores": ranking.scores.tolist(), "ranking": ranking.order}
