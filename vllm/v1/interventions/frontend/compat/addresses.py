# SPDX-License-Identifier: Apache-2.0
"""Addresses of interp-engine in a capture: `"hooks": ["resid_post.10", "final_norm"]`."""

import re
from collections.abc import Mapping
from typing import Any

from vllm.v1.interventions.errors import show, show_key
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.capture import MAX_CAPTURES
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.values import plain_list

POINTS = {
    "resid_pre": "pre_attn",
    "z": "z",
    "attn_out_post": "attn_out",
    "resid_mid": "post_attn",
    "mlp_in": "mlp_in",
    "mlp_out_post": "mlp_out",
    "resid_post": "post_block",
}
"""Its point of a layer -> ours, which has the same values in every model."""
LAST = "final_norm"
"""Its point of no layer that is our `final`."""
_WEIGHTS = " (use 'attention' in place of 'hooks')"
_INSTEAD = {
    "attn_out": " (use attn_out_post, after the branch's norm)",
    "mlp_out": " (use mlp_out_post, after the branch's norm)",
    "attn_probs": _WEIGHTS,
    "attn_scores": _WEIGHTS,
    "embeddings": " (use our point 'embed', with learned positions)",
    "value": " (use our point 'v', which attention reads)",
}

_NAMES = ", ".join((*POINTS, LAST))
_ADDRESS = re.compile(r"([a-z_]{1,40})(?:\.(\d{1,9}))?", re.ASCII)


def capture_of(capture: Any, path: str, work: Work) -> Any:
    """Return a capture with our points and layers in place of lists of addresses.

    Args:
        capture: `SamplingParams.capture`; other values than mappings are refused elsewhere.
        path: where it stands, for errors.
        work: counts the addresses, before they are read.

    Raises:
        ValueError: one is no address, or of a point that is not read here; the message names it.
    """
    if not isinstance(capture, Mapping):
        return capture
    work.charge(len(capture), Unit.ENTRY, path)
    made = {name: _asked(each, f"{path}.{show_key(name)}", work) for name, each in capture.items()}
    return made if any(made[name] is not capture[name] for name in made) else capture


def _asked(asked: Any, path: str, work: Work) -> Any:
    if isinstance(asked, list):
        if len(asked) > MAX_CAPTURES:  # refused where they are parsed
            return asked
        made = [_asked(one, f"{path}[{i}]", work) for i, one in enumerate(asked)]
        return made if any(new is not old for new, old in zip(made, asked, strict=True)) else asked
    if not isinstance(asked, Mapping) or plain_list(asked.get("hooks")) is None:
        return asked
    return {**asked, "hooks": _hooks(Given(asked["hooks"], f"{path}.hooks"), work)}


def _hooks(given: Given, work: Work) -> dict[str, list[int]]:
    hooks: dict[str, list[int]] = {}
    for entry in given.entries("must be a list of addresses, got {given}", 1):
        work.charge(1, Unit.ENTRY, entry.path)
        text = entry.text("must be an address such as 'resid_post.10', got {given}", _ADDRESS)
        name, _, layer = text.partition(".")
        if name == LAST and not layer:
            hooks.setdefault("final", []).append(-1)
        elif name in POINTS and layer:
            hooks.setdefault(POINTS[name], []).append(int(layer))
        elif name in POINTS:
            entry.refuse(f"names no layer; say '{name}.10'")
        else:
            entry.refuse(
                f"interp-engine's {{given}} is not read here; points are {_NAMES}",
                f"{show(text)}{_INSTEAD.get(name, '')}",
            )
    return hooks
