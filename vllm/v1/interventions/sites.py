# SPDX-License-Identifier: Apache-2.0
"""Names of points and layers in requests: parsed and checked against what the model has."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.config.capture import CaptureConfig
from vllm.config.points import POINTS, READ_POINTS, RETURNED, STEERING_POINTS, STREAM_POINTS
from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.errors import reject, show, show_key
from vllm.v1.interventions.likely import likely
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.values import plain, plain_list, says

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_INT = re.compile(r"-?\d{1,9}")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_SLICE = re.compile(r"(\d{1,9}):(\d{1,9})")
_MOST_LAYERS = 1e9


def need_point(
    value: Any, path: str, shape: TapShape, allowed: Sequence[str] = STREAM_POINTS
) -> str:
    """Return the point a user names; raise ValueError if it is not `allowed` or no layer has it."""
    value = plain(value)
    if not isinstance(value, str) or value not in allowed:
        if isinstance(value, str) and value in POINTS and (instead := POINTS[value].instead):
            reject(path, f"{value!r} can only be captured; here use {instead}")
        meant = likely(_plain_name(value), allowed, _ELSEWHERE)
        if isinstance(value, int):
            meant = " (a point stands before its layers: {'post_block': {2: ...}})"
        elif isinstance(value, str) and _plain_name(value) in _WEIGHTS:
            meant = " (weights are captured by 'attention' in place of 'hooks')"
        reject(path, f"unknown point {show(value)}{meant}; points are {', '.join(allowed)}")
    if not any(value in shape.offers(layer) for layer in shape.layers):
        offered = {p for layer in shape.layers for p in shape.offers(layer)}
        near = offered.intersection(STREAM_POINTS if value in STREAM_POINTS else allowed)
        has = sorted(near, key=allowed.index)
        reject(path, f"this model has no point {value!r}; it has {', '.join(has)}")
    return value


_NAMES = {
    "embed": "embedding embeddings embed_tokens embed_tokens.output wte.output token_embeddings",
    "pre_attn": "resid_pre block_input input layers.input h.input blocks.in layers_input",
    "q": "rot_q",
    "k": "rot_k",
    "v": "value",
    "z": "attention_value_output o_proj.input c_proj.input",
    "attn_out": "attention_output self_attn self_attn.output attn.output attn.out attn_out_post "
    "attentions_output",
    "post_attn": "resid_mid hook_mlp_in",
    "mlp_in": "mlp_input mlp.input ln2 ln_2 ln2.out ln2.output mlps_input",
    "router_logits": "router router.output gate.output gate_logits",
    "mlp_act": "post down_proj.input mlp_activation mlp_activations neurons",
    "mlp_out": "mlp mlp_output mlp.output mlp.out mlp_out_post mlps_output",
    "post_block": "resid_post block_output output layers.output h.output blocks.out residual "
    "residual_stream hidden_states layers_output",
    "final": "ln_final norm final_norm norm.output ln_f.output ln_final.out ln_final.output "
    "ln_final.normalized lm_head.input unembed.in",
}
_ELSEWHERE = {name: point for point, names in _NAMES.items() for name in names.split()}
"""Name of a point in TransformerLens, nnsight, pyvene, interp-engine and other tools, without what
stands around it -> the point here (docs/coming-from.md)."""

_BEFORE_NORM = "hook_mlp_in"
"""TransformerLens's name of what others do not mean by `mlp_in`."""

_ENDS = ("in", "input", "normalized", "out", "output")
"""Names that say nothing without the module before them."""


_WEIGHTS = ("attention_probabilities", "attn", "attn_probs", "attn_scores", "pattern")
"""Names of weights of attention, which are no point."""


def _plain_name(value: Any) -> Any:
    """The last part of another tool's path, such as `resid_post` of `blocks.5.hook_resid_post`,
    after its module where it needs one: `o_proj.input`."""
    if not isinstance(value, str):
        return value
    said = (part.partition("[")[0] for part in value[:80].split("."))
    bare = (part if part == _BEFORE_NORM else part.removeprefix("hook_") for part in said)
    parts = [part for part in bare if part and not part.isdecimal()]
    return ".".join(parts[-2:] if parts[-1] in _ENDS else parts[-1:]) if parts else value


def need_layers(value: Any, point: str, path: str, shape: TapShape) -> list[int]:
    """The layers a user's key or entry names, each checked to have `point`.

    Args:
        value: an int, or its digits; negative counts from the end, -1 is the last layer that has
            taps. An inclusive range "4-11", "all" (the layers that have the point) or a list of
            these.

    Raises:
        ValueError: none of these, no layer, one named twice, out of range or without the point.
    """
    if (entries := plain_list(value)) is not None:
        # A mapping keeps the order. The first repeat ends it: a list of "all" may be any length.
        layers: dict[int, None] = {}
        for i, entry in enumerate(entries):
            for layer in _layers_of(entry, point, f"{path}[{i}]", shape):
                if layer in layers:
                    reject(path, f"names layer {layer} twice")
                layers[layer] = None
        if not layers:
            reject(path, "names no layer")
        return list(layers)
    return _layers_of(value, point, path, shape)


def need_heads(value: Any, point: str, path: str, shape: TapShape) -> dict[int, tuple[int, ...]]:
    """The heads a user names at a point of attention: layer -> heads, sorted.

    Args:
        value: layers as of `need_layers`, for all their heads; or a mapping of such layers to
            "all", a head from 0, an inclusive range "0-3" or a list of these.

    Raises:
        ValueError: as `need_layers`; or a head is out of range or named twice, or none is.
    """
    if not isinstance(value, Mapping):
        value = {layer: "all" for layer in need_layers(value, point, path, shape)}
    heads: dict[int, tuple[int, ...]] = {}
    for key, asked in value.items():
        at = f"{path}.{show_key(plain(key))}"
        for layer in need_layers(key, point, at, shape):
            if layer in heads:
                reject(path, f"names layer {layer} twice")
            heads[layer] = _heads_of(asked, at, layer, shape.layers[layer].heads[point][0])
    if not heads:
        reject(path, "names no layer")
    return heads


def _heads_of(value: Any, path: str, layer: int, count: int) -> tuple[int, ...]:
    entries = plain_list(value)
    heads: set[int] = set()
    for entry in [value] if entries is None else entries:
        entry = plain(entry)
        if isinstance(entry, str) and entry == "all":
            first, last = 0, count - 1
        elif isinstance(entry, int) and not isinstance(entry, bool):
            first = last = entry
        elif isinstance(entry, str) and (match := _RANGE.fullmatch(entry)):
            first, last = int(match[1]), int(match[2])
        else:
            reject(
                path,
                f"{show(entry)} is not a head: use an int, a range like '0-3', 'all' or a list",
            )
        if not 0 <= first <= last < count:
            reject(path, f"head {show(entry)} is out of range, layer {layer} has 0-{count - 1}")
        # The first repeat ends it: a list of "all" may be any length.
        if not heads.isdisjoint(named := range(first, last + 1)):
            reject(path, "names a head twice")
        heads.update(named)
    if not heads:
        reject(path, "names no head")
    return tuple(sorted(heads))


def need_one_lane(path: str, shape: TapShape) -> None:
    """Raise ValueError for what is not there where the stream has several lanes."""
    if shape.lanes > 1:
        reject(
            path,
            f"is not offered where the stream has lanes, {shape.lanes} in this model; capture the "
            "rows, or add vectors",
        )


def need_sites(points: Any, layers: Any, path: str, shape: TapShape) -> list[Site]:
    """The sites of an entry with `point` and `layers`, in the order of the stream.

    Args:
        points: a point, a list of them, or "all": those that each of the layers has.
        layers: as of `need_layers`.
        path: of the entry.

    Raises:
        ValueError: as `need_point` and `need_layers`; or a point is there twice, or none.
    """
    if says(points, "all"):
        everywhere = dict.fromkeys(shape.layers, LayerShape(("all",)))
        anywhere = msgspec.structs.replace(shape, layers=everywhere)
        chosen = need_layers(layers, "all", f"{path}.layers", anywhere)
        sites = [(point, layer) for layer in chosen for point in shape.layers[layer].points]
    else:
        at = f"{path}.point"
        names = [need_point(each, at, shape, STEERING_POINTS) for each in _listed(points)]
        if not names or len(set(names)) < len(names):
            reject(at, "must name a point, each once")
        if RETURNED in names:
            reject(at, f"{RETURNED} stands alone and not in a list: its rows are heads")
        sites = [(p, n) for p in names for n in need_layers(layers, p, f"{path}.layers", shape)]
    return sorted(sites, key=site_order)


def _listed(value: Any) -> Sequence[Any]:
    listed = plain_list(value)
    return [value] if listed is None else listed


def need_steered_points(sites: Iterable[Site], path: str, config: SteeringConfig) -> None:
    """Raise ValueError if a site's point was left out of `steering_points`."""
    _need_points(sites, path, "steering_points", config.steering_points)


def need_captured_points(sites: Iterable[Site], path: str, config: CaptureConfig) -> None:
    """Raise ValueError if a site's point was left out of `capture_points`."""
    _need_points(sites, path, "capture_points", config.capture_points)


def _need_points(sites: Iterable[Site], path: str, option: str, points: Sequence[str]) -> None:
    lacking: dict[str, str] = {}
    for point in dict.fromkeys(point for point, _ in sites):
        for tap in POINTS[point].copied:
            if tap not in points:
                lacking.setdefault(tap, point)
    if not lacking:
        return
    tap, point = next(iter(lacking.items()))
    of = "" if tap == point else f"is made of {tap}, and "
    started = f"{of}the engine was started with {option}={list(points)}"
    # All at once: each start takes its time.
    reject(
        f"{path}.{point}", f"{started}; start it with {', '.join(map(repr, lacking))} among them"
    )


def _layers_of(value: Any, point: str, path: str, shape: TapShape) -> list[int]:
    """The layers of an int, digits, a range or "all"."""
    value = plain(value)
    if isinstance(value, str) and value == "all":
        if shape.stop is not None and shape.stop + 1 < shape.depth:
            reject(
                path, f"'all' names layers up to {shape.depth - 1}, the engine has {_has(shape)}"
            )
        return [layer for layer in sorted(shape.layers) if point in shape.offers(layer)]
    if isinstance(value, int) and not isinstance(value, bool):
        first = last = value
    elif isinstance(value, str) and _INT.fullmatch(value):
        first = last = int(value)
    elif isinstance(value, str) and (match := _RANGE.fullmatch(value)):
        first, last = int(match[1]), int(match[2])
        if first > last:
            reject(path, f"the range {value!r} is empty")
    else:
        reject(
            path,
            f"{show(value)}{_likely_layers(value)} is not a layer: use an int, a range like "
            "'4-11', 'all' or a list",
        )
    count = max(shape.layers) + 1 if shape.stop is None else shape.depth
    if -count <= first < 0:
        first = last = first + count
    # The ends first: between them a client may put any number of layers.
    for layer in (first, last, *(range(first, last + 1) if last in shape.layers else ())):
        if layer not in shape.layers:
            owner = "model" if shape.stop is None else "engine"
            reject(path, f"layer {show(layer)} is out of range, the {owner} has {_has(shape)}")
    layers = list(range(first, last + 1))
    for layer in layers:
        if point not in shape.offers(layer):
            has = shape.layers[layer].points if point in STREAM_POINTS else shape.offers(layer)
            reject(path, f"layer {layer} has no point {point!r}; it has {', '.join(has)}")
    return layers


def _likely_layers(value: Any) -> str:
    """Name the layers that were probably meant: of a slice as Python has it, or of a float."""
    if isinstance(value, str) and (match := _SLICE.fullmatch(value)):
        first, last = int(match[1]), int(match[2]) - 1
        return f" (did you mean '{first}-{last}'?)" if first <= last else ""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST_LAYERS:
        return f" (did you mean {int(value)}?)"
    return ""


def _has(shape: TapShape) -> str:
    """The layers that have taps; not every decoder layer of every model has."""
    layers = sorted(shape.layers)
    if shape.stop is not None:
        return f"0-{shape.stop}; name such layers, or start it with a higher capture_stop_after"
    if layers == list(range(layers[-1] + 1)):
        return f"0-{layers[-1]}"
    return ", ".join(map(str, layers))


def site_order(site: Site) -> tuple[int, int]:
    """Sort key of sites: the order in which the stream passes them."""
    point, layer = site
    return layer, READ_POINTS.index(point)


def needs_whole_items(config: "VllmConfig") -> bool:
    """Tell whether an image's tokens see each other both ways, so that a step has all of them or
    none.

    Upstream then splits none at the end of a step; what we cut off a step has to keep to it, too.
    """
    model = config.model_config
    return model is not None and model.is_multimodal_model and model.is_mm_prefix_lm
