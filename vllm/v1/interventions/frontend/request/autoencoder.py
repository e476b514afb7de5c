# SPDX-License-Identifier: Apache-2.0
"""Parsing and checks of a request's `features` in a capture."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.features.autoencoder import opened
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.makings import Features
from vllm.v1.interventions.named_features import need_features
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_one_lane

MAX_TOP = 128
"""The most of the most active features that may be asked for."""
MAX_IDS = 64
"""The most features that may be named."""


def hooks_of_features(given: Given, shape: TapShape) -> dict[str, Any]:
    """Return the hooks of the autoencoder that is named.

    Raises:
        ValueError: there is none of the name.
    """
    given.mapping()
    file = need_features(given["name"], shape)
    return {file.point: [file.layer]}


def features_making(given: Given, sites: Sequence[Site], shape: TapShape) -> Features:
    """Parse `{"name": ..., "top": ..., "ids": [...], "above": ..., "error": ...}`.

    Raises:
        ValueError: an unknown key or autoencoder, sites that are not its own, nothing asked for, a
            number out of range, the error of a transcoder.
    """
    asked = given.fields(needed=("name",), allowed=("top", "ids", "above", "error"))
    need_one_lane(given.path, shape)
    file = need_features(asked["name"], shape)
    if list(sites) != [(file.point, file.layer)]:
        asked["name"].refuse(
            f"{{given}} reads {file.point} of layer {file.layer}: leave out hooks, or name it alone"
        )
    autoencoder = opened(file)
    size = autoencoder.num_features
    most = min(MAX_TOP, size)
    top = asked.get("top", 0).int(0, most, f"must be an int from 0 to {most}, got {{given}}")
    message = f"must be a list of at most {MAX_IDS} features"
    unknown = f"feature {{given}} is none of 0-{size - 1}"
    listed = asked.get("ids", ()).entries(message, most=MAX_IDS)
    ids = tuple(one.int(0, size - 1, unknown) for one in listed)
    above = asked.get("above", 0.0).number()
    if above < 0:
        asked["above"].refuse("must be at least 0, got {given}")
    error = asked.get("error", False).flag()
    if error and autoencoder.transcodes:
        asked["error"].refuse(
            f"{asked['name'].plain()} is a transcoder, which writes another site than it reads: "
            "leave error out, and capture both sites' rows"
        )
    if not (top or ids or error):
        asked.refuse("asks for nothing: give top, ids or error")
    return Features(asked["name"].plain(), size, top, ids, above, error, file.stamp)
