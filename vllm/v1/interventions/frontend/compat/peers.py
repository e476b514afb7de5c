# SPDX-License-Identifier: Apache-2.0
"""Fields of other tools in requests: each is refused by name, with our field that does the same.

Upstream ignores unknown fields of a body and unknown keys of `vllm_xargs` and `extra_args`. A
request written for another tool would be answered with unsteered text.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config.compat import EASYSTEER, INTERP
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.plan import PLAN_FIELDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Peer(NamedTuple):
    """Another tool, as its users call it."""

    name: str
    anchor: str
    """Its section in docs/coming-from.md."""


LENS = Peer("vLLM-Lens", "vllm-lens")
HOOK = Peer("vLLM-Hook", "vllm-hook-and-mia")
RHIZO = Peer("RhizoNymph/vllm", "rhizonymphvllm")
EASY = Peer("EasySteer", "easysteer")
SGLANG = Peer("SGLang", "sglang")
HOTWIRE = Peer("hotwire", "hotwire")
ENGINE = Peer("interp-engine", "interp-engine")


class Foreign(NamedTuple):
    """A peer's field."""

    peer: Peer
    ours: str
    """Words for our way to do the same, as they follow "use" in an error."""


CAPTURE = "'capture'"
VECTORS = "'steering_vectors'"
QUERIES = "'capture' at the points 'q' and 'k' (docs/attention.md)"

ARGS = {
    "apply_steering_vectors": Foreign(LENS, VECTORS),
    "output_residual_stream": Foreign(LENS, CAPTURE),
    "output_qk": Foreign(LENS, QUERIES),
    "apply_hooks": Foreign(LENS, "'steering' and 'capture': a request is data, not a program"),
    "activations_transport": Foreign(LENS, CAPTURE),
    "steer": Foreign(HOOK, "'steering' with the operations 'pin' and 'add'"),
    "output_hidden_states": Foreign(HOOK, CAPTURE),
    "hs_mode": Foreign(HOOK, "'capture' with 'positions'"),
    "hookq_mode": Foreign(HOOK, QUERIES),
    "qk_capture": Foreign(HOOK, QUERIES),
    "hotwire": Foreign(HOTWIRE, "--compat hotwire, or 'steering_modules'"),
}
"""Keys of `vllm_xargs` over HTTP, of `SamplingParams.extra_args` offline."""

_CLAMPS = Foreign(RHIZO, "'steering' with the operations 'clamp' and 'pin'")
_PATCH = Foreign(RHIZO, "'steering' with the operation 'replace'")
_ONE_VECTOR = Foreign(EASY, VECTORS)

FIELDS = {
    "steering_clamps": _CLAMPS,
    "prefill_steering_clamps": _CLAMPS,
    "decode_steering_clamps": _CLAMPS,
    "steering_name": Foreign(RHIZO, "'steering_modules'"),
    "patch": _PATCH,
    "patch_vectors": _PATCH,
    "steer_vector_request": _ONE_VECTOR,
    "steer_vector": _ONE_VECTOR,
    "return_hidden_states": Foreign(SGLANG, CAPTURE),
    "steering_spec": Foreign(ENGINE, "--compat interp-engine and 'steering'"),
    "points": Foreign(ENGINE, "'capture' with 'hooks'"),
}
"""Fields of bodies."""

KNOWN = {**ARGS, **FIELDS}
"""Whichever place a client puts them in."""


class Spec(NamedTuple):
    """A specification that stands in `steering`."""

    door: str
    """Name of the tool in `--compat`."""
    foreign: Foreign


VECTOR_SPEC = Spec(EASYSTEER, Foreign(EASY, "--compat easysteer, or a list of operations"))
LAYER_SPEC = Spec(INTERP, Foreign(ENGINE, "--compat interp-engine, or a list of operations"))

NESTS = ("extra_body", "extra_args", "sampling_params")
"""Fields of bodies that no server reads: a client's words for where its own fields stand."""

_LENS_PLUGIN = "vllm_lens._activations_plugin"


def said(foreign: Foreign) -> str:
    """Return the words of an error about a peer's field."""
    peer = foreign.peer
    return (
        f"is for {peer.name} and would be ignored; use {foreign.ours} "
        f"(docs/coming-from.md#{peer.anchor})"
    )


def refuse_peer_args(
    args: Mapping[str, Any] | None, config: "VllmConfig", path: str = "extra_args."
) -> None:
    """Refuse keys of `SamplingParams.extra_args` that another tool would read, and fields of ours,
    which nothing reads there.

    An engine without steering and capture is left alone.

    Args:
        path: what stands before a key in errors.

    Raises:
        ValueError: there is such a key; the message names it, and ours.
    """
    if args and _serves(config):
        _raise(misplaced(args, path))


def refuse_peer_fields(extra: Mapping[str, Any] | None, config: "VllmConfig") -> None:
    """Refuse what a body of a completion or chat says to another tool, or where nothing reads it,
    by names alone.

    Args:
        extra: the fields of the body that its model does not have.
        config: as of `refuse_peer_args`.

    Raises:
        ValueError: as `refuse_peer_args`.
    """
    if not extra or not _serves(config):
        return
    _raise(foreign(extra) or nested(extra))
    if extra.get("capture_wait") is False:
        reject(
            "capture_wait",
            said(Foreign(RHIZO, "it not at all: a finished answer is a finished capture")),
        )
    steering = extra.get("steering")
    spec = spec_of(steering)
    if spec is not None and spec.door not in config.steering_config.compat:
        reject("steering", said(spec.foreign))
    if spec is LAYER_SPEC and extra.get("steer_generated") is False:
        reject(
            "steer_generated", said(Foreign(ENGINE, "operations with 'positions': 'all_prompt'"))
        )
    if steering is not None and extra.get("conversation_id") is not None:
        reject(
            "conversation_id",
            said(Foreign(RHIZO, "'steering' in each turn: no state is kept between requests")),
        )


def refuse_peer_ops(steering: Any) -> None:
    """Refuse entries of a `steering` that are for another tool; it looks at each.

    Raises:
        ValueError: as `refuse_peer_args`.
    """
    for i, entry in enumerate(steering if isinstance(steering, list) else ()):
        if isinstance(entry, Mapping) and "op" not in entry and "scope" in entry:
            reject(f"steering[{i}]", said(Foreign(RHIZO, "an operation with a 'gate'")))


def spec_of(steering: Any) -> Spec | None:
    """Tell whose specification a field `steering` is; None for ours, a list of operations, of which
    one alone is not taken for a specification. Of a list the first entry says it."""
    if isinstance(steering, list | tuple):
        return LAYER_SPEC if steering and _has_layers(steering[0]) else None
    if _has_layers(steering):
        return LAYER_SPEC
    is_other = is_dataclass(steering) or (isinstance(steering, Mapping) and "op" not in steering)
    return VECTOR_SPEC if is_other else None


def _has_layers(value: Any) -> bool:
    """Tell whether a value has operations by their layers: in ours `layers` is no mapping."""
    if is_dataclass(value):
        names = {field.name for field in fields(value)}
        return "layers" in names and "vectors" not in names
    is_other = isinstance(value, Mapping) and "op" not in value
    return is_other and isinstance(value.get("layers"), Mapping)


Found = tuple[str, str]
"""The path of a field that would be ignored, and what an error says of it."""


def foreign(given: Mapping[str, Any], path: str = "") -> Found | None:
    """Find a field of another tool that asks for something: None and False (0 in `vllm_xargs`) do
    not. Keys that their own tool reads in this process are none."""
    for key, peers in KNOWN.items():
        value = given.get(key)
        if value is None or (isinstance(value, int) and not value):
            continue
        if not (peers.peer is LENS and _lens_is_loaded()):
            return f"{path}{key}", said(peers)
    return None


def misplaced(given: Mapping[str, Any], path: str) -> Found | None:
    """Find a field of ours, or of another tool, where nothing reads it."""
    for field in PLAN_FIELDS:
        if given.get(field) is not None:
            return (
                f"{path}{field}",
                f"is not read here, and would be ignored; {field!r} is a field of the request "
                "itself",
            )
    return foreign(given, path)


def nested(extra: Mapping[str, Any]) -> Found | None:
    """Find what is `misplaced` in one of `NESTS` among the fields of a body."""
    given = ((name, extra.get(name)) for name in NESTS)
    found = (misplaced(nest, f"{name}.") for name, nest in given if isinstance(nest, Mapping))
    return next((each for each in found if each is not None), None)


def _raise(found: Found | None) -> None:
    if found is not None:
        reject(*found)


def _serves(config: "VllmConfig") -> bool:
    return config.steering_config.enable_steering or config.capture_config.enabled


def _lens_is_loaded() -> bool:
    """Tell whether vLLM-Lens's own plug-in reads its keys in this process."""
    off = os.environ.get("VLLM_LENS_DISABLE", "").lower() in ("1", "true", "yes", "on")
    return _LENS_PLUGIN in sys.modules and not off
