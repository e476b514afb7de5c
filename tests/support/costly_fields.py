# SPDX-License-Identifier: Apache-2.0
"""Costly bodies, generated: each field of each endpoint and of each `--compat`, made huge.

`legal` has bodies in which each field that is read stands once. A costly body is one of them with
something long in the place of one field. `tests/errors/test_costly_fields.py` finds fields that no
legal body has, and `python -m benchmarks.hostile --fields` sends the costly ones to a server.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vllm.v1.interventions.frontend.compat.doors import STEERING_KEYS

Key = str | int
Body = dict[str, Any]


class Legal(NamedTuple):
    """A body that is right."""

    endpoint: str
    fields: Body
    lanes: bool = False
    """Whether it is for a model whose stream has several lanes."""
    refused: bool = False
    """Whether it is refused all the same."""


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SET, CLEAR, RULES = "/v1/steering/set", "/v1/steering/clear", "/v1/steering/rules"
MODULES, SWEEP = "/v1/steering/modules", "/v1/steering/sweep"

LONG: dict[str, Callable[[int], Any]] = {
    "objects": lambda n: [{}] * n,
    "numbers": lambda n: list(range(n)),
    "keys": lambda n: {str(i): {} for i in range(n)},
    "text": lambda n: "a" * (4 * n),
}
"""What stands in the place of a field, by name: made of about as many bytes for each of `n`."""


def packed(rows: int, width: int, **more: Any) -> Body:
    """A packed array of ones; [width] for no rows."""
    data = base64.b64encode(b"\0\0\x80\x3f" * (max(rows, 1) * width)).decode()
    shape = [rows, width] if rows else [width]
    return {"dtype": "float32", "shape": shape, "data": data, **more}


SELECTORS: tuple[Any, ...] = (
    {"text": "x", "which": "first"},
    {"token_ids": [101], "which": "last"},
    {"start": 0, "stop": 4, "step": 2, "of": "prompt"},
    {"at": [1], "of": "prompt"},
    [{"except": [0]}, "all_prompt"],
    {"images": [0]},
    {"modality": "image"},
    {"role": "user", "turn": 0},
)
"""One of each kind. The last three are for prompts that have images or turns."""


def _ops(vector: list[float], width: int) -> Iterator[Body]:
    at: Body = {"point": "pre_attn", "layers": [0], "positions": [1]}
    gate: Body = {"probe": vector, "threshold": 0.0, "sharpness": 1.0, "when": "row"}
    gate |= {"cosine": True, "latch": True}
    rows, one = {"values": packed(1, width)}, {"direction": packed(0, width)}
    strength = {"strength": 0.5}
    yield {"op": "add", **at, "vector": vector, "scale": 1.0, "gate": gate}
    yield {"op": "add", **at, **rows, "scale": 1.0, "gate": gate}
    yield {"op": "norm_match", **at, **one, "scale": 1.0, "gate": gate}
    yield {"op": "norm_match", **at, **rows, "scale": 1.0, "gate": gate}
    yield {"op": "ablate", **at, **one, **strength, "gate": gate}
    yield {"op": "clamp", **at, **one, **strength, "lo": -1.0, "hi": 1.0, "gate": gate}
    yield {"op": "pin", **at, **one, **strength, "value": 1.0, "gate": gate}
    yield {"op": "replace", **at, **rows, "alpha": 0.5, "gate": gate}
    yield {"op": "replace", **at, "values": vector, "alpha": 0.5, "gate": gate}
    yield {"op": "normalize", **at, "gate": gate}
    feature: Body = {"bias": 0.1, "threshold": 0.1, "value": 1.0, "add": 1.0, **strength}
    feature |= {"encoder": vector, "decoder": vector[::-1], "only_if_active": True}
    yield {"op": "feature", **at, **feature, "gate": gate}
    low_rank: Body = {"A": [vector], "B": [[x] for x in vector], "c": [0.1], **strength}
    yield {"op": "low_rank", **at, **low_rank, "gate": gate}
    matrices: Body = {"A": packed(1, width), "B": packed(width, 1)}
    yield {"op": "low_rank", **at, **matrices, "gate": gate}
    yield {"op": "swap", **at, "direction": vector, "other": vector[::-1], "gate": gate}
    heads: Body = {"point": "z", "heads": {"0": [0]}, "positions": [1]}
    whole: Body = {"point": "z", "layers": [0], "positions": [1]}
    yield {"op": "scale", **heads, "factor": 2.0}
    yield {"op": "scale", **whole, "factor": 2.0}
    yield {"op": "add", **heads, "vector": [1.0, 2.0, 3.0], "scale": 1.0}
    yield {"op": "add", **heads, "values": packed(1, 3), "scale": 1.0}
    yield {"op": "add", **whole, "vector": [1.0] * 12, "scale": 1.0}
    yield {"op": "add", **whole, "values": packed(1, 12), "scale": 1.0}
    at_layers: tuple[Body, ...] = ({"layers": [0]}, {"heads": {"0": [0]}})
    for layers in at_layers:
        focus: Body = {"op": "focus", **layers, "span": [1, 2], "positions": "all"}
        yield {**focus, "factor": 2.0}
        yield {**focus, "share": 0.5, "rule": "ratio"}


def _captures(vector: list[float], width: int) -> Iterator[Body]:
    hooks = {"pre_attn": [0]}
    yield {"inline": [{"hooks": hooks, "positions": [1], "tokens": True}]}
    yield {"inline": {"hooks": hooks, "positions": "all_prompt", "reduce": "mean"}}
    yield {"inline": {"hooks": hooks, "positions": "all_prompt", "norms": True}}
    yield {"inline": {"hooks": hooks, "positions": "all_prompt", "dose": True}}
    yield {"inline": {"hooks": hooks, "project": {"pre_attn": {"0": [vector]}}}}
    yield {"inline": {"hooks": hooks, "project": packed(2, width)}}
    yield {"inline": {"hooks": hooks, "project": {"modules": ["m"]}}}
    lens: Body = {"name": "logit", "top_k": 2, "tokens": [1, 2], "entropy": True}
    yield {"inline": {"hooks": {"post_block": [0]}, "positions": [1], "lens": lens}}
    features: Body = {"name": "mood", "top": 2, "ids": [1, 2], "above": 0.5, "error": True}
    yield {"inline": {"positions": [1], "features": features}}
    asked: Body = {"heads": {"0": [0]}, "queries": [3], "keys": {"a": {"start": 0}}}
    yield {"inline": {"attention": {**asked, "give": ["mass", "peak"]}}}
    asked = {"heads": {"0": [0]}, "queries": [3]}
    yield {"inline": {"attention": {**asked, "give": ["weights"], "sum": "heads"}}}
    yield {"inline": {"attention": {**asked, "give": ["top"], "top": 2}}}
    named: Body = {"request_id": "r", "tag": "t", "layout": "per_file", "metadata": {"a": 1}}
    yield {"filesystem": {"hooks": hooks, "positions": [1], "dtype": "int8", **named}}


def _tiers(vector: list[float], width: int, positions: Any) -> Iterator[Body]:
    yield {"pre_attn": {"0": {"vector": vector, "scale": 1.0, "positions": positions}}}
    yield {"pre_attn": packed(2, width, layers=[0, 1], scales=[1.0, 1.0])}
    yield {"pre_attn": {"0": packed(0, width)}}


def _rule(vector: list[float], **over: Any) -> Body:
    rule: Body = {"name": "r", "point": "pre_attn", "layer": 0, "threshold": 0.0, "probe": vector}
    return {**rule, "below": True, "need": 1, "of": 2, "then": "stop", "over": "prompt", **over}


def _ours(vector: list[float], width: int) -> Iterator[Body]:
    """The fields of completions and chats."""
    for field, positions in (
        ("steering_vectors", [1]),
        ("prefill_steering_vectors", [1]),
        ("decode_steering_vectors", "all_generated"),
    ):
        for tier in _tiers(vector, width, positions):
            yield {field: tier}
    yield {"steering_modules": [["m", 1.0], "m"]}
    yield {"steering_inherit_global": False}
    for op in _ops(vector, width):
        yield {"steering": [op]}
    for capture in _captures(vector, width):
        yield {"capture": capture}
    yield {"rules": [_rule(vector)]}
    module = {key: value for key, value in _rule(vector).items() if key != "probe"}
    yield {"rules": [{**module, "module": "m"}, {**module, "name": "d", "dose": True}]}
    probe: Body = {"sites": [["pre_attn", 0], ["pre_attn", 1]], "weight": [vector, vector]}
    probe |= {"bias": [0.0], "activation": "relu", "output_weight": [[1.0]], "output_bias": [0.0]}
    probe |= {"pool": {"kind": "exponential", "a": 0.5}, "threshold": 0.0, "about": {}}
    of_probe = {key: value for key, value in module.items() if key not in ("point", "layer")}
    yield {"rules": [{**of_probe, "probe": probe}]}
    rolling = {**probe, "weight": packed(2, width), "pool": {"kind": "rolling_max", "window": 2}}
    yield {"rules": [{**of_probe, "probe": rolling}]}


def _lanes(vector: list[float]) -> Iterator[Body]:
    """Where a lane may be named."""
    gate: Body = {"probe": vector, "threshold": 0.0, "sharpness": 1.0, "when": "row"}
    at: Body = {"point": "pre_attn", "layers": [0], "positions": [1], "lane": 1, "gate": gate}
    one = {"direction": vector}
    entry: Body = {"vector": vector, "scale": 1.0, "lane": 1, "positions": [1]}
    yield {"steering_vectors": {"pre_attn": {"0": entry}}}
    yield {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "lane": 1, "positions": [1]}}}
    ops: tuple[Body, ...] = (
        {"op": "add", "vector": vector, "scale": 1.0},
        {"op": "add", "values": [vector], "scale": 1.0},
        {"op": "norm_match", **one, "scale": 1.0},
        {"op": "norm_match", "values": [vector], "scale": 1.0},
        {"op": "ablate", **one, "strength": 0.5},
        {"op": "clamp", **one, "strength": 0.5, "lo": -1.0, "hi": 1.0},
        {"op": "pin", **one, "strength": 0.5, "value": 1.0},
        {"op": "replace", "values": vector, "alpha": 0.5},
        {"op": "normalize"},
    )
    for op in ops:
        yield {"steering": [{**op, **at}]}


def _selected(selector: Any, vector: list[float]) -> Iterator[Body]:
    """Every place where a selector may stand."""
    yield {"steering_vectors": {"pre_attn": {"0": {"vector": vector, "positions": selector}}}}
    op: Body = {"op": "add", "point": "pre_attn", "layers": [0], "vector": vector}
    yield {"steering": [{**op, "positions": selector}]}
    yield {"steering": [{"op": "focus", "layers": [0], "span": selector, "factor": 2.0}]}
    yield {"capture": {"inline": {"hooks": {"pre_attn": [0]}, "positions": selector}}}
    attention: Body = {"heads": {"0": [0]}, "give": ["mass"], "keys": {"a": selector}}
    yield {"capture": {"inline": {"attention": {**attention, "queries": selector}}}}
    yield {"rules": [_rule(vector, over=selector)]}


def _lens(vector: list[float]) -> Iterator[Body]:
    """What `--compat lens` takes; see `doors.DOORS`."""
    wire: Body = {**packed(0, len(vector)), "original_dtype": "float32", "compression": "zstd"}
    wire |= {"shape": [1, 2, len(vector)], "data": zstd(b"\0\0\x80\x3f" * (2 * len(vector)))}
    steer: Body = {"activations": wire, "layer_indices": [0], "position_indices": [1, 2]}
    steer |= {"scale": 1.0, "norm_match": False}
    yield {"apply_steering_vectors": [steer], "skip_reading_prefix_cache": True}
    yield {"output_residual_stream": [0], "activations_transport": "http"}
    yield {"output_qk": [0]}


def zstd(raw: bytes) -> str:
    """Bytes as vLLM-Lens sends them."""
    import zstandard

    return base64.b64encode(zstandard.compress(raw)).decode()


def _easysteer(vector: list[float]) -> Iterator[Body]:
    """What `--compat easysteer` takes; see `doors.DOORS`."""
    one: Body = {"data": vector, "layers": [0], "scale": 1.0, "algorithm": "direct"}
    one |= {"normalize": False, "name": "v"}
    of_prompt = {"tokens": [101], "positions": [0], "window": [0, 2]}
    generated = {"positions": [0], "window": [0, 2]}
    yield {"vectors": [one, one], "conflict": "sequential", "debug": False}
    yield {"vectors": [{"source": "m", "scale": 2.0}]}
    applied: tuple[Body, ...] = (
        {"prompt": "all", "generation": "none"},
        {f"prompt_{key}": value for key, value in of_prompt.items()},
        {f"generation_{key}": value for key, value in generated.items()},
        {f"exclude_prompt_{key}": value for key, value in of_prompt.items()},
        {f"exclude_generation_{key}": value for key, value in generated.items()},
    )
    for apply in applied:
        yield {"vectors": [{**one, "apply": apply}, one], "conflict": "sequential"}


def _hotwire() -> Iterator[Body]:
    """What `--compat hotwire` takes; see `doors.DOORS`."""
    yield {"hotwire": [{"id": "m", "layer": 0, "scale": 1.0, "decode_only": False}]}


def _interp_engine(vector: list[float], width: int) -> Iterator[Body]:
    """What `--compat interp-engine` takes; see `doors.DOORS`."""
    methods: tuple[Body, ...] = (
        {"method": "additive", "scale": 1.0, "normalize": True},
        {"method": "orthogonal", "coeff": 0.5},
        {"method": "projection_cap", "min": -1.0, "max": 1.0},
        {"method": "norm_scaled_add", "strength": 0.5, "max_fraction": 0.5, "normalize": False},
        {"method": "swap", "target": vector[::-1]},
        {"method": "ablate"},
    )
    for method in methods:
        for one in (vector, packed(0, width)):
            layers = {"0": [{"vector": one, **method}]}
            yield {"steering": [{"point": "resid_pre", "stream": None, "layers": layers}]}
    added = {"operations": [{"vector": vector, "scale": 1.0}]}
    yield {"steering": {"layers": {"0": added}}}
    yield {"capture": {"inline": {"hooks": ["resid_pre.0"], "positions": [1]}}}


def _refused(vector: list[float]) -> Iterator[Legal]:
    """Fields that are read and always refused, or whose value is a file."""
    one: Body = {"data": vector, "layers": [0]}
    others: tuple[Body, ...] = (
        {"params": {}},
        {"apply": {"generation_tokens": [101]}},
        {"apply": {"exclude_generation_tokens": [101]}},
    )
    for more in others:
        yield Legal(COMPLETIONS, {"steering": {"vectors": [{**one, **more}]}}, refused=True)
    yield Legal(MODULES, {"name": "n", "safetensors": "AAAA"}, refused=True)


def _steering(vector: list[float], width: int) -> Iterator[Legal]:
    """The bodies of `/v1/steering`."""
    op: Body = {"op": "ablate", "point": "pre_attn", "layers": [0], "direction": vector}
    names = ("vectors", "prefill_vectors", "decode_vectors")
    tier: Body = {"pre_attn": {"0": {"vector": packed(0, width), "scale": 1.0}}}
    for name in names:
        whole: Body = {"pre_attn": packed(2, width, layers=[0, 1], scales=[1.0, 1.0])}
        for each in (tier, whole):
            yield Legal(SET, {name: each, "ops": [op], "replace": True})
            yield Legal(MODULES, {"name": "n", name: each, "ops": [op]})
    yield Legal(CLEAR, {"tier": "base"})
    yield Legal(RULES, {"rules": [_rule(vector)]})
    yield Legal(RULES, {"rules": [_rule(vector, then={"force": [1, 2]})]})
    added: Body = {"op": "add", "vector": vector}
    sweep: Body = {"model": None, "prompt": "where", "answer": "x", "points": ["pre_attn"]}
    sweep |= {"stream": True, "layers": [0], "positions": [1]}
    replaced = {**sweep, "clean": "there", "align": "end", "op": {"op": "replace"}}
    yield Legal(SWEEP, {**sweep, "op": added, "scales": [1.0, 2.0]})
    yield Legal(SWEEP, {**replaced, "other": "w", "metric": "recovered"})
    yield Legal(SWEEP, {**sweep, "points": ["z"], "layers": {"0": [0]}})
    for selector in SELECTORS[:5]:
        yield Legal(SWEEP, {**sweep, "op": added, "positions": selector})


def legal(vector: list[float]) -> Iterator[Legal]:
    """Every body, for a model as wide as `vector`, and a prompt of eight tokens of which the second
    is 101, "x", the fifth and sixth are an image, and all are one turn."""
    width = len(vector)
    for fields in _ours(vector, width):
        yield Legal(COMPLETIONS, fields)
        yield Legal(CHATS, fields)
    for selector in SELECTORS:
        for fields in _selected(selector, vector):
            yield Legal(COMPLETIONS, fields)
    for lane in _lanes(vector):
        yield Legal(COMPLETIONS, lane, lanes=True)
    for args in _lens(vector):
        yield Legal(COMPLETIONS, {"vllm_xargs": args})
    for args in _hotwire():
        yield Legal(COMPLETIONS, {"vllm_xargs": args})
    for fields in _interp_engine(vector, width):
        yield Legal(COMPLETIONS, fields)
    for spec in _easysteer(vector):
        yield Legal(COMPLETIONS, {"steering": spec})
    yield from _steering(vector, width)
    yield from _refused(vector)


def places(tree: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[Key, ...]]:
    """Paths of all that is below a body; of a list the first entry stands for all."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[:1])
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def name_of(path: tuple[Key, ...]) -> str:
    """A path as `Door.reads` says it: `[]` for any entry of a list."""
    return "".join("[]" if isinstance(key, int) else f".{key}" for key in path)[1:]


class Place(NamedTuple):
    """A field of a body."""

    legal: Legal
    path: tuple[Key, ...]

    @property
    def name(self) -> str:
        """The endpoint and the field."""
        return f"{self.legal.endpoint} {name_of(self.path)}"

    def with_long(self, made: Any) -> Body:
        """The body with something else in this place."""
        body = copy.deepcopy(self.legal.fields)
        tree: Any = body
        for key in self.path[:-1]:
            tree = tree[key]
        tree[self.path[-1]] = made
        return body


def all_places(vector: list[float]) -> dict[str, Place]:
    """Every field of every body, once, by its name."""
    found: dict[str, Place] = {}
    for each in legal(vector):
        for path in places(each.fields):
            place = Place(each, path)
            if each.endpoint != CHATS or len(path) == 1:  # they are read as of completions
                found.setdefault(place.name, place)
    return found


def as_sent(fields: Body) -> Body:
    """A body as a client sends it: vectors of vLLM-Lens and hotwire are JSON in JSON."""
    args = fields.get("vllm_xargs")
    if not isinstance(args, dict):
        return fields
    lists = {key: args[key] for key in STEERING_KEYS if isinstance(args.get(key), list)}
    texts = {key: json.dumps(value) for key, value in lists.items()}
    return {**fields, "vllm_xargs": {**args, **texts}}
